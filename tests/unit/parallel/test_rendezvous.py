"""Where ranks meet: all come, or an error says who did not and where."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest

from rltrain.parallel.rendezvous import (
    LOOPBACK,
    Address,
    Member,
    Rendezvous,
    RendezvousFailed,
    listen,
    serve,
    within,
)

NODES = ["10.77.0.1", "10.77.0.2", "10.77.0.2"]


def meeting(store: Address | None = None) -> Rendezvous:
    members = [Member(f"policy rank {rank}", node) for rank, node in enumerate(NODES)]
    return Rendezvous.at(store or serve(LOOPBACK), members)


def join(at: Rendezvous, ranks: list[int], timeout_s: float = 10.0) -> list[Any]:
    """What each rank gets: its store, or its error."""

    def result(rank: int) -> Any:
        try:
            return at.join(rank, len(at.members), timeout_s)
        except RendezvousFailed as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(result, ranks))


def test_all_meet_and_share_a_store() -> None:
    first, *others = join(meeting(), [0, 1, 2])
    first.set("key", "value")
    assert [store.get("key") for store in others] == [b"value"] * 2


def test_two_groups_of_one_store_do_not_see_each_other() -> None:
    store = serve(LOOPBACK)
    (one, *_), (other, *_) = (join(meeting(store), [0, 1, 2]) for _ in range(2))
    one.set("key", "value")
    assert not other.check(["key"])


def test_a_store_listens_on_its_address_alone() -> None:
    store = serve("127.0.0.2")
    socket.create_connection(store, timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, store.port), timeout=5)


def test_a_store_listens_in_its_range_of_ports() -> None:
    with listen("127.0.0.4") as taken:
        first = taken.getsockname()[1]
        with listen("127.0.0.4", [first, first + 20]) as next_one:
            assert first < next_one.getsockname()[1] <= first + 20
        with pytest.raises(RendezvousFailed, match=rf"from {first} to {first}, .*\[RL4034\]"):
            serve("127.0.0.4", [first, first])


def test_a_rank_that_never_comes_is_named_by_all_others() -> None:
    at = meeting()
    for rank, text in zip([0, 1], join(at, [0, 1], timeout_s=1.0), strict=True):
        assert text == (
            f"policy rank {rank} on node {NODES[rank]} waited 1 s at {at.store}, and 1 of 3 ranks "
            "did not come: policy rank 2 on node 10.77.0.2. See their logs, or raise "
            "cluster.start_timeout_s [RL4032]"
        )


@pytest.mark.parametrize(
    ("listens", "reason"), [(False, "Connection refused"), (True, "did not answer")]
)
def test_a_store_that_cannot_be_reached_is_named(listens: bool, reason: str) -> None:
    """Where a socket listens, the kernel accepts connections, and no process answers."""
    with listen(LOOPBACK) as sock:
        at = meeting(Address(*sock.getsockname()))
        if not listens:
            sock.close()
        began = time.monotonic()
        (text,) = join(at, [1], timeout_s=2.0)
    assert text.startswith(f"policy rank 1 on node 10.77.0.2 could not reach {at.store}, where")
    assert reason in text and text.endswith("[RL4031]")
    assert time.monotonic() - began < 6


def test_the_wrong_service_at_the_port_is_no_store() -> None:
    """As after a restart, when another program has the port."""
    with listen(LOOPBACK) as sock, ThreadPoolExecutor(1) as thread:
        stop = time.monotonic() + 4

        def hang_up() -> None:
            sock.settimeout(0.2)
            while time.monotonic() < stop:
                try:
                    sock.accept()[0].close()
                except TimeoutError:
                    continue

        hanging_up = thread.submit(hang_up)
        (text,) = join(meeting(Address(*sock.getsockname())), [1], timeout_s=2.0)
        hanging_up.result()
    assert "could not reach" in text and text.endswith("[RL4031]")


def test_ranks_that_cannot_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    at = meeting()

    def refused() -> None:
        raise RuntimeError("Gloo connectFullMesh failed, remote=[127.0.0.1]:5\nframe #0")

    with pytest.raises(RendezvousFailed, match=r"\[RL4033\]") as error:
        at.connect(1, "gloo", refused, 5.0)
    text = str(error.value)
    assert "policy rank 1 on node 10.77.0.2" in text and "10.77.0.1, 10.77.0.2 within 5 s" in text
    assert "remote=[127.0.0.1]:5. Its GLOO_SOCKET_IFNAME is lo" in text and "frame" not in text


def test_a_connection_that_hangs_ends_at_the_limit() -> None:
    with pytest.raises(RendezvousFailed, match="NCCL_SOCKET_IFNAME"):
        meeting().connect(0, "nccl", lambda: time.sleep(30), 0.5)


def test_what_a_thread_returns_and_raises_comes_back() -> None:
    assert within(5, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(5, lambda: {}["key"])
    assert within(5, lambda: None) is None


def test_it_travels_as_plain_data() -> None:
    at = meeting(Address("10.77.0.1", 5000))
    assert Rendezvous.from_plain(json.loads(json.dumps(asdict(at)))) == at
