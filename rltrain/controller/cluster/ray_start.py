"""Why Ray did not start or could not be joined, in a sentence with what to do."""

import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rltrain.actors.run_temp import temporary_parent
from rltrain.config.redact import strip_terminal_codes
from rltrain.planning.memory_terms import GIB, gib

CONNECT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
MOST_BROKEN = 3
"""So many starts may fail because a process of Ray crashed; lack of memory may pass."""
LITTLE = 1 * GIB
"""Ray keeps its logs and sockets in the temporary folder, and objects in /dev/shm."""


class HostState(NamedTuple):
    """What Ray needs of this machine."""

    cores: int
    load: float
    """Processes that want a core, over the last minute."""
    temporary: str
    free_temporary: int
    """Bytes."""
    free_shared: int

    @classmethod
    def now(cls) -> "HostState":
        temporary = str(temporary_parent())
        free = [
            shutil.disk_usage(f).free if os.path.isdir(f) else 0 for f in (temporary, "/dev/shm")
        ]
        return cls(len(os.sched_getaffinity(0)), os.getloadavg()[0], temporary, *free)


def check_address(address: str) -> None:
    """Somebody listens there. Ray itself would try for minutes, and print every attempt.

    Raises:
        RuntimeError: nobody does, or it is not an address that a run can join.
    """
    if address == "auto":  # Ray finds out from what it left on this machine
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise RuntimeError(
            f"cluster.address={address}: expected HOST:PORT of a Ray cluster that this machine is "
            "a node of, or auto. Ray Client (ray://) is not supported: start the run on a node"
            " [RL4004]"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise RuntimeError(
            f"cluster.address={address}: expected a Ray cluster, and nobody answers there "
            f"({error}). Start one (ray start --head), correct the address, or leave it out to "
            "start Ray for this run alone"
            " [RL4004]"
        ) from error


def send_token() -> None:
    """Show the cluster this user's token, if there is one.

    `ray start --head` asks for a token wherever a Ray of this user has left one, and ``ray.init``
    at an address sends it only when it is told to. A cluster without tokens takes it, too.
    """
    try:
        from ray._private.authentication import authentication_token_setup as ray_tokens
    except ImportError:  # a Ray that asks for none
        return
    loader: Any = ray_tokens.AuthenticationTokenLoader
    config: Any = ray_tokens.Config
    if "RAY_AUTH_MODE" not in os.environ and loader.instance().has_token(True):
        os.environ["RAY_AUTH_MODE"] = "token"
        config.initialize("")  # Ray read the environment when it was imported


@dataclass
class Tries:
    """Of a start of Ray, which gives up after 30 s by itself.

    Args:
        timeout_s: of all of them together
        began: in seconds of the clock of ``now`` below
    """

    timeout_s: float
    began: float
    count: int = 0
    broken: int = 0
    """How often it cannot have been for lack of time."""
    pause_s: float = 0.0
    """Before the next one."""

    def again(self, error: BaseException, machine: HostState, crashed: bool, now: float) -> bool:
        """Whether to try again after one has failed: more time may help, and there is some.

        Args:
            crashed: whether a process of Ray ended by itself
        """
        self.count += 1
        self.broken += crashed
        self.pause_s = min(FIRST_PAUSE_S * 2 ** (self.count - 1), LONGEST_PAUSE_S)
        slow = _known_remedy(_said(error), None, machine) is None
        in_time = now + self.pause_s < self.began + self.timeout_s
        return slow and in_time and self.broken < MOST_BROKEN

    def tried(self, now: float) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"tried {times} in {now - self.began:.0f} s"


def last_words(ray: Path) -> str:
    """The last lines of the logs of Ray's own processes below ``ray``, which will be removed."""
    words = []
    for name in ("gcs_server", "raylet"):
        files = sorted(ray.glob(f"session_2*/logs/{name}.err"))
        lines = files[-1].read_text(errors="replace").split("\n") if files else []
        if said := [line.strip() for line in lines if line.strip()]:
            words.append(f"{name}: {said[-1][:300]}")
    return "; ".join(words) or "Ray wrote nothing"


def start_failure(
    error: BaseException,
    address: str | None,
    machine: HostState,
    tried: str = "",
    log: str = "",
) -> RuntimeError:
    """What an error of ``ray.init`` means.

    Args:
        tried: how often and for how long
        log: where Ray's own logs are, or what they say
    """
    said = _said(error)
    if address is None:
        failure = f"Ray did not start{f' ({tried})' if tried else ''}: {said}"
    else:
        failure = f"cluster.address={address}: {said}"
    code = "RL4003" if address is None else "RL4004"
    remedy = _known_remedy(said, address, machine) or (
        f"The machine is slow or busy ({machine.cores} cores, {machine.load:.0f} processes want "
        "one): end other programs and start the run again, raise cluster.start_timeout_s, or start "
        "Ray beforehand with `ray start --head --num-cpus=8` and set cluster.address=auto"
    )
    return RuntimeError(f"{failure}\n{remedy}{f'. Logs: {log}' if log else ''} [{code}]")


def _said(error: BaseException) -> str:
    """One line. What Ray quotes of its logs is left out: they are kept."""
    said = strip_terminal_codes(str(error)).partition("error files:")[0]
    said = " ".join(said.split())
    if "AuthenticationError" in str(error.__cause__):
        said += ": AuthenticationError, its token is missing or another"
    return said


def _known_remedy(said: str, address: str | None, machine: HostState) -> str | None:
    """None: more time may help."""
    if "Version mismatch" in said:
        return "Install the cluster's versions of Ray and Python here, or the other way round"
    if "AuthenticationError" in said:
        return (
            "The cluster asks for a token: copy ~/.ray/auth_token of the machine where it was "
            "started to this one, or start it with RAY_AUTH_MODE=disabled in a closed network"
        )
    if "AF_UNIX" in said:
        return f"The path of {machine.temporary} is too long for Ray: set RAY_TMPDIR=/tmp"
    if address is not None:
        return f"See `ray status --address={address}`; this machine must be a node of the cluster"
    if machine.free_temporary < LITTLE or "No space left" in said:
        return (
            f"{machine.temporary} has {gib(machine.free_temporary)} free, and Ray needs about 1 "
            "GiB: free some space there, or set RAY_TMPDIR to a folder of another disk"
        )
    if machine.free_shared < LITTLE or "/dev/shm" in said:
        return (
            f"/dev/shm has {gib(machine.free_shared)} free, and Ray keeps objects there: make it "
            "larger (docker run --shm-size=8g), or remove what other programs left there"
        )
    if re.search("[Pp]ermission denied|Read-only", said):
        return f"{machine.temporary} cannot be written: set RAY_TMPDIR to a folder of your own"
    return None
