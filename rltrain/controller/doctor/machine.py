"""Whether this machine has what a run needs. Pure: every function judges a measured value."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rltrain.controller.doctor.findings import Finding, fail, ok, warn
from rltrain.planning.compiler import REMEDY
from rltrain.planning.memory_terms import GIB, gib

LITTLE_MEMORY, TOO_LITTLE_MEMORY = 6 * GIB, 3 * GIB
"""The demo run takes about 4 GiB: three processes with torch, and vLLM's cache."""
LITTLE_SHARED = 1 * GIB
FEW_FILES = 4096
LONGEST_PATH, RAY_PATH, LONGEST_PID = 107, 73, 7
"""Characters that Linux allows in the path of a socket, that Ray appends to its temporary folder
(``/ray/session_2026-11-30_02-10-14_123456_4194304/sockets/plasma_store``), and of them the most
that the number of a process takes."""


def check_cores(cores: int, quota: float | None) -> Finding:
    """
    Args:
        cores: that this process may use
        quota: cores' worth of time that the container gets; None without a limit
    """
    usable = cores if quota is None else min(cores, quota)
    found = f"{cores} cores" + (f", limited to {quota:g} by the container" if quota else "")
    if usable < 2:
        return warn("CPU", found, "use 2 cores or more: engine and trainer wait for one another")
    return ok("CPU", found)


def check_memory(available: int, limit: int) -> Finding:
    """
    Args:
        available: bytes that are free now
        limit: bytes that the container may use, or that the machine has
    """
    found = f"{gib(available)} of {gib(limit)} available"
    remedy = "end other programs, or use a machine with more memory (rltrain plan estimates a run)"
    if available < TOO_LITTLE_MEMORY:
        return fail("memory", f"{found}; the smallest run needs {gib(TOO_LITTLE_MEMORY)}", remedy)
    if available < LITTLE_MEMORY:
        return warn("memory", f"{found}; the demo needs about {gib(LITTLE_MEMORY)}", remedy)
    return ok("memory", found)


def check_shared_memory(free: int | None) -> Finding:
    """
    Args:
        free: bytes free in /dev/shm; None where there is no such folder
    """
    remedy = "enlarge it (docker run --shm-size=4g), or remove files that other programs left there"
    if free is None:
        return fail("/dev/shm", "expected the folder /dev/shm, found none", "mount tmpfs there")
    if free < LITTLE_SHARED:
        return warn("/dev/shm", f"{gib(free)} free, less than Ray's object store needs", remedy)
    return ok("/dev/shm", f"{gib(free)} free")


@dataclass(frozen=True)
class FolderState:
    """What was measured of a folder that a run writes to."""

    path: str
    free: int
    """Bytes of its file system."""
    error: str = ""
    """Why no file could be created there; empty if one could."""


def check_folder(purpose: str, folder: FolderState, needed: int, setting: str) -> Finding:
    """
    Args:
        needed: bytes with which a small run fits
        setting: the key or variable that chooses another folder
    """
    name = f"disk: {purpose}"
    if folder.error:
        return fail(
            name,
            f"{folder.path} cannot be written: {folder.error}",
            f"choose a folder of your own with {setting}",
        )
    found = f"{folder.path}: {gib(folder.free)} free"
    remedy = f"free some space there, or choose another disk with {setting}"
    if folder.free < needed // 10:
        return fail(name, f"{found}; a run needs {gib(needed)}", remedy)
    if folder.free < needed:
        return warn(name, f"{found}; a run needs about {gib(needed)}", remedy)
    return ok(name, found)


def check_temporary_path(path: str) -> Finding:
    longest = LONGEST_PATH - RAY_PATH
    remedy = "set RAY_TMPDIR=/tmp, or to another short path"
    found = f"{path} has {len(path)} characters"
    if len(path) > longest + LONGEST_PID - 1:
        return fail("Ray's folder", f"{found}: Ray's socket paths are too long for Linux", remedy)
    if len(path) > longest:
        return warn(
            "Ray's folder",
            f"{found}; with more than {longest}, Ray's socket paths are too long for Linux when "
            "process numbers are large",
            remedy,
        )
    return ok("Ray's folder", path)


def check_loopback(error: str) -> Finding:
    """
    Args:
        error: of a connection from this process to itself over 127.0.0.1; empty if it worked
    """
    if error:
        return fail(
            "loopback ports",
            f"a connection over 127.0.0.1 failed: {error}",
            "allow local connections (firewall, sandbox or network namespace without lo)",
        )
    return ok("loopback ports", "a connection over 127.0.0.1 works")


def check_proxy(environment: Mapping[str, str]) -> Iterator[Finding]:
    """A proxy for all addresses would get what is meant for this machine."""
    names = [n for n in ("http_proxy", "https_proxy", "all_proxy") if environment.get(n)]
    exempt = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    if names and exempt != "*" and not {"127.0.0.1", "localhost"} & set(exempt.split(",")):
        yield warn(
            "proxy",
            f"{', '.join(names)} is set, and no_proxy does not name 127.0.0.1",
            "export no_proxy=127.0.0.1,localhost",
        )


def check_open_files(soft: int, hard: int) -> Finding:
    found = f"{soft} (hard limit {hard})"
    if soft < FEW_FILES:
        allowed = hard < 0 or hard >= FEW_FILES  # RLIM_INFINITY is -1
        remedy = f"ulimit -n {FEW_FILES}" if allowed else "ask the administrator for a higher limit"
        return warn("open files", f"{found}: Ray may run out of them", remedy)
    return ok("open files", found)


def check_cxx(problem: str, *, has_gpu: bool) -> Finding:
    """
    Args:
        problem: see `rltrain.planning.compiler.compiler_problem`
    """
    if not problem:
        return ok("C++ compiler", "finds the headers of Python and OpenMP")
    found = f"{problem}: vLLM compiles C++ on a CPU, and Triton on a GPU"
    return (warn if has_gpu else fail)("C++ compiler", found, REMEDY)


def check_locale(encoding: str) -> Finding:
    """
    Args:
        encoding: with which Python opens text files
    """
    if encoding.lower().replace("-", "") == "utf8":
        return ok("text encoding", encoding)
    return warn(
        "text encoding",
        f"expected UTF-8, found {encoding}: the terminal may not show what a model writes",
        "export LC_ALL=C.UTF-8, or PYTHONUTF8=1",
    )


def check_clock(now: float, installed: float) -> Finding:
    """The clock is not before rltrain was installed: tokens and certificates would be rejected.

    Args:
        now, installed: seconds since 1970
    """
    if now + 86400 < installed:
        days = (installed - now) / 86400
        return warn(
            "clock",
            f"it is {days:.0f} days before the time at which rltrain's files were written",
            "set the clock: wandb's certificates and the order of checkpoints depend on it",
        )
    return ok("clock", "not before the installation")
