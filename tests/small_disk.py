"""A disk of a few KiB: a tmpfs, in a mount namespace of a process of its own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def on_small_disk(code: str, kib: int) -> str:
    """What Python code writes to stdout and stderr. It finds the disk in ``DISK``, a `Path`."""
    with tempfile.TemporaryDirectory(prefix="rl-disk-") as folder:
        mount = f'mount -t tmpfs -o size={kib}k none {folder} && exec "$@"'
        begin = f"from pathlib import Path\nDISK = Path({folder!r})\n"
        command = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-c", begin + code]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    if "unshare failed" in done.stderr or done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip("no mount namespaces here")
    return done.stdout + done.stderr
