"""Files that are whole on the disk or not there, also after a power cut.

A rename alone is not enough: the new name may reach the disk before the content does, and then it
leads to an empty file. So the content is flushed first, and the folder, which has the name, last.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_FLUSH = (errno.EINVAL, errno.ENOTSUP)
"""What file systems answer that cannot flush a folder."""


def write_durably(path: Path, content: str | bytes | memoryview) -> None:
    """Replace a file, or make it. It is written as ``.NAME.partial`` and then renamed.

    Raises:
        OSError: as `explained`; what was there before is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise explained(error, path) from error


def rename_durably(source: Path, target: Path) -> None:
    """Rename within a folder; the content of ``source`` was flushed before."""
    os.replace(source, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if not (error.errno in NO_FLUSH and path.is_dir()):
            raise
    finally:
        os.close(file)


def sync_all(folder: Path) -> None:
    """Flush a folder and everything below it."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            sync(path)


def explained(error: OSError, path: Path) -> OSError:
    """The same kind of error in a sentence that says what to do."""
    if error.errno in FULL:
        return OSError(
            error.errno,
            f"the disk that holds {path} is full: free some space, or choose another folder. A run "
            "that had begun goes on with trainer.resume=auto [RL6005]",
        )
    return OSError(
        error.errno or errno.EIO,
        f"{path} cannot be written ({error.strerror or error}): choose another folder [RL6001]",
    )
