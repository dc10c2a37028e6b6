"""How a command fails: one message, an exit status, and the traceback in a file.

The exit status is 1 for a failure, 2 for a bad request, 130 and 143 after SIGINT and SIGTERM.
"""

import os
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path


def fail(headline: str, error: Exception, status: int) -> int:
    """Print the error in the terminal. Errors not written for users are shown with their class."""
    if os.environ.get("RLTRAIN_DEBUG") == "1":
        raise error
    from rltrain.config.error_codes import coded, help_line
    from rltrain.config.redact import redacted_text

    error = getattr(error, "cause", None) or error
    # Without "[Errno 28]", where it is a sentence of ours.
    plain = error.strerror if isinstance(error, OSError) and error.filename is None else None
    text = redacted_text(plain or str(error), os.environ)
    if not isinstance(error, ValueError | RuntimeError | OSError):
        text = f"{type(error).__name__}: {text}"
    text = coded(error, text)
    indented = text.replace("\n", "\n  ")
    with suppress(OSError):  # a log file on a full disk; the status still says that it failed
        sys.stderr.write(f"{headline}\n  {indented}\n{help_line(text)}")
    return status


def keep_traceback(folder: Path | None = None) -> str:
    """Write the traceback of the current error to ``error.log``; returns where its details are.

    A new temporary file is used without a folder, or if the folder cannot be written. Where no disk
    has room, the details are those of a run with ``RLTRAIN_DEBUG=1``.
    """
    from rltrain.actors.last_error import strip_ray_frames
    from rltrain.config.redact import redacted_text

    text = redacted_text(strip_ray_frames(traceback.format_exc()), os.environ)
    if folder is not None:
        with suppress(OSError):  # the disk may be full, and that is the error to show
            (folder / "error.log").write_text(text, encoding="utf-8")
            return f"{folder / 'error.log'} has the details"
    with (
        suppress(OSError),
        tempfile.NamedTemporaryFile(
            "w", prefix="rltrain-error-", suffix=".log", delete=False, encoding="utf-8"
        ) as file,
    ):
        file.write(text)
        file.flush()
        return f"{file.name} has the details"
    return "RLTRAIN_DEBUG=1 shows the details"
