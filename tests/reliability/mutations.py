"""Damage to bytes and to JSON, by a seeded generator."""

import json
import random
from typing import Any

LEAVES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, 1e-300),
    *(float("nan"), float("inf"), "", "x", " ", "0", "null", "\x00", "\ud800", "\x1b[2J"),
    *("../../etc/passwd", "/dev/zero", "a" * 5000, "9" * 5000, "${oc.env:HOME}", "???", "%n%s"),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}),
)
"""Values that are seldom what is expected."""


def leaf(dice: random.Random) -> Any:
    return dice.choice(LEAVES)


def value(dice: random.Random, depth: int = 3) -> Any:
    """Any JSON value."""
    kind = dice.randrange(4) if depth else 0
    if kind == 2:
        return [value(dice, depth - 1) for _ in range(dice.randrange(4))]
    if kind == 3:
        return {str(leaf(dice))[:20]: value(dice, depth - 1) for _ in range(dice.randrange(4))}
    return leaf(dice)


def changed(dice: random.Random, data: Any) -> Any:
    """``data`` with one value in it replaced, taken out, doubled or put elsewhere."""
    if isinstance(data, dict) and data and dice.random() < 0.85:
        name = dice.choice(list(data))
        kind = dice.randrange(6)
        rest = {key: item for key, item in data.items() if key != name}
        if kind == 0:
            return rest
        if kind == 1:
            return rest | {str(leaf(dice)): data[name]}
        return data | {name: changed(dice, data[name])}
    if isinstance(data, list) and data and dice.random() < 0.85:
        at, kind = dice.randrange(len(data)), dice.randrange(5)
        if kind == 0:
            return [*data[:at], *data[at + 1 :]]
        if kind == 1:
            return [*data, data[at]]
        return [*data[:at], changed(dice, data[at]), *data[at + 1 :]]
    return value(dice)


def as_json(dice: random.Random, data: Any) -> bytes:
    """Now and then with what makes it no JSON, or very deep."""
    text = json.dumps(data, ensure_ascii=dice.random() < 0.5)
    if dice.random() < 0.03:
        depth = dice.choice([10, 500, 100_000])
        text = "[" * depth + text + "]" * depth
    return text.encode("utf-8", "surrogatepass")


def damaged(dice: random.Random, data: bytes) -> bytes:
    """Flipped bits, bytes put in, taken out, cut off, doubled, or of something else."""
    kind = dice.randrange(7)
    at = dice.randrange(len(data) + 1)
    size = min(dice.choice([1, 2, 7, 100]), len(data) - at)
    if kind == 0 and data:
        at %= len(data)
        return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + dice.randbytes(size or 1) + data[at:]
    if kind == 2:
        return data[:at] + data[at + size :]
    if kind == 3:
        return data[:at]
    if kind == 4:
        return data[:at] + bytes(size) + data[at + size :]
    if kind == 5:
        return data[:at] + data[at : at + size] * 2 + data[at + size :]
    return dice.randbytes(dice.randrange(64))
