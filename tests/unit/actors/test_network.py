"""The network interface by which a node's actors talk to others."""

import os

import pytest

from rltrain.actors.network import addresses, find_interface, set_variables

KNOWN = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.77.0.2", "10.77.0.20", "fd00::2"],
    "eth1": [],
}


@pytest.mark.parametrize(
    ("node", "interface", "expected"),
    [
        ("10.77.0.2", None, ("eth0", "10.77.0.2")),
        ("10.77.0.20", None, ("eth0", "10.77.0.20")),
        ("fd00::2", None, ("eth0", "fd00::2")),
        ("127.0.0.1", None, ("lo", "127.0.0.1")),
        ("127.0.0.3", None, ("lo", "127.0.0.3")),  # several raylets on one host
        ("localhost", None, ("lo", "127.0.0.1")),
        ("10.77.0.2", "docker0", ("docker0", "172.17.0.1")),
    ],
)
def test_the_interface_has_the_address_of_the_node(
    node: str, interface: str | None, expected: tuple[str, str]
) -> None:
    assert find_interface(node, interface, KNOWN) == expected


@pytest.mark.parametrize(
    ("node", "interface", "said"),
    [
        ("10.77.0.2", "eth9", "cluster.interface=eth9"),
        ("10.77.0.2", "eth1", "cluster.interface=eth1"),
        ("10.99.0.2", None, "10.99.0.2"),
        ("no.such.host.invalid", None, "no.such.host.invalid"),
    ],
)
def test_an_unknown_interface_is_refused_with_those_that_are_there(
    node: str, interface: str | None, said: str
) -> None:
    with pytest.raises(ValueError, match=r"\[RL4030\]") as error:
        find_interface(node, interface, KNOWN)
    text = str(error.value)
    assert said in text and node in text
    assert "eth0 (10.77.0.2, 10.77.0.20, fd00::2)" in text and "eth1 (" not in text


def test_the_interfaces_of_this_host() -> None:
    assert addresses()["lo"][0] == "127.0.0.1"


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that it is removed again
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    set_variables("eth0", "10.77.0.2")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert os.environ["VLLM_HOST_IP"] == "10.77.0.2"
