"""Samples for a pool, and whether a process has ended."""

import time
from collections.abc import Callable
from pathlib import Path

from rltrain.environments.pool import RewardPool
from rltrain.environments.process_tree import descendants
from rltrain.environments.reward_sample import RewardInput

MakePool = Callable[..., RewardPool]


def samples(*responses: str) -> list[RewardInput]:
    return [
        RewardInput(response, response, None, "?", {}, f"id{i}")
        for i, response in enumerate(responses)
    ]


def worker_of(pool: RewardPool, slot: int = 0) -> int:
    """The process that runs the function; above it there is its supervisor."""
    return descendants(pool._workers[slot].process.process.pid)[0]


def gone(pid: int) -> bool:
    """Whether the process has ended, within 5 s; a zombie has."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False
