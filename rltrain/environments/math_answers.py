"""Parses answers and responses with math-verify, both in the same way.

math-verify silently ignores text that it does not understand: it reads ``log 2`` as 2, and
``1.5e3`` as a product of letters. Reference answers with such text are rejected here. Otherwise
right responses would get 0, or wrong responses 1.

math-verify loads SymPy, which takes seconds. The functions that need it import it.
"""

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

# They warn that math-verify's own time limit is off. The reward pool has one.
for _part in ("grader", "parser"):
    logging.getLogger(f"math_verify.{_part}").setLevel(logging.ERROR)

SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

_NUMBER = r"(?<![\w.,\\])(-?\d+(?:,\d{3})*(?:\.\d+)?)"
_SCIENTIFIC = re.compile(_NUMBER + r"[eE]([+-]?\d{1,2})(?![\w.])")
_SCALED = re.compile(_NUMBER + rf"\s*(?:\\text\{{\s*)?({'|'.join(SCALES)})\b\s*\}}?")
_GSM8K = re.compile(r"####[ \t]*(\S[^\n]*)\s*\Z")
_BOXED_PERCENT = re.compile(r"\\boxed\{\s*([^{}%]*?)\s*%\s*\}")
_BOXED_STOP = re.compile(r"(\\boxed\{[^{}]*\d)\.\s*\}")
# Units after a number and a space, such as km/h; and units of area and volume, whose power would
# otherwise be parsed.
_COMPOUND_UNIT = re.compile(r"(?<=\d)\s+[a-zA-Z]{1,3}/[a-zA-Z]{1,3}(?![a-zA-Z])")
_POWER_UNIT = re.compile(r"(?<=\d)\s*(?:mm|cm|dm|km|ft|in|yd|mi)\s*\^\s*(?:[23]|\{[23]\})")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[, ]| |\{,\})\d{3})+(?!\d)")
_MIXED = re.compile(r"(?<![\d/.,])(\d+) (\d+)/(\d+)(?![\d/])")
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mbox|begin|end)\{[^{}]*\}|\\[a-zA-Z]+")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{[^{}]*\}(?:\s*\^\{?\d\}?)?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z '-]+[A-Za-z]")
_WITH_UNIT = re.compile(r"[-+]?\d[\d,./]*\s*%?\s*[A-Za-z][A-Za-z .'/-]*")


def is_equal(response: str, answer: str) -> bool:
    """Whether the last, or boxed, answer of the response equals ``answer`` mathematically.

    Raises:
        ValueError: as `parse_answer`
    """
    from math_verify import verify

    # The time limits of math-verify use signals, which fail outside the main thread. The pool has
    # its own limit.
    return bool(verify(parse_answer(answer), _parse(response), timeout_seconds=None))


@lru_cache(maxsize=1024)  # all responses of a group have the same
def parse_answer(answer: str) -> list[Any]:
    """A reference answer as math-verify parses it: an expression and its text.

    Raises:
        ValueError: there is no mathematics in it, or math-verify would ignore a part of it.
    """
    text = answer.strip()
    if _WORDS.fullmatch(text):  # such as "no solution": not a product of letters
        text = rf"\text{{{text}}}"
    parsed = _parse(text)
    if not parsed or isinstance(parsed[0], str):
        raise ValueError(
            f"math-verify finds no mathematics in the answer {answer!r}: {ADVICE} [RL2013]"
        )
    if unread := _unread(_plain_numbers(text), parsed[0]):
        raise ValueError(
            f"math-verify reads the answer {answer!r} as {parsed[0]} and leaves out {unread!r}: "
            f"{ADVICE}"
            " [RL2013]"
        )
    return parsed


ADVICE = (
    r"expected a number or LaTeX, such as 42, 1/2, \sqrt{2} or \text{Monday}; rewrite the answer, "
    "leave the row out, or use a reward function of your own"
)


def _parse(text: str) -> list[Any]:
    """Parse text. Bare mathematics such as ``\\frac{1}{2}`` is put between dollar signs first."""
    from math_verify import parse

    text = _plain_numbers(text)
    if _is_bare(text):
        text = f"${text.replace('$', '')}$"
    parsed: list[Any] = parse(text, parsing_timeout=None)
    return parsed


def _plain_numbers(text: str) -> str:
    """The text with numbers and units rewritten to forms that math-verify knows."""
    if ending := _GSM8K.search(text):
        text = ending[1]
    text = text.strip().replace("\u2212", "-").replace(r"\%", "%").replace(r"\$", "")
    text = re.sub(r"[\u20ac\u00a3\u00a5](?=\s*-?\d)", "", text)
    text = re.sub(r"(?<=\d)_(?=\d{3}(?!\d))", "", text)
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = re.sub(r"(?<=\d)\*\*(?=\d)", "^", text)
    text = _MIXED.sub(_improper, text)
    text = _SCIENTIFIC.sub(lambda match: _shifted(match[1], int(match[2])), text)
    text = _SCALED.sub(lambda match: _shifted(match[1], SCALES[match[2]]), text)
    text = _COMPOUND_UNIT.sub("", text)
    text = _POWER_UNIT.sub("", text)
    text = _BOXED_STOP.sub(r"\1}", text)
    return _BOXED_PERCENT.sub(r"$\1$%", text)


def _shifted(number: str, power: int) -> str:
    return f"{Decimal(number.replace(',', '')).scaleb(power):f}"


def _improper(mixed: re.Match[str]) -> str:
    whole, over, under = map(int, mixed.groups())
    return f"{whole * under + over}/{under}" if over < under else mixed[0]


def _is_bare(text: str) -> bool:
    """Whether the text is one expression without prose."""
    return not _is_delimited(text) and not re.search(r"[A-Za-z]{3}", _COMMAND.sub("", text))


def _is_delimited(text: str) -> bool:
    if any(mark in text for mark in (r"\(", r"\[", r"\boxed", "\n")):
        return True
    return text.count("$") % 2 == 0 and "$" in text


def _unread(text: str, expression: object) -> str:
    """The first part of an answer's text that does not change the expression; "" if there is
    none."""
    bare, text = _is_bare(text), _TEXT.sub("", text)
    if not (bare or _is_delimited(text) or _WITH_UNIT.fullmatch(text)):
        return text
    for number in re.finditer(r"\d+", text):
        start, digit = number.start(), int(text[number.start()])
        others = [f"{text[:start]}{(digit + n) % 9 + 1}{text[start + 1 :]}" for n in (0, 1)]
        if all(_same(_parse(other), expression) for other in others):
            return number[0]
    return ""


def _same(parsed: list[Any], expression: object) -> bool:
    return bool(parsed) and str(parsed[0]) == str(expression)
