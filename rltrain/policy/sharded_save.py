"""Writing Megatron's distributed format so that a rank that cannot write leaves the others usable.

`megatron.core.dist_checkpointing.save` writes `common.pt`, `.metadata` and `metadata.json` between
collective calls. Where a disk is full, rank 0 raises there, and the others wait for it in the next
collective until that times out. Here the same parts run in the same order, and after each one that
writes the ranks tell each other how it went: all of them raise, or none.

A rank writes its files in threads. Megatron forks a process for each, and starts two more to bring
their results back, which takes longer than writing a small model. Between the plan and the index of
all tensors no rank needs another: that part can be done beside other work (`rank_save`).

Read against megatron-core 0.16.1; other versions are refused.
"""

import errno
import inspect
import io
import queue
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from rltrain.config.durable import write_durably
from rltrain.patches.megatron import MEGATRON
from rltrain.patches.registry import PatchRefused

FULL_BYTES = 2**20
"""A write that failed for a reason that nobody kept found a full disk, if this much is free."""
SHOWN = 3
"""Ranks in a message."""


@contextmanager
def all_or_none(folder: Path) -> Iterator[None]:
    """What is inside, each rank does by itself; if a rank fails in it, all raise. Collective.

    A collective call inside must not come after what may fail.

    Raises:
        OSError: naming the ranks that failed, with the error number of the first.
    """
    failure: OSError | None = None
    try:
        yield
    except (OSError, RuntimeError) as error:
        failure = _as_os_error(error, folder)
    answers: list[OSError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, failure)
    failed = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    if failed:
        shown = [f"rank {rank}: {error.strerror}" for rank, error in failed.items()][:SHOWN]
        more = f" and {len(failed) - SHOWN} more ranks" if len(failed) > SHOWN else ""
        raise OSError(next(iter(failed.values())).errno, "; ".join(shown) + more)


@dataclass
class Staged:
    """A save of which the ranks have made the plan, and each has its tensors on the host."""

    folder: Path
    strategy: "_Strategy"
    buckets: Sequence[Any]
    """By file, what this rank writes."""
    transforms: list[Any]
    results: Sequence[Any] = ()
    """What was written, for the index of all tensors."""

    def write(self) -> None:
        """Write this rank's tensors, in any thread: no other rank takes part.

        Raises:
            Exception: as the thread that wrote them, an OSError with its error number.
        """
        self.results = _write_files(self.buckets, self.transforms)
        self.buckets = ()

    def finish(self) -> None:
        """Write the index, once all ranks have written. Collective.

        Raises:
            OSError: as `stage`.
        """
        gathered = self.strategy.group.gather_object(list(self.results))
        with all_or_none(self.folder):
            if dist.get_rank() == 0:
                self.strategy.writer.finish(self.strategy.metadata, gathered)
                config = CheckpointingConfig(self.strategy.backend, self.strategy.version)
                save_config(config, str(self.folder))


def stage(state: dict[str, Any], folder: Path, metadata: dict[str, Any], *, copies: bool) -> Staged:
    """Begin to write ``state`` into ``folder``, which is empty or absent on each node. Collective.

    Args:
        metadata: what `dist_checkpointing` calls ``content_metadata``
        copies: whether ``state`` may change before all is written

    Raises:
        OSError: on all ranks, where one could not write; then all are ready for other calls.
    """
    _use_own_queue()
    is_first = dist.get_rank() == 0
    sharded, common = save_preprocess({**state, "content_metadata": metadata})
    with all_or_none(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if is_first:
            # torch.save loses the error number of a file that it writes itself.
            buffer = io.BytesIO()
            torch.save(common, buffer)
            write_durably(folder / COMMON_STATE_FNAME, buffer.getbuffer())
    strategy = _Strategy("torch_dist", 1)
    with all_or_none(folder):  # the plans are exchanged first, then queues and processes made
        request = strategy.async_save(sharded, folder)
        buckets, transforms = _on_host(request, strategy.writer.write_buckets or [], copies)
    strategy.writer.write_buckets = None  # the model's own tensors, which nothing reads any more
    return Staged(folder, strategy, buckets, transforms)


def _on_host(
    request: AsyncRequest, live: Sequence[Any], copies: bool
) -> tuple[Sequence[Any], list[Any]]:
    """What this rank writes, and how.

    Args:
        live: the same with the model's own tensors, of which those on a CPU are written as they are
            unless there are to be copies
    """
    if request.async_fn is None:  # this rank has nothing to write
        return [], []
    assert request.preload_fn is not None
    buckets = request.preload_fn()
    if copies:
        buckets = [
            (file, key, (data, [_copied(item, old) for item, old in zip(own, of, strict=True)]))
            for (file, key, (data, own)), (_, _, (_, of)) in zip(buckets, live, strict=True)
        ]
    return buckets, request.async_fn.args[0]


def _copied(on_host: tuple[Any, torch.Tensor], live: tuple[Any, torch.Tensor]) -> Any:
    item, tensor = on_host
    return item, tensor.clone() if live[1].is_cpu else tensor


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's, of which the parts after the plan are called one by one."""

    writer: Any
    metadata: Any
    """Of all tensors; None but on rank 0."""
    group: Any

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> AsyncRequest:
        self.writer, self.metadata, self.group = planned
        return super()._get_save_and_finalize_callbacks(writer, planned)


def _write_files(buckets: Sequence[Any], transforms: list[Any]) -> list[Any]:
    """Write the files of ``FileSystemWriterAsync.write_buckets`` and flush them.

    Raises:
        Exception: the first that a file met; the others are written.
    """
    if not buckets:
        return []
    outcomes: queue.Queue[tuple[int, Any]] = queue.Queue()
    # Without the decorator that stops garbage collection, in this process and not in a fork of it.
    write_one = inspect.unwrap(FileSystemWriterAsync.write_preloaded_data)

    def write(number: int) -> None:
        begun: queue.Queue[int] = queue.Queue()  # from which Megatron takes what it has done
        begun.put(number)
        write_one(transforms, number, buckets[number], outcomes, begun, use_fsync=True)

    with ThreadPoolExecutor(len(buckets)) as threads:
        for _ in threads.map(write, range(len(buckets))):
            pass
    by_number = dict(outcomes.get_nowait() for _ in buckets)
    for outcome in by_number.values():
        if isinstance(outcome, Exception):
            raise outcome
    return [result for number in sorted(by_number) for result in by_number[number]]


def _use_own_queue() -> None:
    """Megatron puts what a save has written into a queue of its module, which it makes at the first
    save, in a process started anew. No other process of ours writes.

    Raises:
        PatchRefused: it is another version, in which the queue may be another thing.
    """
    (package,), versions = MEGATRON
    if f"=={version(package)}" != versions:
        raise PatchRefused(
            f"saving was read against {package}{versions}, found {version(package)}: read "
            "dist_checkpointing/strategies/filesystem_async.py, then widen or drop it [RL4006]"
        )
    filesystem_async._results_queue = queue.Queue()


def _as_os_error(error: OSError | RuntimeError, folder: Path) -> OSError:
    """With a number and a text of its own, so that it can be sent."""
    if isinstance(error.__cause__, OSError):  # which was put into a sentence
        error = error.__cause__
    if isinstance(error, OSError) and error.errno:
        return OSError(error.errno, f"{error.strerror}: {error.filename or folder}")
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if shutil.disk_usage(there).free < FULL_BYTES:
        return OSError(errno.ENOSPC, f"No space left on device: {folder} ({error})")
    return OSError(errno.EIO, str(error))
