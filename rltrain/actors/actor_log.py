"""The log file of an actor's process, in the run's folder, where it outlives Ray's session.

    RUN/logs/engine-0.log    policy-3.log    critic-0.log

The processes that an actor starts write into its file, too; vLLM's engine is one. An actor on a
node without the run's folder writes into Ray's own files, below ``RUN/ray-logs``.
"""

import logging
import os
import re
import sys
from datetime import datetime
from pathlib import Path

LOG = "RLTRAIN_LOG"
"""Environment variable of an actor's process: the path of its file."""
FOLDER = "RLTRAIN_LOG_FOLDER"
"""Environment variable of the controller's process: the folder of all these files."""
_MARK = re.compile(r"^=== process (\d+) starts, .* ===\n", re.MULTILINE)


def redirect_output() -> None:
    """Append this process's stdout and stderr to its file, if it has one."""
    name = os.environ.get(LOG)
    if not name or not Path(name).parent.is_dir():
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    os.write(2, f"=== process {os.getpid()} starts, {now} ===\n".encode())
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, force=True)
    logging.getLogger("rltrain").setLevel(logging.INFO)


def find_log(pid: int) -> Path | None:
    """The file of the actor with the process id ``pid``; None where it has none here."""
    folder = os.environ.get(FOLDER)
    for file in sorted(Path(folder).glob("*.log")) if folder else ():
        if log_of_process(file.read_text(errors="replace"), pid):
            return file
    return None


def log_of_process(text: str, pid: int) -> str:
    """The part of a log that process ``pid`` and its children wrote; "" if it wrote none."""
    _, *parts = _MARK.split(text)
    written = dict(zip(parts[::2], parts[1::2], strict=True))
    return written.get(str(pid), "")
