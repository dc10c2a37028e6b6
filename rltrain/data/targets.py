"""Encodes the answers of problems as targets of supervised steps."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from rltrain.config.data import DataConfig
from rltrain.data.problem import Problem, shorten
from rltrain.data.prompts import Tokenizer, encode_response

logger = logging.getLogger(__name__)


def with_targets(
    problems: Sequence[Problem], tokenizer: Tokenizer, config: DataConfig, max_tokens: int
) -> tuple[Problem, ...]:
    """The problems with their answers as ``target_tokens``, in their order.

    An answer with more than ``max_tokens`` tokens, including its end-of-sequence token, is dropped
    or rejected by ``data.on_long_prompt``.

    Raises:
        ValueError: an answer is not text, or is too long; the message names the row.
    """
    encoded = [replace(p, target_tokens=encode_response(_text(p), tokenizer)) for p in problems]
    kept = tuple(p for p in encoded if len(p.target_tokens) <= max_tokens)
    if len(kept) == len(encoded):
        return kept
    if config.on_long_prompt == "error" or not kept:
        long = next(p for p in encoded if len(p.target_tokens) > max_tokens)
        raise ValueError(
            f"{_place(long)} has {len(long.target_tokens)} tokens, its end-of-sequence token "
            f"counted, and rollout.max_response_tokens is {max_tokens} ({len(encoded) - len(kept)} "
            f"of {len(encoded)} answers are longer): raise it, or set data.on_long_prompt=drop to "
            "leave such rows out"
            " [RL2005]"
        )
    logger.warning(
        "left out %d of %d rows with a long answer", len(encoded) - len(kept), len(encoded)
    )
    return kept


def _text(problem: Problem) -> str:
    """The answer as text. Integers have one spelling; floats, booleans and lists have several."""
    answer = problem.answer
    if isinstance(answer, str) and answer:
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    raise ValueError(
        f"{_place(problem)} is {shorten(repr(answer))} ({type(answer).__name__}): expected text, "
        "which supervised steps teach as it is. Name the column that has it with "
        "data.answer_column, or write the answers as text"
        " [RL2002]"
    )


def _place(problem: Problem) -> str:
    row = f"{problem.place}: " if problem.place else ""
    return f"{row}the answer to {shorten(problem.prompt)!r}"
