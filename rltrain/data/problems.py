"""From a data configuration to the three sets of problems of a run."""

import logging
import random
from collections.abc import Sequence
from typing import Any

from rltrain.config import Config
from rltrain.config.data import DataConfig
from rltrain.data.arithmetic import arithmetic_rows
from rltrain.data.columns import MISSING, find, kind_of, leaves, listed
from rltrain.data.problem import RESERVED_COLUMNS, Problem, Problems
from rltrain.data.prompts import Tokenizer, encode_prompt
from rltrain.data.report import Column, Dropped, SourceReport, Use
from rltrain.data.sources import Row, read_rows, reasoning_gym_rows

logger = logging.getLogger(__name__)


NUM_LOOKED_AT = 100
"""Rows whose columns are reported."""


def problems_of(config: Config, tokenizer: Tokenizer) -> Problems:
    """The problems of a run, reports included; raises as `load_problems`."""
    return load_problems(config.data, tokenizer, config.model.tiny.warm_start.num_problems)


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
        parts = {k: encode_rows(v, generated, tokenizer, k) for k, v in rows.items() if v}
        problems = {k: v for k, (v, _) in parts.items()}
        return Problems(**problems, reports=tuple(report for _, report in parts.values()))
    if config.source == "reasoning_gym":
        rows_found = reasoning_gym_rows(config, config.size + config.eval_size)
        return _hold_out(*encode_rows(rows_found, config, tokenizer, f"{config.task}"), config)
    assert config.path is not None
    train_rows = read_rows(config.source, config.path, config.split)
    train, report = encode_rows(train_rows, config, tokenizer, config.path)
    if config.eval_path is None and config.eval_split is None:
        return _hold_out(train, report, config)
    eval_path, eval_split = config.eval_path or config.path, config.eval_split or config.split
    eval_rows = read_rows(config.source, eval_path, eval_split)
    held_out, eval_report = encode_rows(eval_rows, config, tokenizer, f"{eval_path}")
    return Problems(train, held_out[: config.eval_size], reports=(report, eval_report))


def encode_rows(
    rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer, where: str
) -> tuple[tuple[Problem, ...], SourceReport]:
    """Problems of ``rows`` in their order. Rows too long are dropped or refused, as configured.

    Raises:
        ValueError: as ``load_problems``; the message names ``where`` and the row.
    """
    problems: dict[str, Problem] = {}
    num_long, first_long = 0, ""
    for number, row in enumerate(rows):
        place = f"{where}, row {number}"
        problem = _encode_row(row, config, tokenizer, place)
        if len(problem.prompt_tokens) > config.max_prompt_tokens:
            message = (
                f"{place}: the prompt has {len(problem.prompt_tokens)} tokens and "
                f"data.max_prompt_tokens is {config.max_prompt_tokens}"
            )
            if config.on_long_prompt == "error":
                raise ValueError(
                    f"{message}: raise it, or set data.on_long_prompt=drop to leave such rows out"
                )
            num_long, first_long = num_long + 1, first_long or message
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
    report = SourceReport(
        where,
        rows=len(rows),
        kept=len(problems),
        repeats=num_repeated,
        dropped={"the prompt is too long": Dropped(num_long, first_long)} if num_long else {},
        columns=columns_of(rows[:NUM_LOOKED_AT], config),
    )
    return tuple(problems.values()), report


def columns_of(rows: Sequence[Row], config: DataConfig) -> tuple[Column, ...]:
    """The columns of some rows and how each is read."""
    kinds: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, value in leaves(row):
            kinds.setdefault(name, {})[kind_of(value)] = None
    uses: dict[str, Use] = {config.prompt_column: "prompt", config.answer_column: "answer"}
    return tuple(
        Column(name, tuple(found), uses.get(name, "column")) for name, found in kinds.items()
    )


def _encode_row(row: Row, config: DataConfig, tokenizer: Tokenizer, place: str) -> Problem:
    rest: dict[str, Any] = dict(row)
    for option in ("prompt_column", "answer_column"):
        name = getattr(config, option)
        if find(row, name) is MISSING:
            raise ValueError(
                f"{place} has no column {name!r}; columns found: {listed(row)}. "
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
        text, tokens = encode_prompt(find(row, config.prompt_column), tokenizer, config.as_chat)
    except ValueError as error:
        raise ValueError(f"{place}, column {config.prompt_column!r}: {error}") from error
    if not tokens:
        raise ValueError(f"{place}: the prompt in column {config.prompt_column!r} is empty")
    return Problem(tokens, text, find(row, config.answer_column), rest)


def _hold_out(problems: tuple[Problem, ...], report: SourceReport, config: DataConfig) -> Problems:
    if len(problems) <= config.eval_size:
        raise ValueError(
            f"{len(problems)} problems leave none to train on after data.eval_size="
            f"{config.eval_size} are held out: lower it or set data.eval_path"
        )
    shuffled = random.Random(config.seed).sample(problems, len(problems))
    cut = len(shuffled) - config.eval_size
    return Problems(tuple(shuffled[:cut]), tuple(shuffled[cut:]), reports=(report,))
