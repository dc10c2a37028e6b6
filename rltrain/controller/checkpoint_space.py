"""Whether the disks have room for what is to be written, before any of it is."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ray.exceptions import RayTaskError

from rltrain.actors import node_files
from rltrain.algorithms.advantages import needs_critic
from rltrain.config import Config
from rltrain.config.durable import FULL
from rltrain.config.policy import ParallelConfig
from rltrain.controller.checkpoint_storage import Storage
from rltrain.controller.checks.model_checks import read_model
from rltrain.controller.cluster.disks import Disks
from rltrain.controller.run_checkpoint import checkpoints
from rltrain.planning.memory_terms import gib
from rltrain.planning.policy_memory import count
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.huggingface.manifest import read_manifest

ADAM = 12
"""Bytes of a trained parameter besides the weights: the fp32 master and two moments."""


class DiskFull(RuntimeError):
    """What was to be written does not fit. Nothing of it is left, and the ranks are usable."""


@dataclass(frozen=True)
class Planned:
    """What a run writes, of all ranks together. Bytes are the least: on a CPU, weights without
    ``policy.precision`` take twice as many."""

    parameters: int
    weights: int
    """Bytes of the policy's parameters."""
    whole: int
    """Bytes of a checkpoint to resume from."""


def planned(config: Config, arch: Architecture) -> Planned:
    policy = config.policy.model_copy(update={"parallel": ParallelConfig()})
    alone = config.model_copy(update={"policy": policy})
    width = 4 if policy.precision.params == "fp32" else 2

    def size(model: Architecture) -> tuple[int, int]:
        counts = count(alone, model, 0)
        held = sum(counts.parts.values())
        return held, held * width + (held - counts.frozen - counts.buffers) * ADAM

    parameters, whole = size(arch)
    if needs_critic(config.algorithm):  # a trunk without the head
        whole += size(replace(arch, mtp_layers=0, tie_embeddings=True))[1]
    if config.algorithm.kl.refresh_every > 0:  # the reference
        whole += parameters * width
    return Planned(parameters, parameters * width, whole)


def needed_by_disk(storage: Storage, nodes: Sequence[str], least: int) -> dict[str, int]:
    """Bytes of the next checkpoint, by disk: those of the newest; without one the planned.

    Args:
        nodes: of each rank
        least: planned, of all ranks together
    """
    disks = [storage.disk_of[node] for node in nodes]
    newest = checkpoints(storage.run_dir)[-1:]
    places: Counter[str] = Counter()
    with suppress(ValueError):  # whoever resumes from it says what is wrong with it
        for entry in (entry for path in newest for entry in read_manifest(path).values()):
            places[entry.get("place", storage.driver)] += entry["bytes"]
    if places and places.keys() <= set(disks) | {storage.driver}:
        return dict(places)
    total = places.total() or least  # of other nodes, or below a URL
    return {disk: total * disks.count(disk) // len(disks) for disk in dict.fromkeys(disks)}


def check_first_checkpoint(config: Config, storage: Storage, nodes: Sequence[str]) -> None:
    """There is room for the checkpoint that a run writes next, before minutes go into its start.

    Args:
        nodes: of each rank

    Raises:
        DiskFull: there is not, and the run would end at its first checkpoint.
    """
    settings = config.checkpoint
    if not settings.every or settings.on_full == "skip" or settings.url is not None:
        return
    needed = needed_by_disk(storage, nodes, planned(config, read_model(config)).whole)
    check_free(storage.disks, storage.run_dir, needed, "the run's next checkpoint")


def check_free(disks: Disks, folder: Path, needed: Mapping[str, int], what: str) -> None:
    """There is room for ``what``.

    Args:
        needed: bytes by node

    Raises:
        DiskFull: there is not; it names the nodes, what is needed and what is free.
    """
    free = disks.call_each(node_files.free_bytes, dict.fromkeys(needed, (folder,)))
    lacking = [
        f"{'' if len(disks.nodes) == 1 else f'on {node} '}{amount(size)} needed, "
        f"{amount(free[node])} free"
        for node, size in needed.items()
        if size > free[node]
    ]
    if lacking:
        raise DiskFull(
            f"{what}: expected room on the disk of {folder}, found too little: "
            f"{'; '.join(lacking)}. Free some space, or use another disk [RL6005]"
        )


def amount(nbytes: int) -> str:
    return f"{gib(nbytes)} ({nbytes:,} bytes)"


def is_full(error: BaseException) -> bool:
    """Whether a full disk is behind an error, of this process or of an actor."""
    return any(
        isinstance(cause, DiskFull) or (isinstance(cause, OSError) and cause.errno in FULL)
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        inner = error.cause if isinstance(error, RayTaskError) else error.__cause__
        error = inner if isinstance(inner, BaseException) else None
