"""The network interface of this node, by which its actors talk to those of other nodes."""

import ipaddress
import os
import socket

import psutil

from rltrain.actors.node import node_address


def use_network(interface: str | None) -> str:
    """Have gloo, NCCL and vLLM use one network interface, in this process and its children.

    Args:
        interface: its name; None: the one that has this node's Ray address

    Returns:
        The address to listen on.

    Raises:
        ValueError: this node has no such interface.
    """
    name, address = find_interface(node_address(), interface, addresses())
    set_variables(name, address)
    return address


def set_variables(name: str, address: str) -> None:
    """Set what gloo, NCCL and vLLM read, where the user has not.

    Args:
        name: of the interface that has ``address``
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without "=" it means a prefix
    os.environ.setdefault("VLLM_HOST_IP", address)


def addresses() -> dict[str, list[str]]:
    """The IPv4 and IPv6 addresses of every interface of this host, in that order."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [
            entry.address.split("%")[0]
            for family in families
            for entry in entries
            if entry.family == family
        ]
        for name, entries in psutil.net_if_addrs().items()
    }


def find_interface(
    node: str, interface: str | None, known: dict[str, list[str]]
) -> tuple[str, str]:
    """The name of an interface, and its address to listen on.

    Args:
        node: the node's Ray address, or a host name that stands for it
        interface: the name that was asked for
        known: see `addresses`
    """
    if interface is not None:
        if not known.get(interface):
            raise ValueError(
                f"cluster.interface={interface}: expected a network interface with an address on "
                f"node {node}, found {_spell(known)}: name one of these, or leave it out"
                " [RL4030]"
            )
        return interface, known[interface][0]
    node_addresses = _resolve(node)
    for name, own in known.items():
        if shared := [address for address in node_addresses if address in own]:
            return name, shared[0]
    for name, own in known.items():  # all of 127.0.0.0/8 is there, and one address of it is listed
        loopbacks = [address for address in node_addresses if _is_loopback(address)]
        if loopbacks and any(map(_is_loopback, own)):
            return name, loopbacks[0]
    raise ValueError(
        f"expected a network interface with the address that this node has in Ray, {node}, "
        f"found {_spell(known)}: set cluster.interface, or start Ray with --node-ip-address"
        " [RL4030]"
    )


def _resolve(node: str) -> list[str]:
    try:
        return [str(ipaddress.ip_address(node))]
    except ValueError:
        try:
            found = socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)
        except OSError:
            return []
        return [str(entry[4][0]) for entry in found]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _spell(known: dict[str, list[str]]) -> str:
    shown = [f"{name} ({', '.join(own)})" for name, own in known.items() if own]
    return ", ".join(shown) or "none"
