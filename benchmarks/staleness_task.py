"""Running sums: a task like the built-in one, with responses of about 20 tokens.

The prompt ``3594271=`` has the answer ``3,8,17,21,23,30,31``, and the reward is 1 if the last
number of a response is the sum. The warm-start set adds one too many to some odd sums, and goes
on from there, so that a model which learned it has much to gain.
"""

import json
import random
from pathlib import Path

NUM_DIGITS = 7
ERROR_SHARE = 0.3
"""Share of the odd partial sums of the warm-start set that are one too high."""
WARM_START, TRAIN, HELD_OUT = 8000, 4000, 256
REWARD = """def score(response: str, answer: object, **columns: object) -> float:
    return float(response.rpartition(",")[2] == answer)


score.success_at = 1.0
"""


def running_sums(digits: str, errors: random.Random | None = None) -> str:
    """``3,8,17`` of ``359``; with ``errors`` as a teacher that is wrong at times."""
    total, sums = 0, []
    for digit in digits:
        total += int(digit)
        if errors is not None and total % 2 and errors.random() < ERROR_SHARE:
            total += 1
        sums.append(str(total))
    return ",".join(sums)


def write_task(folder: Path) -> None:
    """``warm_start.jsonl``, ``train.jsonl``, ``held_out.jsonl`` and ``reward.py``."""
    draw = random.Random(0)
    numbers = draw.sample(range(10**NUM_DIGITS), WARM_START + TRAIN + HELD_OUT)
    problems = [f"{number:0{NUM_DIGITS}d}" for number in numbers]
    warm_start, rest = problems[:WARM_START], problems[WARM_START:]
    _write(folder / "warm_start.jsonl", {one: running_sums(one, draw) for one in warm_start})
    for name, part in (("train", rest[:TRAIN]), ("held_out", rest[TRAIN:])):
        _write(folder / f"{name}.jsonl", {one: str(sum(map(int, one))) for one in part})
    (folder / "reward.py").write_text(REWARD)


def _write(file: Path, answers: dict[str, str]) -> None:
    rows = ({"prompt": f"{one}=", "answer": answer} for one, answer in answers.items())
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
