"""Hosts on one machine: each has its own network, processes, /tmp, /dev/shm and name.

A switch and every host are a process in namespaces of its own (unshare). The bridge lies in the
switch's network, so names and addresses collide with nothing else on the machine. All of it ends
with this process, however that ends: a host's first process reads a pipe from it, and the kernel
ends what runs on a host with its first process. Nothing is left to be removed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
INIT = Path(__file__).with_name("host_init.sh")
SUBNET = "10.77.0"
IS_ROOT = os.geteuid() == 0
UNSHARE = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child"]
UNSHARE += ["--mount-proc", "--propagation", "private"]
ENTER = ["nsenter", "--mount", "--uts", "--ipc", "--net", "--pid"]
ENTER += [] if IS_ROOT else ["--user", "--preserve-credentials"]


@dataclass(frozen=True)
class Space:
    """A process in namespaces of its own, and what runs there."""

    pid: int
    """Of its first process, as this machine counts."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` there."""
        return [*ENTER, "--target", str(self.pid), *argv]

    def run(self, *argv: str) -> str:
        """Run a short command there; what it printed."""
        done = subprocess.run(self.command(argv), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr.strip()}"
        return done.stdout

    def path(self, path: str | Path) -> Path:
        """Where this process finds the file that is called ``path`` there."""
        return Path(f"/proc/{self.pid}/root") / str(path).lstrip("/")

    def processes(self) -> dict[int, str]:
        """Command lines of what runs there, by the numbers that it has there; the first process,
        and those that have ended, are left out."""
        found = {}
        for folder in self.path("/proc").iterdir():
            if not folder.name.isdecimal() or folder.name == "1":
                continue
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            if line := b" ".join(words).decode(errors="replace").strip():
                found[int(folder.name)] = line
        return found

    def kill_all(self) -> None:
        """Kill what runs there, but for the first process."""
        subprocess.run(self.command(["bash", "-c", "kill -9 -1"]), timeout=60)


@dataclass(frozen=True)
class Host(Space):
    """One machine of the cluster."""

    name: str = ""
    address: str = ""
    interface: str = "eth0"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of what is started there."""

    def start(self, argv: Sequence[str], output: IO[str], **env: str) -> subprocess.Popen[str]:
        """Start a program there, in a session of its own."""
        return subprocess.Popen(
            self.command(argv),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**self.environment, **env},
            text=True,
            start_new_session=True,
        )


def why_not() -> str:
    """Why hosts cannot be made here; "" if they can."""
    for tool in ("unshare", "nsenter", "ip", "mount"):
        if shutil.which(tool) is None:
            return f"no {tool} on PATH"
    tried = [*_unshare(outermost=True), "sh", "-c", "ip link add br0 type bridge"]
    done = subprocess.run(tried, capture_output=True, text=True, timeout=30)
    return done.stderr.strip() if done.returncode else ""


@contextmanager
def switch() -> Iterator[Space]:
    """The network that joins the hosts: a bridge without an address."""
    with _space(_unshare(outermost=True), "", 0, Path("/"), ()) as pid:
        space = Space(pid)
        space.run("ip", "link", "add", "br0", "type", "bridge")
        space.run("ip", "link", "set", "br0", "up")
        yield space


@contextmanager
def host(network: Space, number: int, shared: Path, *, shm_mib: int = 8192) -> Iterator[Host]:
    """Host ``number``, counted from 1, on port ``h1`` and so on of the switch.

    Args:
        shared: a folder that all hosts can write; of others they see no change that another makes
        shm_mib: size of its /dev/shm
    """
    name = f"host-{chr(ord('a') + number - 1)}"
    join = [*ENTER, "--target", str(network.pid)]
    join = [word for word in join if word not in ("--mount", "--pid", "--net", "--uts", "--ipc")]
    begin = _unshare(outermost=False) if IS_ROOT else [*join, *_unshare(outermost=False)]
    seen = [ROOT, *_python_path(), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    with _space(begin, name, shm_mib, shared, seen) as pid:
        port, address = f"h{number}", f"{SUBNET}.{number}"
        peer = ["peer", "name", "eth0", "netns", str(pid)]
        in_network(network, "ip", "link", "add", port, "type", "veth", *peer)
        in_network(network, "ip", "link", "set", port, "master", "br0", "up")
        made = Host(pid, name, address, environment=host_environment())
        made.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        made.run("ip", "link", "set", "eth0", "up")
        yield made


def in_network(network: Space, *argv: str) -> None:
    """As `Space.run`, with this machine's process numbers, by which ``ip`` names a network."""
    enter = ["nsenter", "--net", "--target", str(network.pid)]
    enter += [] if IS_ROOT else ["--user", "--preserve-credentials"]
    done = subprocess.run([*enter, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr.strip()}"


def _unshare(*, outermost: bool) -> list[str]:
    """Without root the switch brings a user namespace, in which the hosts are made."""
    return [*UNSHARE, *(["--user", "--map-root-user"] if outermost and not IS_ROOT else [])]


@contextmanager
def _space(
    begin: Sequence[str], name: str, shm_mib: int, shared: Path, seen: Sequence[Path]
) -> Iterator[int]:
    unique = dict.fromkeys(str(path) for path in seen)
    command = [*begin, "bash", str(INIT), name, str(shm_mib), str(shared), *unique]
    with ExitStack() as stack:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        stack.callback(process.wait, 30)
        assert process.stdin is not None and process.stdout is not None
        stack.callback(process.stdin.close)
        said = process.stdout.readline()
        assert said == "ready\n", f"{' '.join(command)} ended: {process.wait(30)}"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        yield int(children.split()[0])


def host_environment() -> dict[str, str]:
    """A login's, with a home of the host; programs find this checkout."""
    kept = ("PATH", "LANG", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "LD_PRELOAD")
    of_gpus = ("NCCL_", "NVIDIA_", "NVSHMEM_", "TORCH_")
    found = {k: v for k, v in os.environ.items() if k in kept or k.startswith(of_gpus)}
    return found | {
        "HOME": "/tmp/home",
        "TMPDIR": "/tmp",
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *_python_path()])),
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _python_path() -> list[Path]:
    """Folders that this process finds modules in, beside the checkout and the environment."""
    listed = [Path(name) for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
    return [path for path in listed if path.is_dir() and path != ROOT]
