"""A folder that appears complete or not at all, and tensors in lists that fit a file."""

import fcntl
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from rltrain.config.durable import rename_durably, sync_all

Key = TypeVar("Key")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """An empty folder to fill. The end of the block renames it to ``out``; an error removes it.

    It is in ``.OUT.partial`` beside ``out``. Leftovers of a killed process are removed first.

    Raises:
        ValueError: ``out`` exists, or another process is writing it.
    """
    if out.exists():
        raise ValueError(f"{out} exists already: choose another folder to write to [RL6009]")
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{out}: another process is writing it; wait for that one [RL6009]"
            ) from error
        folder = partial / "new"
        try:
            shutil.rmtree(folder, ignore_errors=True)  # mkdir reports what could not be removed
            folder.mkdir()
            yield folder
            sync_all(folder)
            rename_durably(folder, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def split_by_bytes(
    tensors: Iterable[tuple[Key, Tensor]], max_bytes: int
) -> Iterator[list[tuple[Key, Tensor]]]:
    """Lists of at most ``max_bytes``, or of one tensor. A list is cleared before the next one."""
    shard: list[tuple[Key, Tensor]] = []
    nbytes = 0
    for key, tensor in tensors:
        if shard and nbytes + tensor.nbytes > max_bytes:
            yield shard
            shard.clear()
            nbytes = 0
        shard.append((key, tensor))
        nbytes += tensor.nbytes
    yield shard
