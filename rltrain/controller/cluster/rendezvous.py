"""The file by which the processes of a group find one another."""

import shutil
import tempfile
import weakref
from pathlib import Path


def rendezvous_file(owner: object) -> Path:
    """A path in a new folder, for the group's `FileStore`. A file has no port to collide with.

    The folder is removed with ``owner``, at the latest when this process exits.
    """
    folder = tempfile.mkdtemp(prefix="rltrain-rendezvous-")
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / "group"
