"""The cache on disk: folders that are written atomically, named by their content, and pruned."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError


def save_atomically(path: Path, save: Callable[[Path], object]) -> None:
    """Run ``save`` on a temporary folder and rename it to ``path``, so that it is complete or
    absent.

    Raises:
        ValueError: the folder cannot be written, or its disk is full.
    """
    folder = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        save(folder)
        if not path.exists():  # another process may have written it
            os.rename(folder, path)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot write to {path.parent} ({why}): free some space there, or set model.cache_dir "
            "to a folder that can be written"
            " [RL6001]"
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def prune(folders: Iterable[Path], max_days: float, max_bytes: int) -> None:
    """Remove the ``folders`` that were not used for ``max_days``, and those used longest ago while
    all take up more than ``max_bytes``. The one used last stays.

    A folder's modification time is when it was last used.
    """
    oldest = time.time() - max_days * 24 * 3600
    total = 0
    for number, folder in enumerate(sorted(folders, key=_modified, reverse=True)):
        total += sum(file.stat().st_size for file in folder.iterdir())
        if number > 0 and (_modified(folder) < oldest or total > max_bytes):
            shutil.rmtree(folder)


def _modified(path: Path) -> float:
    return path.stat().st_mtime
