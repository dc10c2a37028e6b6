"""The default task: sums of two numbers below a hundred, generated here, checked exactly."""

import random
from typing import Any

from rltrain.data.problem import problem_id

MAX_OPERAND = 99
NUM_PROBLEMS = (MAX_OPERAND + 1) ** 2

Row = dict[str, Any]


def arithmetic_rows(
    num_warm_start: int, eval_size: int, size: int, seed: int
) -> dict[str, list[Row]]:
    """Three disjoint sets of ``{"prompt": "17+25=", "answer": "42"}``.

    The warm-start set holds the problems whose ids are smallest: it depends on nothing but its
    size, so a cached warm-started model keeps its meaning whatever ``seed`` draws from the rest.

    Raises:
        ValueError: when more are asked for than there are.
    """
    wanted = num_warm_start + eval_size + size
    if wanted > NUM_PROBLEMS:
        raise ValueError(
            f"arithmetic has {NUM_PROBLEMS} problems and {wanted} are wanted "
            f"({size} to train on, {eval_size} held out, {num_warm_start} for the warm start): "
            "lower data.size, data.eval_size or model.tiny.warm_start.num_problems"
        )
    pairs = [(a, b) for a in range(MAX_OPERAND + 1) for b in range(MAX_OPERAND + 1)]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    rows.sort(key=lambda row: problem_id(row["prompt"]))
    warm_start, rest = rows[:num_warm_start], rows[num_warm_start:]
    random.Random(seed).shuffle(rest)
    return {
        "warm_start": warm_start,
        "held_out": rest[:eval_size],
        "train": rest[eval_size : eval_size + size],
    }
