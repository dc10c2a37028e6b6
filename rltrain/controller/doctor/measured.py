"""What the checks of the machine judge, measured. Changes nothing."""

import os
import shutil
import socket
import tempfile
from importlib import metadata, util
from pathlib import Path

from rltrain.controller.doctor.machine import FolderState
from rltrain.controller.doctor.software import normalized, torch_cuda

LOOPBACK_TIMEOUT_S = 2.0


def installed_versions() -> dict[str, str]:
    """Version of every installed distribution, by its normalized name."""
    return normalized((d.metadata["Name"], d.version) for d in metadata.distributions())


def requirements(names: tuple[str, ...]) -> dict[str, list[str]]:
    """What these distributions require, where they are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
    return found


def logits_processors() -> list[str]:
    from rltrain.controller.checks.engine_guards import LOGITS_PROCESSORS

    points = metadata.entry_points(group=LOGITS_PROCESSORS)
    return sorted(f"{point.name}={point.value}" for point in points)


def torch_build_cuda() -> str | None:
    """The CUDA that the installed torch was built for, without importing it."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return torch_cuda(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time that the container gets, of cgroup 2 or 1; None without a limit."""
    if (file := root / "cpu.max").is_file():
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    files = [root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    if not all(file.is_file() for file in files):
        return None
    limit, period_us = (int(file.read_text()) for file in files)
    return None if limit < 0 else limit / period_us


def folder_state(path: str) -> FolderState:
    """Of a folder, or of the nearest one above it that exists, where it would be created."""
    folder = Path(path).expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")  # an empty file fits on a full disk
    except OSError as error:
        return FolderState(path, 0, error.strerror or str(error))
    return FolderState(path, free)


def shared_memory() -> int | None:
    """Bytes free in /dev/shm."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None


def loopback_error() -> str:
    """Why this process cannot reach itself over 127.0.0.1; empty if it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LOOPBACK_TIMEOUT_S)
            with socket.create_connection(server.getsockname(), timeout=LOOPBACK_TIMEOUT_S) as end:
                accepted, _ = server.accept()
                with accepted:
                    end.sendall(b"1")
                    accepted.settimeout(LOOPBACK_TIMEOUT_S)
                    return "" if accepted.recv(1) == b"1" else "what was sent did not arrive"
    except OSError as error:
        return str(error)
