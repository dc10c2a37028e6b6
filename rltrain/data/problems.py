"""From a data configuration to the three sets of problems of a run."""

import logging
import random
from collections.abc import Sequence
from typing import Any

from rltrain.config.data import DataConfig
from rltrain.data.arithmetic import arithmetic_rows
from rltrain.data.problem import RESERVED_COLUMNS, Problem, Problems
from rltrain.data.prompts import Tokenizer, encode_prompt
from rltrain.data.sources import Row, read_rows, reasoning_gym_rows

logger = logging.getLogger(__name__)


def load_problems(config: DataConfig, tokenizer: Tokenizer, num_warm_start: int = 0) -> Problems:
    """Read or generate the problems, apply the chat template, tokenize, and split.

    ``num_warm_start`` problems are set aside for supervised steps by the arithmetic source; the
    other sources have no warm-start set. A prompt that comes again is kept once.

    Raises:
        ValueError: no such file, no row, a column is missing, a prompt that is too long or not
            a prompt, or sets that overlap.
    """
    if config.source == "arithmetic":
        rows = arithmetic_rows(num_warm_start, config.eval_size, config.size, config.seed)
        generated = config.model_copy(update={"prompt_column": "prompt", "answer_column": "answer"})
        parts = {k: encode_rows(v, generated, tokenizer, k) for k, v in rows.items()}
        return Problems(**parts)
    if config.source == "reasoning_gym":
        rows_found = reasoning_gym_rows(config, config.size + config.eval_size)
        return _hold_out(encode_rows(rows_found, config, tokenizer, f"{config.task}"), config)
    assert config.path is not None
    train_rows = read_rows(config.source, config.path, config.split)
    train = encode_rows(train_rows, config, tokenizer, config.path)
    if config.eval_path is None and config.eval_split is None:
        return _hold_out(train, config)
    eval_path, eval_split = config.eval_path or config.path, config.eval_split or config.split
    eval_rows = read_rows(config.source, eval_path, eval_split)
    held_out = encode_rows(eval_rows, config, tokenizer, f"{eval_path}")
    return Problems(train=train, held_out=held_out[: config.eval_size])


def encode_rows(
    rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer, where: str
) -> tuple[Problem, ...]:
    """Problems of ``rows`` in their order. Rows too long are dropped or refused, as configured.

    Raises:
        ValueError: as ``load_problems``; the message names ``where`` and the row.
    """
    problems: dict[str, Problem] = {}
    num_long = 0
    for number, row in enumerate(rows):
        place = f"{where}, row {number}"
        problem = _encode_row(row, config, tokenizer, place)
        if len(problem.prompt_tokens) > config.max_prompt_tokens:
            if config.on_long_prompt == "error":
                raise ValueError(
                    f"{place}: the prompt has {len(problem.prompt_tokens)} tokens and "
                    f"data.max_prompt_tokens is {config.max_prompt_tokens}: raise it, "
                    "or set data.on_long_prompt=drop to leave such rows out"
                )
            num_long += 1
        else:
            problems.setdefault(problem.id, problem)
    num_repeated = len(rows) - num_long - len(problems)
    for number, what in (
        (num_long, "with a long prompt"),
        (num_repeated, "with a repeated prompt"),
    ):
        if number:
            logger.warning("%s: left out %d of %d rows %s", where, number, len(rows), what)
    if rows and not problems:
        raise ValueError(
            f"{where}: all {len(rows)} prompts are longer than data.max_prompt_tokens="
            f"{config.max_prompt_tokens}: raise it"
        )
    return tuple(problems.values())


def _encode_row(row: Row, config: DataConfig, tokenizer: Tokenizer, place: str) -> Problem:
    rest: dict[str, Any] = dict(row)
    for option in ("prompt_column", "answer_column"):
        name = getattr(config, option)
        if name not in row:
            raise ValueError(
                f"{place} has no column {name!r}; columns found: {', '.join(map(repr, row))}. "
                f"Name the right one with data.{option}"
            )
        rest.pop(name, None)
    clash = sorted(RESERVED_COLUMNS & rest.keys())
    if clash:
        raise ValueError(
            f"{place}: column {clash[0]!r} is the name of an argument that reward functions get "
            "from us: rename it"
        )
    try:
        text, tokens = encode_prompt(row[config.prompt_column], tokenizer, config.as_chat)
    except ValueError as error:
        raise ValueError(f"{place}, column {config.prompt_column!r}: {error}") from error
    if not tokens:
        raise ValueError(f"{place}: the prompt in column {config.prompt_column!r} is empty")
    return Problem(tokens, text, row[config.answer_column], rest)


def _hold_out(problems: tuple[Problem, ...], config: DataConfig) -> Problems:
    if len(problems) <= config.eval_size:
        raise ValueError(
            f"{len(problems)} problems leave none to train on after data.eval_size="
            f"{config.eval_size} are held out: lower it or set data.eval_path"
        )
    shuffled = random.Random(config.seed).sample(problems, len(problems))
    cut = len(shuffled) - config.eval_size
    return Problems(train=tuple(shuffled[:cut]), held_out=tuple(shuffled[cut:]))
