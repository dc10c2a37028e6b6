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
    text = redacted_text(str(error), os.environ)
    if not isinstance(error, ValueError | RuntimeError | OSError):
        text = f"{type(error).__name__}: {text}"
    text = coded(error, text)
    indented = text.replace("\n", "\n  ")
    sys.stderr.write(f"{headline}\n  {indented}\n{help_line(text)}")
    return status


def keep_traceback(folder: Path | None = None) -> Path:
    """Write the traceback of the current error to ``error.log``, and return its path.

    A new temporary file is used without a folder, or if the folder cannot be written.
    """
    from rltrain.actors.last_error import strip_ray_frames
    from rltrain.config.redact import redacted_text

    text = redacted_text(strip_ray_frames(traceback.format_exc()), os.environ)
    if folder is not None:
        with suppress(OSError):  # the disk may be full, and that is the error to show
            (folder / "error.log").write_text(text, encoding="utf-8")
            return folder / "error.log"
    with tempfile.NamedTemporaryFile(
        "w", prefix="rltrain-error-", suffix=".log", delete=False, encoding="utf-8"
    ) as file:
        with suppress(OSError):
            file.write(text)
        return Path(file.name)
