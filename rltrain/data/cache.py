"""The cache on disk: folders that are written atomically, named by their content."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def save_atomically(path: Path, save: Callable[[Path], object]) -> None:
    """Run ``save`` on a temporary folder and rename it to ``path``, so that it is complete or
    absent.

    Raises:
        ValueError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ValueError(
            f"cannot write to {path.parent} ({error.strerror}): set model.cache_dir to a folder "
            "that can be written"
            " [RL6001]"
        ) from error
    try:
        save(folder)
        if not path.exists():  # another process may have written it
            os.rename(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
