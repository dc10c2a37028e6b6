"""The answer of a row: text if it is compared or used as a supervised target, else any JSON
value."""

import math
import re
from collections.abc import Collection
from decimal import Decimal
from typing import Literal

from rltrain.data.bad_rows import BadRow
from rltrain.data.columns import kind_of
from rltrain.data.json_values import Json, as_json, check_text

AnswerRule = Literal["compared", "supervised", "number", "scored", "any"]
"""What an answer must be. ``compared``, ``supervised``: its exact text is used. ``number``: its
value is used. ``scored``: a verifier of reasoning-gym reads it. ``any``: a function of the user
reads it."""


def answer_rule(rewards: Collection[str], supervised: bool) -> AnswerRule:
    """The rule for answers, by the reward functions or for supervised steps.

    Of several functions the first in this table that is among them counts: what it can read, the
    others can read, too.
    """
    if supervised:
        return "supervised"
    rules: dict[str, AnswerRule] = {
        "exact": "compared",
        "math_verify": "number",
        "reasoning_gym": "scored",
    }
    return next((rule for name, rule in rules.items() if name in rewards), "any")


def read_answer(value: object, name: str, rule: AnswerRule, pattern: str | None = None) -> Json:
    """The answer in ``value`` of column ``name``.

    It is text, or any JSON value with the rules ``scored`` and ``any``.

    Raises:
        BadRow: it is no answer by this rule, or ``pattern`` finds none in it.
    """
    if pattern is not None:
        value = _search(value, name, pattern)
    if rule in ("any", "scored"):
        return as_json(value, name)
    text = _text(value, name, rule)
    if not text.strip():
        raise BadRow("the answer is empty", f"column {name!r} is {text!r}")
    if "\0" in text:
        raise BadRow("the answer has a NUL character", f"column {name!r} is {text[:40]!r}")
    return text


def _text(value: object, name: str, rule: AnswerRule) -> str:
    if isinstance(value, str):
        return check_text(value, name)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if rule == "number" and isinstance(value, float | Decimal) and math.isfinite(value):
        # Decimal writes no exponent, which math-verify would read as the number e.
        return format(Decimal(repr(value)) if isinstance(value, float) else value, "f")
    raise BadRow(f"the answer is {_article(kind_of(value))}", f"column {name!r} {_why(value)}")


def _why(value: object) -> str:
    if value is None:
        return "is null"
    if isinstance(value, bool):
        return f"is {value}, which has no one spelling: write it as text"
    if isinstance(value, float) and math.isnan(value):
        return "is NaN, as pandas writes for null"
    if isinstance(value, float | Decimal):
        return (
            f"is {value}, and whether 42 or 42.0 was meant is not known (a column of integers with "
            "a null becomes one of floats): write answers as text, or compare them with "
            "data.reward.function=math_verify"
        )
    return f"is {str(value)[:60]}"


def _search(value: object, name: str, pattern: str) -> str:
    if not isinstance(value, str):
        raise BadRow(
            f"the answer is {_article(kind_of(value))}",
            f"column {name!r}: data.answer_pattern searches text",
        )
    matches = list(re.finditer(pattern, value))
    if not matches or (text := matches[-1][matches[-1].re.groups]) is None:
        raise BadRow(
            "data.answer_pattern finds no answer",
            f"column {name!r} ends in {value[-60:]!r}, the pattern is {pattern!r}",
        )
    return text.strip()


def _article(kind: str) -> str:
    if kind in ("null", "bytes", "text", "messages"):
        return kind
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
