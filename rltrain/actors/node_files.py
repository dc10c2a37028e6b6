"""What is done with files on the node that has them; the controller calls these functions there.

None of them knows Ray. Files go from node to node in pieces, each a call that reads and one that
writes, so that no process holds more than a few pieces.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from rltrain.config.durable import rename_durably, sync, write_durably
from rltrain.weights.huggingface.manifest import (
    MANIFEST,
    ManifestEntry,
    check_files,
)
from rltrain.weights.huggingface.remote_folder import RemoteFolder

PARTIAL = ".partial"
"""What a name ends in that is left over if the process was killed; it begins with a dot."""
UNFINISHED = ".unfinished"
"""A file in the folder of a checkpoint that this node has written and the controller may not have
committed. Without it nothing is removed that lacks a manifest."""
ASIDE = "set_aside"
"""The folder, among those of checkpoints, of the ones that a run did not go on from."""
STEP = re.compile(r"step_[0-9]+")


def write_token(folder: Path, name: str) -> str | None:
    """Returns why it cannot be written, or None. The folder is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"1")  # an empty file fits on a full disk
    except OSError as error:
        return error.strerror or str(error)
    return None


def seen_tokens(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that this node sees. A name that was never asked for is not in the cache
    of a network file system, which could answer for it."""
    return [name for name in names if (folder / name).exists()]


def remove_files(folder: Path, names: Sequence[str]) -> None:
    """And the folders that are empty without them."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    for parent in {(folder / name).parent for name in names}:
        with suppress(OSError):  # it has other files
            parent.rmdir()


def keep_only(folder: Path, names: Sequence[str]) -> None:
    """Remove everything else in ``folder``."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in names:
            path.unlink()


def sizes_of(folder: Path) -> dict[str, int] | None:
    """Bytes of every file below ``folder``; None where there is no such folder."""
    if not folder.is_dir():
        return None
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }


def free_bytes(folder: Path) -> int:
    """Of the disk that holds ``folder`` or is to hold it."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free


def read_piece(path: Path, start: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(size)


def write_piece(path: Path, start: int, data: bytes) -> None:
    """Pieces of a file may come in any order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.seek(start)
        file.write(data)


def write_file(path: Path, data: bytes) -> None:
    """A small one; it is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, data)


def read_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Those that are there."""
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def take_in(incoming: Path, folder: Path, entries: Mapping[str, ManifestEntry]) -> None:
    """Move files that came from elsewhere from ``incoming`` to ``folder``, once they are what the
    manifest says.

    Raises:
        ValueError: one is not.
    """
    check_files(incoming, entries)
    for name in entries:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(incoming / name, folder / name)
    shutil.rmtree(incoming, ignore_errors=True)


def download(url: str, names: Sequence[str], incoming: Path) -> None:
    RemoteFolder(url).get({name: incoming / name for name in names})


# Checkpoints, in the folder that holds them all


def make_ready(folder: Path) -> None:
    """The folder is there, without what killed processes left half-written."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
    remove_leftovers(folder)


def step_folders(folder: Path) -> list[str]:
    """Names of the folders of steps, whatever is in them."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [path.name for path in paths if STEP.fullmatch(path.name) and path.is_dir()]


def rename(partial: Path, target: Path) -> None:
    """A rank on this node may have written nothing, and then there is nothing to rename.

    Whoever wrote files has flushed them; the names of folders are flushed here.
    """
    if partial.is_dir():
        remove(target)
        sync(partial)
        rename_durably(partial, target)


def rename_unfinished(partial: Path, target: Path) -> None:
    """As `rename`, until `finish`."""
    if partial.is_dir():
        (partial / UNFINISHED).touch()
        rename(partial, target)


def finish(target: Path, record: Mapping[str, bytes]) -> None:
    """The controller has committed the checkpoint of this record, by file name."""
    for name, data in record.items():
        write_file(target / name, data)
    (target / UNFINISHED).unlink(missing_ok=True)


def link(folder: Path, name: str, target: str) -> None:
    """``folder/name`` leads to ``folder/target``, if that is here; else there is no such name."""
    at, new = folder / name, folder / f".{name}{PARTIAL}"
    remove(at)
    if (folder / target).is_dir():
        remove(new)
        new.symlink_to(target)
        rename_durably(new, at)


def remove(path: Path) -> None:
    """A folder or a link. It has no such name any more before the first file goes."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        gone = path.with_name(f".{path.name}.removed{PARTIAL}")
        shutil.rmtree(gone, ignore_errors=True)
        rename_durably(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(folder: Path, known: Sequence[str] | None = None) -> None:
    """What killed processes left half-written in ``folder``.

    Args:
        known: names of checkpoints that are complete somewhere; others that are `UNFINISHED` go
    """
    for path in list(folder.glob("*")) if folder.is_dir() else []:
        if path.name.startswith(".") and path.name.endswith(PARTIAL):
            remove(path)
        elif known is not None and (path / UNFINISHED).is_file():
            if path.name in known:
                finish(path, {})
            else:
                remove(path)


def set_aside(folder: Path, names: Sequence[str]) -> None:
    """Move the folders of these names out of the way, into `ASIDE`."""
    for name in names:
        if os.path.lexists(folder / name):
            (folder / ASIDE).mkdir(exist_ok=True)
            ends = chain([""], (f".{n}" for n in count(2)))
            places = (folder / ASIDE / f"{name}{end}" for end in ends)
            os.rename(folder / name, next(at for at in places if not os.path.lexists(at)))


def records(folder: Path) -> list[str]:
    """Names of the checkpoints in ``folder`` whose manifest is on this node; no links."""
    found = [path.parent for path in folder.glob(f"*/{MANIFEST}")]
    return sorted(at.name for at in found if not (at.is_symlink() or at.name.startswith(".")))
