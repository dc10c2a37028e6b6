"""What one rank does for a checkpoint once its tensors are on the host: at once, or beside the
training."""

import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from rltrain.config.durable import sync
from rltrain.policy.sharded_save import Staged, all_or_none
from rltrain.weights.huggingface.manifest import ManifestEntry, entries_of

Entries = dict[str, ManifestEntry]

_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")
"""The name of a file of tensors; torch.distributed.checkpoint puts the rank into it."""


class RankSave:
    """Writes, flushes and hashes this rank's files of one folder.

    Args:
        in_background: begin now, in a thread; else all is done by `finish`
    """

    def __init__(self, staged: Staged, rank: int, *, in_background: bool) -> None:
        self._staged, self._rank = staged, rank
        self._writing: Future[Entries] | None = None
        if in_background:
            thread = ThreadPoolExecutor(1, "checkpoint")
            self._writing = thread.submit(self._write)
            thread.shutdown(wait=False)

    def is_written(self) -> bool:
        """Whether the thread is done, with its files or an error; True where there is none."""
        return self._writing is None or self._writing.done()

    def wait(self) -> None:
        """Until `is_written`. The error stays for `finish`."""
        if self._writing is not None:
            wait([self._writing])

    def finish(self) -> Entries:
        """All ranks have written: add the index. Collective.

        Returns:
            of the files that this rank wrote

        Raises:
            OSError: on all ranks, where one could not write; all are usable afterwards.
        """
        with all_or_none(self._staged.folder):
            entries = self._write() if self._writing is None else self._writing.result()
        self._staged.finish()
        with all_or_none(self._staged.folder):
            entries |= self._flushed(without=list(entries))
        return entries

    def _write(self) -> Entries:
        self._staged.write()
        return self._flushed()

    def _flushed(self, without: Sequence[str] = ()) -> Entries:
        folder = self._staged.folder
        names = [n for n in files_of_rank(folder, self._rank) if n not in without]
        for written in (*(folder / name for name in names), folder, folder.parent):
            sync(written)
        return entries_of(folder, names)


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """Names of the files in ``folder`` that ``rank`` wrote; rank 0 writes what has no rank in its
    name, too."""
    by = {path.name: _OF_RANK.fullmatch(path.name) for path in folder.iterdir()}
    return sorted(name for name, of in by.items() if (int(of[1]) if of else 0) == rank)
