"""Writes a folder that appears whole or not at all, and goes on where it was interrupted.

    with Journal(out, identity) as journal:      # .OUT.partial/, beside OUT
        for name, ... in plan[len(journal.parts):]:
            with journal.part(name) as part:     # hashed as it is written
                part.write(...)
        journal.finish()                         # OUT is there

``journal.jsonl`` in the partial folder holds a line for what is being written and from what, and
one for every finished part, so a line is there only when its part is whole and on disk.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypedDict

from rltrain.weights import manifest
from rltrain.weights.manifest import Entry

_NAME = "journal.jsonl"
_WORTH_A_THREAD = 2**18


class Part(TypedDict):
    """One finished file, by its path in the folder, and what its writer wants to know of it."""

    name: str
    entry: Entry
    notes: list[Any]


class PartFile:
    """A file that is written from front to back, and hashed at the same time by another thread."""

    def __init__(self, path: Path, hasher: Executor) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (close() closes it)
        self._hasher = hasher
        self._digest = hashlib.sha256()
        self._size = 0
        self.notes: list[Any] = []
        self.error: OSError | None = None
        """What went wrong first. ``torch.save`` puts an error of its own in its place."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes < _WORTH_A_THREAD:
            self._digest.update(view)
            self._write(view)
        else:
            hashed = self._hasher.submit(self._digest.update, view)
            self._write(view)
            hashed.result()
        self._size += view.nbytes
        return view.nbytes

    def _write(self, view: memoryview) -> None:
        done = 0
        try:
            while done < view.nbytes:
                done += self._file.write(view[done:])
        except OSError as error:
            self.error = self.error or error
            raise

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """``torch.save`` calls it; nothing is buffered."""

    def close(self) -> Entry:
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}

    def abandon(self) -> None:
        self._file.close()


class Journal:
    """The partial folder of ``out``; ``parts`` are those that are finished and still the same.

    Raises:
        ValueError: ``out`` exists, another process writes it, the partial folder was begun from
            something else than ``identity`` (a JSON object) says, or a part in it was changed.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        if out.exists():
            raise ValueError(f"{out} exists already: choose another folder to write to")
        self.out = out
        self.folder = out.with_name(f".{out.name}.partial")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._hasher = ThreadPoolExecutor(1)
        self._file = open(self.folder / _NAME, "a+b")  # noqa: SIM115 (the context closes it)
        try:
            self._lock()
            self.parts = self._resume(identity)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{self.folder}: another process is writing it; wait for that one"
            ) from error

    def _resume(self, identity: dict[str, Any]) -> list[Part]:
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        # The last line is empty, or was being written when the process died.
        self._file.truncate(sum(len(line) + 1 for line in lines[:-1]))
        begun = [json.loads(line) for line in lines[:-1]]
        if not begun:
            self._empty()
            self._append(identity)
            return []
        was, now = begun[0], json.loads(json.dumps(identity))
        if was != now:
            changed = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))
            raise ValueError(
                f"{self.folder} was begun with other {', '.join(changed)}: go on with the same "
                "source and arguments, or remove it to start again"
            )
        parts: list[Part] = begun[1:]
        for part in parts:
            file = self.folder / part["name"]
            if not file.is_file() or manifest.entry_of(file) != part["entry"]:
                raise ValueError(
                    f"{file} is not what was written: it was changed since; remove {self.folder} "
                    "to start again"
                )
        return parts

    def _empty(self) -> None:
        """What lies here without a journal is of nobody."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _NAME:
                path.unlink()

    @contextmanager
    def part(self, name: str) -> Iterator[PartFile]:
        """The next file; it counts once the block is left, and not if by an error."""
        file = PartFile(self.folder / name, self._hasher)
        try:
            yield file
            entry = file.close()
        except BaseException as error:
            file.abandon()
            raise (file.error or error) from None
        part = Part(name=name, entry=entry, notes=file.notes)
        self._append(part)
        self.parts.append(part)

    def _append(self, value: Any) -> None:
        self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, *, with_manifest: bool) -> None:
        """Take the journal away and rename the folder to what it is to be."""
        (self.folder / _NAME).unlink()
        known = {part["name"]: part["entry"] for part in self.parts}
        if with_manifest:
            manifest.write(self.folder, known)
        for path in self.folder.rglob("*"):
            if str(path.relative_to(self.folder)) not in known:
                _sync(path)
        os.rename(self.folder, self.out)
        _sync(self.out.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._hasher.shutdown()


def _sync(path: Path) -> None:
    """A file's content, or a folder's names, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
