"""Bytes on all cables between two moments."""

import time
from collections.abc import Sequence

from tests.hosts.expected_bytes import HOSTS
from tests.hosts.links import Cable, Traffic


def read_all(cables: Sequence[Cable]) -> list[Traffic]:
    return [cable.traffic() for cable in cables]


def between(before: Sequence[Traffic], after: Sequence[Traffic]) -> dict[tuple[str, str], int]:
    """By host and "sent" or "received"."""
    found: dict[tuple[str, str], int] = {}
    for name, first, last in zip(HOSTS, before, after, strict=True):
        went = last.since(first)
        found |= {(name, "sent"): went.sent, (name, "received"): went.received}
    return found


def idle_rates(cables: Sequence[Cable], seconds: float) -> dict[tuple[str, str], float]:
    """Bytes a second that the cluster moves while nothing is asked of it."""
    before = read_all(cables)
    time.sleep(seconds)
    return {key: count / seconds for key, count in between(before, read_all(cables)).items()}
