"""Where the ranks of a process group meet: a TCP store in the process of one of them.

    address = serve(host)                       # in one process, mostly that of rank 0
    meeting = Rendezvous.at(address, members)   # plain data, for every rank
    store = meeting.join(rank, size, timeout_s) # in every rank; returns when all are there

A store serves any number of groups: each has its own name, which no other run has. Whoever waits
here has a limit, and its error names the rank, its node and the address. torch is imported by the
functions that need it.
"""

import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
REACH_S = 60.0
"""How long a rank tries to reach a store. It listens before any rank has its address, so only a
network that is down for a while is worth the wait."""
CONNECT_S = 300.0
"""How long ranks that have met may take to connect to one another."""
_RETRY_S = 1.0

_served: "dict[Address, TCPStore]" = {}
"""The stores that this process serves, which live as long as it does."""


class RendezvousFailed(RuntimeError):
    """The ranks of a group did not find one another. The text is for the user."""


class Member(NamedTuple):
    """A process that will be a rank."""

    name: str
    """``policy rank 3``"""
    node: str
    """Its node, as Ray names it."""

    def __str__(self) -> str:
        return f"{self.name} on node {self.node}"


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def serve(host: str, ports: Sequence[int] = (), *, sock: socket.socket | None = None) -> Address:
    """Begin to serve a store at a free port of this host's address ``host``, and at no other.

    Args:
        ports: see `listen`
        sock: one that listens there already

    Raises:
        RendezvousFailed: no port is free.
        OSError: the address is none of this host.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listening = sock or listen(host, ports)
    address = Address(*listening.getsockname()[:2])
    _served[address] = TCPStore(
        *address, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return address


def listen(host: str, ports: Sequence[int] = ()) -> socket.socket:
    """A socket that listens at a free port of ``host``.

    Args:
        ports: the first and the last one that may be used; empty: any
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), family=family, backlog=4096)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise RendezvousFailed(
        f"expected a free port of {host} from {first} to {last}, where rank 0 can listen for the "
        "others, and found none: widen cluster.ports [RL4034]"
    )


@dataclass(frozen=True)
class Rendezvous:
    """Where and under which name the ranks of one group meet."""

    store: Address
    group: str
    """Before every key of the group; no other group of any run has it."""
    members: tuple[Member, ...]
    """By rank."""

    @classmethod
    def at(cls, store: Address, members: Sequence[Member]) -> "Rendezvous":
        """A new group."""
        return cls(store, uuid.uuid4().hex, tuple(members))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Rendezvous":
        """From what ``dataclasses.asdict`` gave, after a way that keeps lists alone."""
        members = tuple(Member(*member) for member in plain["members"])
        return cls(Address(*plain["store"]), plain["group"], members)

    @classmethod
    def local(cls, size: int) -> "Rendezvous":
        """Of ``size`` processes of this host, at a store that this one serves."""
        return cls.at(serve(LOOPBACK), [Member(f"rank {rank}", LOOPBACK) for rank in range(size)])

    @property
    def nodes(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys(member.node for member in self.members))

    def join(self, rank: int, size: int, timeout_s: float) -> "PrefixStore":
        """Check in, and wait until all ``size`` ranks have done so. Collective.

        Raises:
            RendezvousFailed: the store cannot be reached, or a rank does not come in ``timeout_s``.
        """
        from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]

        try:
            store = PrefixStore(self.group, self._reach(rank, timeout_s))
            store.set(f"rank {rank}", "")
            if store.add("ranks", 1) == size:
                store.set("all", "")
            store.wait(["all"], timedelta(seconds=timeout_s))
            return store
        except DistError as error:
            raise RendezvousFailed(self._absent(store, rank, size, timeout_s, error)) from error

    def connect(self, rank: int, backend: str, work: Callable[[], T], timeout_s: float) -> T:
        """The result of ``work``, which connects the ranks that have met. Collective.

        Args:
            backend: ``gloo`` or ``nccl``

        Raises:
            RendezvousFailed: it raises, or takes longer than ``timeout_s`` or `CONNECT_S`.
        """
        limit, variable = min(timeout_s, CONNECT_S), f"{backend.upper()}_SOCKET_IFNAME"
        try:
            return within(limit, work)
        except (RuntimeError, TimeoutError) as error:
            raise RendezvousFailed(
                f"{self.members[rank]} met the others at {self.store}, but {backend} could not "
                f"connect it to the ranks on {', '.join(self.nodes)} within "
                f"{limit:g} s: {_reason(error)}. Its {variable} is {os.environ.get(variable)}: "
                "expected the interface by which these nodes reach one another. Unset it or set "
                "cluster.interface, and open all TCP ports between the nodes [RL4033]"
            ) from error

    def _reach(self, rank: int, timeout_s: float) -> "TCPStore":
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        limit = min(timeout_s, REACH_S)
        began = time.monotonic()
        try:
            _wait_until_open(self.store, limit)
            left = max(_RETRY_S, limit - (time.monotonic() - began))
            timeout = timedelta(seconds=left)

            def connect() -> TCPStore:
                return TCPStore(*self.store, timeout=timeout, wait_for_workers=False)

            # torch waits without a limit for the answer of a process that is stopped.
            return within(left + _RETRY_S, connect)
        except (OSError, RuntimeError) as error:
            raise RendezvousFailed(
                f"{self.members[rank]} could not reach {self.store}, where all ranks meet, within "
                f"{limit:g} s: {_reason(error)}. Open this port in the firewall (cluster.ports), "
                "or set cluster.interface to the network that all nodes share [RL4031]"
            ) from error

    def _absent(self, store: Any, rank: int, size: int, timeout_s: float, error: Exception) -> str:
        """Which ranks did not come, as ``rank`` sees it."""
        from torch.distributed import DistNetworkError

        if isinstance(error, DistNetworkError):
            return (
                f"{self.members[rank]} lost {self.store}, where all ranks meet, before all were "
                f"there: {_first_line(error)}. See the log of rank 0 [RL4031]"
            )
        absent = [other for other in range(size) if not store.check([f"rank {other}"])]
        names = ", ".join(str(self.members[other]) for other in absent[:8]) + (
            ", ..." if len(absent) > 8 else ""
        )
        return (
            f"{self.members[rank]} waited {timeout_s:g} s at {self.store}, and {len(absent)} of "
            f"{size} ranks did not come: {names}. See their logs, or raise cluster.start_timeout_s"
            " [RL4032]"
        )


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of ``work``, which runs in a thread.

    Raises:
        TimeoutError: it takes longer. The thread goes on, so this process should end.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(errno.ETIMEDOUT, "it did not answer in time")
    return results[0]


def _wait_until_open(address: Address, limit_s: float) -> None:
    """Raises ``OSError``: nobody listens there, or packets do not arrive."""
    end = time.monotonic() + limit_s
    while True:
        try:
            left = max(_RETRY_S, end - time.monotonic())
            return socket.create_connection(address, timeout=left).close()
        except OSError:
            if time.monotonic() + _RETRY_S > end:
                raise
            time.sleep(_RETRY_S)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or _first_line(error)


def _first_line(error: Exception) -> str:
    """Without the frames that torch appends."""
    return str(error).split("\n", 1)[0].rstrip(".") or type(error).__name__
