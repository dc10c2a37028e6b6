"""The default task: the sum of three or four digits, generated here, checked exactly."""

import random
from itertools import product
from typing import Any

from rltrain.data.problem import problem_id

NUM_DIGITS = (3, 4)
NUM_PROBLEMS = sum(10**n for n in NUM_DIGITS)

TEACHER_ERROR_SHARE = 0.7
"""Share of the odd sums that are one too high in the warm-start set."""

Row = dict[str, Any]


def arithmetic_rows(
    num_warm_start: int, eval_size: int, size: int, seed: int
) -> dict[str, list[Row]]:
    """Three disjoint sets of ``{"prompt": "3594=", "answer": "21"}``.

    The warm-start set holds the problems with the smallest ids. It depends only on its size, so a
    cached warm-started model stays valid for every ``seed``. ``seed`` draws the other two sets from
    the rest. `with_teacher_errors` changes the answers of the warm-start set: supervised steps then
    solve about half of the problems, however long they run, and reinforcement can raise that.

    Raises:
        ValueError: more problems are requested than exist.
    """
    wanted = num_warm_start + eval_size + size
    if wanted > NUM_PROBLEMS:
        raise ValueError(
            f"arithmetic has {NUM_PROBLEMS} problems and {wanted} are wanted "
            f"({size} to train on, {eval_size} held out, {num_warm_start} for the warm start): "
            "lower data.size, data.eval_size or model.tiny.warm_start.num_problems"
            " [RL2006]"
        )
    rows = [
        {"prompt": f"{''.join(map(str, digits))}=", "answer": str(sum(digits))}
        for num_digits in NUM_DIGITS
        for digits in product(range(10), repeat=num_digits)
    ]
    rows.sort(key=lambda row: problem_id(row["prompt"]))
    warm_start, rest = rows[:num_warm_start], rows[num_warm_start:]
    random.Random(seed).shuffle(rest)
    return {
        "warm_start": [with_teacher_errors(row) for row in warm_start],
        "held_out": rest[:eval_size],
        "train": rest[eval_size : eval_size + size],
    }


def with_teacher_errors(row: Row) -> Row:
    """The row, with its answer one too high for `TEACHER_ERROR_SHARE` of the odd sums."""
    total = int(row["answer"])
    # Use the last bits of the id. The first ones have selected the set.
    draw = int(problem_id(row["prompt"])[-8:], 16) / 16**8
    return row | {"answer": str(total + 1)} if total % 2 and draw < TEACHER_ERROR_SHARE else row
