"""Ray, started for this run alone or joined, and all of it ended again."""

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services

from rltrain.actors.guardian import Guardian
from rltrain.actors.kept_logs import RAY_LOGS
from rltrain.actors.local_processes import core_processes, of_raylet, watched_ray
from rltrain.actors.run_temp import RunTemp, make_run_temp, temporary_files_in
from rltrain.actors.shared_memory import mapped_by, name_semaphores
from rltrain.controller.cluster.ray_start import (
    HostState,
    Tries,
    check_address,
    last_words,
    send_token,
    start_failure,
)
from rltrain.parallel.rendezvous import within

logger = logging.getLogger(__name__)

OVERRIDE_ON_ZERO = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""At 1, the default of old versions, Ray shows no GPU at all to an actor it counts none for."""

SHUTDOWN_S = 60.0
"""How long the end of a run waits for Ray to end."""
START_S = 120.0
"""How long Ray is tried to start for commands that are no run."""


@contextmanager
def running_ray(
    address: str | None, run_dir: Path | None = None, start_timeout_s: float = START_S
) -> Iterator[Guardian]:
    """Start Ray, or join ``address``; local servers listen on loopback alone. Within, temporary
    files are in a folder of the run, which is removed.

    Args:
        run_dir: see `Guardian`
        start_timeout_s: how long a start that is too slow is tried again

    Yields:
        what ends all that is left, even after this process was killed

    Raises:
        RuntimeError: it did not start or cannot be joined, with what to do.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "warning")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(OVERRIDE_ON_ZERO, "0")
    if address is not None:
        check_address(address)
        send_token()
    try:
        temp = make_run_temp()
    except OSError as error:
        raise start_failure(error, address, HostState.now()) from error
    guardian = Guardian(temp, run_dir)
    name_semaphores(temp.root.name)
    try:
        with temporary_files_in(temp.files):
            if address is None:
                _start(temp, run_dir, start_timeout_s)
            else:
                _join(address)
            with _guarded_ray(guardian) if address is None else _closing_ray():
                yield guardian
    finally:
        guardian.end()


def _start(temp: RunTemp, run_dir: Path | None, timeout_s: float) -> None:
    """Start Ray, again while it is too slow: its own waits are 30 s, whatever the machine does."""
    # Without this Ray on Linux turns a loopback address into the host's own.
    ray_constants.ENABLE_RAY_CLUSTER = False
    tries = Tries(timeout_s, time.monotonic())
    while True:
        before = set(psutil.Process().children(recursive=True))
        try:
            with _own_groups(), _services_silent():
                # A cluster of our own, even where Ray finds that of another program here.
                _init(
                    address="local",
                    include_dashboard=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(temp.ray),
                    num_cpus=max(8, len(os.sched_getaffinity(0))),
                )
            return
        except BaseException as error:  # Ctrl-C, too
            machine = HostState.now()
            crashed = _end_failed(before)
            if not isinstance(error, Exception):
                raise
            again = tries.again(error, machine, crashed, time.monotonic())
            tried = tries.tried(time.monotonic())
            if not again:
                log = str(run_dir / RAY_LOGS) if run_dir else last_words(temp.ray)
                raise start_failure(error, None, machine, tried, log) from error
            logger.warning("Ray did not start (%s); it is tried for %g s at most", tried, timeout_s)
            time.sleep(tries.pause_s)


def _join(address: str) -> None:
    try:
        _init(address=address)
    except Exception as error:
        _end_ray()
        raise start_failure(error, address, HostState.now()) from error


def _init(**options: Any) -> None:
    # Its words about a dead actor would come beside ours, which have the actor's own error.
    ray._private.worker._worker_logs_enabled = False
    log_level = os.environ["RAY_BACKEND_LOG_LEVEL"].upper()
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=log_level, **options)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminated)  # Ray's would end the process with status 15


def _end_failed(before: set[psutil.Process]) -> bool:
    """End what a start has left that failed, which Ray forgets. Whether a part of it had ended by
    itself.

    Args:
        before: the processes that there were before it
    """
    new = set(psutil.Process().children(recursive=True)) - before
    crashed = any(_has_ended(process) for process in new)
    _end_ray()
    for process in new:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(new, timeout=SHUTDOWN_S)
    return crashed


def _has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


class _InOwnGroup(services.ConsolePopen):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, process_group=0, **kwargs)


@contextmanager
def _own_groups() -> Iterator[None]:
    """Each process that Ray starts within has a process group of its own. A SIGTERM to the group of
    the run (`timeout`, Slurm) is for the run, which needs Ray until it has saved."""
    usual = services.ConsolePopen
    services.ConsolePopen = _InOwnGroup
    try:
        yield
    finally:
        services.ConsolePopen = usual


@contextmanager
def _services_silent() -> Iterator[None]:
    """What Ray prints of a start that fails, up to 20 lines of each log, is in the logs."""
    log = logging.getLogger(services.__name__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _guarded_ray(guardian: Guardian) -> Iterator[None]:
    """The Ray that this process started: watched, and ended with all that it started."""
    core = core_processes()
    raylet = core["raylet"].pid
    guardian.tell(raylet=raylet)
    with _closing_ray():
        try:
            with watched_ray(core):
                yield
        finally:
            # Ray kills them, so that they cannot remove it themselves.
            guardian.tell(shared=sorted(mapped_by(of_raylet(raylet))))


@contextmanager
def _closing_ray() -> Iterator[None]:
    try:
        yield
    finally:
        _end_ray()


def _end_ray() -> None:
    try:
        within(SHUTDOWN_S, ray.shutdown)
    except TimeoutError:
        atexit.unregister(ray.shutdown)  # it would wait for the one that goes on
        logger.error(
            "Ray did not end within %.0f s: its processes are ended with this one", SHUTDOWN_S
        )
