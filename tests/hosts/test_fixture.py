"""The hosts of these tests are hosts: what one has, no other sees, but through the network."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hosts import stage as stages
from tests.hosts.links import Cable, Quality, bad_cable
from tests.hosts.namespaces import ROOT, Host, host, switch
from tests.hosts.stage import Stage, stage

pytestmark = pytest.mark.integration

SERVE = """
import socket
with socket.create_server(("0.0.0.0", 9000)) as server:
    print("up", flush=True)
    while True:
        link, _ = server.accept()
        while link.recv(1 << 16):
            pass
        link.sendall(b"all")
        link.close()
"""
SEND = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 9000)) as link:
    connected = time.monotonic()
    for _ in range(int(sys.argv[2])):
        link.sendall(bytes(1 << 20))
    link.shutdown(socket.SHUT_WR)
    assert link.recv(3) == b"all"
print(connected - began, time.monotonic() - connected)
"""
GLOO = """
import os, ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=1)
class Rank:
    def sum(self, rank, store, interface):
        import torch, torch.distributed as dist
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        place = dist.TCPStore(store, 29500, 4, is_master=rank == 0)
        dist.init_process_group("gloo", store=place, rank=rank, world_size=4)
        values = torch.tensor([float(rank)])
        dist.all_reduce(values)
        return ray.util.get_node_ip_address(), values.item()

ranks = [
    Rank.options(resources={f"node:{sys.argv[2 + n // 2]}": 0.001}).remote() for n in range(4)
]
print(ray.get([r.sum.remote(n, sys.argv[2], sys.argv[4]) for n, r in enumerate(ranks)]))
"""


@pytest.fixture
def pair(real_hosts: None, tmp_path: Path) -> Iterator[tuple[Host, Host, Cable]]:
    """Two hosts without Ray, and the cable of the second."""
    with ExitStack() as stack:
        network = stack.enter_context(switch())
        first, second = (stack.enter_context(host(network, n, tmp_path)) for n in (1, 2))
        yield first, second, Cable(network, "h2")


def send(source: Host, target: Host, mib: int) -> tuple[float, float]:
    """Seconds to connect, and to send."""
    told = source.run(sys.executable, "-c", SEND, target.address, str(mib))
    connect, sending = map(float, told.split())
    return connect, sending


def serve(target: Host, log: Path) -> None:
    with log.open("w") as file:
        target.start([sys.executable, "-c", SERVE], file)
    while "up" not in log.read_text():
        time.sleep(0.05)


def test_hosts_share_what_is_shared_and_no_more(
    pair: tuple[Host, Host, Cable], tmp_path: Path
) -> None:
    first, second, _ = pair
    for folder in ("/tmp", "/dev/shm", "/tmp/home"):
        first.run("touch", f"{folder}/mine")
        assert "mine" not in second.run("ls", folder).split()
        assert first.path(f"{folder}/mine").exists()
    first.run("touch", f"{tmp_path}/ours")
    assert (tmp_path / "ours").exists() and "ours" in second.run("ls", str(tmp_path)).split()
    assert first.run("hostname").strip() == "host-a" and second.name == "host-b"
    assert (ROOT / "pyproject.toml").read_text() == second.run("cat", f"{ROOT}/pyproject.toml")
    with pytest.raises(AssertionError, match="Read-only"):
        second.run("touch", f"{ROOT}/written")
    serve(first, tmp_path / "log")
    assert len(first.processes()) == 1 and second.processes() == {}


def test_a_cable_counts_is_cut_and_is_mended(
    pair: tuple[Host, Host, Cable], tmp_path: Path
) -> None:
    first, second, cable = pair
    serve(second, tmp_path / "log")
    before = cable.traffic()
    send(first, second, 8)
    went = cable.traffic().since(before)
    assert went.received == pytest.approx(8 << 20, rel=0.05) and went.sent < went.received / 20
    cable.cut()
    argv = [sys.executable, "-c", SEND, second.address, "1"]
    with (tmp_path / "cut").open("w") as file:
        sender = first.start(argv, file)
    time.sleep(1.5)
    assert sender.poll() is None
    cable.mend()
    assert sender.wait(20) == 0


def test_a_bad_cable_is_late_and_slow(pair: tuple[Host, Host, Cable], tmp_path: Path) -> None:
    first, second, cable = pair
    quality = Quality(delay_ms=20, loss=0, rate_mbit=50)
    with bad_cable(second, cable, quality) as how:
        serve(second, tmp_path / "log")
        connect, sending = send(first, second, 2)
        assert connect > 0.04, how
        assert sending > 2 * 8 * 2**20 / 50e6, how
        assert cable.traffic().received > 2 << 20


def test_nothing_is_left_of_a_test_that_was_killed(real_hosts: None, tmp_path: Path) -> None:
    """No process, so no namespace, no mount and no bridge: they end with the last process."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.hosts.namespaces import host, switch\n"
        "with switch() as network, host(network, 1, Path(sys.argv[1])) as made:\n"
        "    child = made.start(['sleep', '1000'], sys.stderr)\n"
        "    print(network.pid, made.pid, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    spaces = [int(word) for word in process.stdout.readline().split()]
    assert len(spaces) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 20
    while alive := [pid for pid in spaces if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < end, alive
        time.sleep(0.1)


def sums(made: Stage, tmp_path: Path) -> str:
    """What an all-reduce of two actors on each of two nodes says."""
    _, second, third = made.hosts
    places = second.address, third.address, second.interface
    with (tmp_path / "log").open("w") as file:
        argv = [sys.executable, "-c", GLOO, made.address, *places]
        assert made.hosts[0].start(argv, file).wait(120) == 0, (tmp_path / "log").read_text()
    return (tmp_path / "log").read_text().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("real", [True, False], ids=["namespaces", "loopback"])
def test_ray_and_gloo_span_the_hosts(
    real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if real:
        request.getfixturevalue("real_hosts")
    else:
        monkeypatch.setattr(stages, "why_not", lambda: "this test asks for it")
    with stage(tmp_path / "stage") as made:
        expected = [(made.hosts[1 + n // 2].address, 6.0) for n in range(4)]
        assert sums(made, tmp_path) == str(expected)
        assert all(machine.processes() for machine in made.hosts)
    assert real or not any(machine.processes() for machine in made.hosts)
