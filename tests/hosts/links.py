"""The cables between the hosts and the switch: what went through them, how bad they are, cuts."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.hosts.namespaces import Host, Space, in_network

RELAY = Path(__file__).with_name("relay.py")


class Traffic(NamedTuple):
    """Bytes through a cable, with the headers of Ethernet, IP and TCP."""

    sent: int
    """By the host."""
    received: int

    def since(self, before: "Traffic") -> "Traffic":
        return Traffic(self.sent - before.sent, self.received - before.received)


@dataclass(frozen=True)
class Quality:
    """Of a cable, in each direction."""

    delay_ms: float = 20.0
    loss: float = 0.01
    rate_mbit: float = 50.0


@dataclass(frozen=True)
class Cable:
    """The cable of host ``h1`` and so on."""

    network: Space
    port: str

    def traffic(self) -> Traffic:
        """So far, counted by the switch, which receives what the host sends."""
        folder = self.network.path(f"/sys/class/net/{self.port}/statistics")
        sent, received = (int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx"))
        return Traffic(sent, received)

    def cut(self) -> None:
        """Neither end is told: both see a line without an answer."""
        self.network.run("ip", "link", "set", self.port, "nomaster")

    def mend(self) -> None:
        self.network.run("ip", "link", "set", self.port, "master", "br0")


@contextmanager
def bad_cable(host: Host, cable: Cable, quality: Quality) -> Iterator[str]:
    """Within, the cable is bad; yields how that was done. It must not be in use when it begins."""
    if _has_netem(cable, quality):
        words = _netem_words(quality)
        host.run("tc", "qdisc", "replace", "dev", "eth0", "root", *words)
        yield "tc netem on both ends"
        host.run("tc", "qdisc", "del", "dev", "eth0", "root")
        cable.network.run("tc", "qdisc", "del", "dev", cable.port, "root")
        return
    known_as = host.run("cat", "/sys/class/net/eth0/address").strip()  # by its neighbours
    cable.network.run("ip", "link", "del", cable.port)
    with _relay(cable, quality):
        far_end = ("ip", "link", "set", f"{cable.port}x")
        in_network(cable.network, *far_end, "netns", str(host.pid), "name", "eth0")
        cable.network.run("ip", "link", "set", cable.port, "master", "br0", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "address", known_as, "up")
        yield "a relay between two TAP devices, for the kernel has no netem"


@contextmanager
def _relay(cable: Cable, quality: Quality) -> Iterator[None]:
    numbers = [str(n) for n in (quality.delay_ms, quality.loss, quality.rate_mbit, 0)]
    command = cable.network.command([sys.executable, str(RELAY), cable.port, *numbers])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n", command
        yield
    finally:
        process.kill()
        process.wait(30)


def _has_netem(cable: Cable, quality: Quality) -> bool:
    words = ["tc", "qdisc", "replace", "dev", cable.port, "root", *_netem_words(quality)]
    try:
        done = subprocess.run(cable.network.command(words), capture_output=True, timeout=60)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def _netem_words(quality: Quality) -> list[str]:
    return [
        *("netem", "delay", f"{quality.delay_ms}ms", "loss", f"{quality.loss:%}"),
        *("rate", f"{quality.rate_mbit}mbit"),
    ]
