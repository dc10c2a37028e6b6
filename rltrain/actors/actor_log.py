"""The log file of an actor's process, in the run's folder, where it outlives Ray's session.

    RUN/logs/engine-0.log    policy-3.log    critic-0.log

The processes that an actor starts write into its file, too; vLLM's engine is one. On a node that
does not have the run's folder the file is in a folder of the node, and the node's agent sends what
is written there to the controller, which keeps it below the name above.
"""

import logging
import os
import re
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from rltrain.actors.run_processes import RUN, end_processes_with

LOG = "RLTRAIN_LOG"
"""Environment variable of an actor's process: the path of its file, as the controller knows it."""
FOLDER = "RLTRAIN_LOG_FOLDER"
"""Environment variable of the controller's process: the folder of all these files."""
_MARK = re.compile(r"^=== process (\d+)(?: on (\S+))? starts, .* ===\n", re.MULTILINE)


def redirect_output() -> None:
    """Append this process's stdout and stderr to its file, if it has one."""
    if (file := own_log()) is None:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    os.write(2, f"=== process {os.getpid()}{_on_node()} starts, {now} ===\n".encode())
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, force=True)
    logging.getLogger("rltrain").setLevel(logging.INFO)


def own_log() -> Path | None:
    """The file that this process writes to, which need not be the one of ``LOG``."""
    name, run = os.environ.get(LOG), os.environ.get(RUN)
    if not name:
        return None
    folder = Path(name).parent
    if run is not None and not sees_run_folder(str(folder), run):
        folder = local_folder(run)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder / Path(name).name if folder.is_dir() else None


def token_file(run: str) -> str:
    """A file that the controller writes into the folder of the logs. A node that finds it has that
    very folder, and not one of the same path."""
    return f".run-{run}"


def sees_run_folder(logs: str, run: str) -> bool:
    return (Path(logs) / token_file(run)).exists()


def local_folder(run: str) -> Path:
    """The logs of a node that does not have the run's folder."""
    return Path(tempfile.gettempdir()) / f"rltrain-{run}-{_node()}"


def _node() -> str:
    # Imported here: only actors of a cluster ask, and they have imported Ray.
    import ray.util

    return str(ray.util.get_node_ip_address())


def _on_node() -> str:
    return f" on {_node()}" if os.environ.get(RUN) else ""


def end_logged(file: str) -> int:
    """Kill the processes on this node of the actor that has this ``LOG``: its own, and those that
    it started and that may outlive it. Returns how many there were."""
    return end_processes_with(lambda environment: environment.get(LOG) == file)


def find_log(pid: int, node: str | None = None) -> Path | None:
    """The file of the actor with the process id ``pid``; None where it has none here.

    Args:
        node: its node, since processes of two nodes may have one id; None: whichever
    """
    folder = os.environ.get(FOLDER)
    for file in sorted(Path(folder).glob("*.log")) if folder else ():
        if log_of_process(file.read_text(errors="replace"), pid, node):
            return file
    return None


def log_of_process(text: str, pid: int, node: str | None = None) -> str:
    """The part of a log that process ``pid`` and its children wrote; "" if it wrote none."""
    _, *parts = _MARK.split(text)
    found = ""
    for number, place, written in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if number == str(pid) and (node is None or place is None or place == node):
            found = written
    return found


def node_of_log(text: str) -> str:
    """The node of the process that wrote the end of a log; "" where the log does not say."""
    marks = _MARK.findall(text)
    return str(marks[-1][1]) if marks else ""
