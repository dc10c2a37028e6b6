"""How fast ``rltrain import`` and ``export`` are, beside ``cp`` on the same disk, and their memory.

    python -m benchmarks.convert [folder=DIR] [name=value ...]     fields of `Size`

Makes a Hugging Face folder of a Qwen3-MoE's shape with random bf16 weights. Every round copies it
with ``cp``, imports it, and exports the import. All three find their source in the page cache.
They are timed until their bytes are on the disk: ``cp`` is followed by a ``sync`` of its files, and
the other two sync what they write. ``check`` is the part of an export that hashes
the checkpoint against its manifest. Megatron's start-up, the same for any model, is timed alone.

Memory is the growth of the converting process's anonymous pages after it opened the source, sampled
every 2 ms. Sampling takes time, so it has a round of its own.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from rltrain.policy.megatron.checkpoint_probe import stored_model
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters, read_architecture
from rltrain.weights.huggingface.export import export_checkpoint, write_safetensors
from rltrain.weights.huggingface.import_checkpoint import import_huggingface
from rltrain.weights.huggingface.manifest import check_manifest
from rltrain.weights.huggingface.stored_model import StoredModel, parameter_numel

MB = 1e6
STORED = "stored.json"


@dataclass(frozen=True)
class Size:
    layers: int = 9
    hidden: int = 1024
    experts: int = 32
    expert_size: int = 768
    vocab_size: int = 151_936
    shard_mib: int = 512
    max_file_mib: int = 1024
    rounds: int = 3


def config(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 4 * size.hidden,
        "num_experts": size.experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": size.expert_size,
        "norm_topk_prob": True,
        "vocab_size": size.vocab_size,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }


def make_model(folder: Path, size: Size) -> Architecture:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(size)))
    arch = read_architecture(folder)
    generator = torch.Generator().manual_seed(0)

    def tensors() -> Any:
        for parameter in model_parameters(arch):
            for tensor in parameter.tensors:
                values = torch.randn(tensor.shape, generator=generator, dtype=torch.bfloat16)
                yield tensor.name, values

    write_safetensors(folder, tensors(), size.shard_mib * 2**20)
    return arch


class Memory:
    """The largest growth of this process's anonymous memory while the block runs, in bytes."""

    def __enter__(self) -> Self:
        self.start, self.peak = anonymous(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, anonymous() - self.start)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


class Silent:
    def advance(self, elements: int, nbytes: int) -> None:
        pass


def convert(what: str, root: Path, max_file_mib: int, sampled: bool) -> None:
    """In a process of its own: convert, print seconds and, where it is ``sampled``, the peak."""
    stored = StoredModel.from_json((root / STORED).read_text())
    source = root / "source"
    arch = read_architecture(source)
    torch.set_num_threads(1)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    before = usage.ru_utime + usage.ru_stime
    checked = 0.0
    with Memory() if sampled else nullcontext() as memory:
        start = time.monotonic()
        if what == "import":
            import_huggingface(
                source, root / "imported", arch, stored, Silent(), max_file_mib * 2**20
            )
        else:
            check_manifest(root / "imported")
            checked = time.monotonic() - start
            export_checkpoint(
                root / "imported",
                root / "imported" / "huggingface",
                root / "exported",
                arch,
                stored,
                Silent(),
                max_file_mib * 2**20,
            )
        seconds = time.monotonic() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = usage.ru_utime + usage.ru_stime - before
    peak = memory.peak if memory else 0
    print(json.dumps({"seconds": seconds, "check": checked, "cpu": cpu, "peak": peak}))


def copy(source: Path, target: Path) -> dict[str, float]:
    """``cp -r`` until the bytes are on the disk."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *target.iterdir()], check=True)
    seconds = time.monotonic() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "check": 0.0, "cpu": cpu, "peak": 0.0}


def in_process(what: str, root: Path, size: Size, sampled: bool = False) -> dict[str, float]:
    arguments = [what, str(root), str(size.max_file_mib), "sampled" if sampled else "timed"]
    command = [sys.executable, "-m", "benchmarks.convert", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def main(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] in ("import", "export"):
        what, root, mib, how = arguments
        convert(what, Path(root), int(mib), how == "sampled")
        return
    values = dict(argument.split("=", 1) for argument in arguments)
    root = Path(values.pop("folder", "/tmp")) / f"rltrain-convert-{os.getpid()}"
    types = {field.name: field.type for field in fields(Size)}
    size = Size(**{name: types[name](value) for name, value in values.items()})
    try:
        measure(root, size)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def remove(root: Path) -> None:
    for name in ("copied", "imported", "exported"):
        shutil.rmtree(root / name, ignore_errors=True)


def settle(root: Path, nbytes: int) -> None:
    """Nothing is left to be written, and ``nbytes`` of free memory are the machine's own.

    A virtual machine gets memory when it is first touched, which costs more than to copy into it.
    """
    os.sync()
    block = bytes(2**20)
    with open(root / "filler", "wb", buffering=0) as file:
        for _ in range(nbytes // len(block)):
            file.write(block)
    (root / "filler").unlink()


def measure(root: Path, size: Size) -> None:
    arch = make_model(root / "source", size)
    start = time.monotonic()
    (root / STORED).write_text(stored_model(arch).to_json())
    print(f"Megatron's answer where parameters lie: {time.monotonic() - start:.1f} s")
    total = sum(file.stat().st_size for file in (root / "source").iterdir())
    largest = max(parameter_numel(parameter) for parameter in model_parameters(arch)) * 2
    print(f"{total / MB:,.0f} MB, largest parameter {largest / MB:,.0f} MB")
    rows: dict[str, list[dict[str, float]]] = {"cp": [], "import": [], "export": []}
    for number in range(size.rounds):
        remove(root)
        settle(root, total)
        rows["cp"].append(copy(root / "source", root / "copied"))
        shutil.rmtree(root / "copied")
        for what in ("import", "export"):
            settle(root, total)
            rows[what].append(in_process(what, root, size))
        seconds = {what: round(row[-1]["seconds"], 2) for what, row in rows.items()}
        print(f"round {number}, load {os.getloadavg()[0]:.1f}: {seconds}", flush=True)
    remove(root)
    peaks = {what: in_process(what, root, size, sampled=True)["peak"] for what in list(rows)[1:]}
    reference = statistics.median(row["seconds"] for row in rows["cp"])
    print(
        "| what | s | MB/s | of cp | check, s | CPU s | peak, MB |\n|---|---|---|---|---|---|---|"
    )
    for what, row in rows.items():
        seconds, check, cpu = (
            statistics.median(r[key] for r in row) for key in ("seconds", "check", "cpu")
        )
        peak = peaks.get(what, 0)
        print(
            f"| {what} | {seconds:.2f} | {total / MB / seconds:,.0f} | {reference / seconds:.2f} | "
            f"{check:.2f} | {cpu:.2f} | {peak / MB:,.0f} |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
