"""What a reward's process writes: messages that are right, nearly right, or any."""

import random
from collections.abc import Callable
from pathlib import Path

from rltrain.environments.conversation import Lines
from tests.unit.environments.test_conversation import (
    NOW,
    TIMEOUT_S,
    check_result,
    hostile_bytes,
    hostile_message,
    ready,
)


def make(_: Path) -> Callable[[random.Random], str]:
    """One message to a worker that has done a random number of samples."""

    def try_one(dice: random.Random) -> str:
        worker, lines, now = ready([3, 4, 5], 0.5), Lines(), NOW + dice.choice([0.0, 0.001, 2.0])
        if dice.random() < 0.5:
            worker.take({"began": NOW}, NOW, None)
        for message in lines.feed(hostile_bytes(dice, hostile_message(dice, worker, now))):
            try:
                results = worker.take(message, now, 0.5)
            except ValueError as error:
                assert str(error).startswith("wrote ") and str(error).isprintable()
                return "refused"
            assert worker.began is None or NOW <= worker.began <= now
            assert worker.deadline(TIMEOUT_S) > now
            left = [position for group in worker.assigned for position in group]
            assert sorted([*results, *left]) == [3, 4, 5]
            for one in results.values():
                check_result(one)
            return "taken"
        return "refused" if lines.fault else "no message yet"

    return try_one
