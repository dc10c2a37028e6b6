"""A raylet on each host, one after the other: Ray waits 30 s for one, and a number in its code says
so."""

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

PORT = 6379
START_S = 120.0
ATTEMPTS = 3
RAY = str(Path(sys.executable).with_name("ray"))


class Machine(Protocol):
    """A host, or what stands in for one."""

    @property
    def address(self) -> str: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    def command(self, argv: Sequence[str]) -> list[str]: ...
    def kill_all(self) -> None: ...


def start_ray(hosts: Sequence[Machine], cpus: Sequence[int], port: int = PORT) -> str:
    """The head on the first host, a node on each of the others; returns the cluster's address.

    Args:
        cpus: that Ray counts on each host
    """
    address = f"{hosts[0].address}:{port}"
    for number, (host, count) in enumerate(zip(hosts, cpus, strict=True)):
        place = (
            ["--head", f"--port={port}", "--include-dashboard=false"]
            if number == 0
            else [f"--address={address}"]
        )
        start_raylet(host, [*place, f"--num-cpus={count}"])
    return address


def start_raylet(host: Machine, options: Sequence[str]) -> None:
    """Try it some times: on a busy machine 30 s may be too short for Ray."""
    argv = [RAY, "start", *options, f"--node-ip-address={host.address}"]
    argv += ["--object-store-memory=200000000", "--disable-usage-stats"]
    for left in reversed(range(ATTEMPTS)):
        done = subprocess.run(
            host.command(argv),
            env=host.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_S,
        )
        if done.returncode == 0:
            return
        host.kill_all()
        assert left, f"ray start on {host.address}:\n{done.stdout}"


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
