"""Turns the rows of a source into problems. Each distinct prompt is templated and tokenized
once."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rltrain.config.data import DataConfig
from rltrain.data.answers import AnswerRule
from rltrain.data.bad_rows import BadRow, Tally
from rltrain.data.problem import Problem, shorten
from rltrain.data.prompts import Tokenizer, Tokens, encode_texts, render
from rltrain.data.reading import LOG_EVERY_S, DistinctExample, Reading
from rltrain.data.source_report import SourceReport
from rltrain.data.sources import SourceRow

logger = logging.getLogger(__name__)

CHUNK = 2048
"""Prompts that are tokenized at once. The tokenizer uses several threads."""

Encoded = tuple[str, Tokens]
Made = tuple[tuple[Problem, ...], SourceReport]


def encode_rows(
    rows: Iterable[SourceRow],
    config: DataConfig,
    tokenizer: Tokenizer,
    where: str,
    rule: AnswerRule,
) -> Made:
    """Problems in the order of their rows, and a report of all rows.

    Rows that cannot be used end the run or are left out, by ``data.on_bad_row`` and
    ``data.on_long_prompt``. Rows with the same prompt and answer are one problem. A prompt with
    several answers cannot be rewarded, but supervised steps can use it.

    Raises:
        ValueError: a row cannot be used and must not be left out, or none is left.
    """
    tally = Tally(config.on_bad_row == "drop")
    reading = Reading(config, rule, tally, where)
    reading.read(rows)
    entries = list(reading.entries.values())
    problems: dict[str, list[tuple[DistinctExample, Problem]]] = {}
    for entry, encoded in zip(entries, _encode(entries, config, tokenizer, where), strict=True):
        if isinstance(encoded, BadRow):
            tally.bad(entry.example.where, encoded, entry.count)
        elif not _is_long(entry, encoded[1], config, tally):
            example = entry.example
            text, tokens = encoded
            problem = Problem(tokens, text, example.answer, example.columns, place=example.where)
            problems.setdefault(problem.id, []).append((entry, problem))
    kept = tuple(_judgeable(problems, rule, tally))
    tally.check_some_left(where, reading.num_rows)
    report = SourceReport(
        where,
        rows=reading.num_rows,
        kept=len(kept),
        repeats=reading.num_rows - len(kept) - tally.total,
        other_columns=dict(sum((entry.other_columns for entry in entries), Counter())),
        dropped=tally.dropped,
        columns=reading.columns(),
    )
    return kept, report


def _encode(
    entries: Sequence[DistinctExample], config: DataConfig, tokenizer: Tokenizer, where: str
) -> Iterator[Encoded | BadRow]:
    """Text and tokens of each prompt, or its error. Equal prompts are encoded once."""
    asked = {entry.asked: entry.example for entry in entries}
    encoded: dict[bytes, Encoded | BadRow] = {}
    keys = list(asked)
    due = time.monotonic() + LOG_EVERY_S
    for start in range(0, len(keys), CHUNK):
        if time.monotonic() > due:
            due = time.monotonic() + LOG_EVERY_S
            logger.info("%s: tokenized %d of %d prompts", where, start, len(keys))
        texts: dict[bool, dict[bytes, str]] = {False: {}, True: {}}  # by whether templated
        for key in keys[start : start + CHUNK]:
            example = asked[key]
            try:
                text, templated = render(
                    example.prompt, tokenizer, config.as_chat, example.tools, config.template_args
                )
            except BadRow as error:
                encoded[key] = error
            except ValueError as error:
                raise ValueError(
                    f"{example.where}, column {config.prompt_column!r}: {error}"
                ) from error
            else:
                texts[templated][key] = text
        for templated, chunk in texts.items():
            tokens = encode_texts(list(chunk.values()), tokenizer, templated)
            for (key, text), ids in zip(chunk.items(), tokens, strict=True):
                encoded[key] = (
                    (text, ids) if ids else BadRow("the prompt has no tokens", repr(text))
                )
    return (encoded[entry.asked] for entry in entries)


def _is_long(entry: DistinctExample, tokens: Tokens, config: DataConfig, tally: Tally) -> bool:
    if len(tokens) <= config.max_prompt_tokens:
        return False
    message = (
        f"{entry.example.where}: the prompt has {len(tokens)} tokens and data.max_prompt_tokens is "
        f"{config.max_prompt_tokens}"
    )
    if config.on_long_prompt == "error":
        raise ValueError(
            f"{message}: raise it, or set data.on_long_prompt=drop to leave such rows out [RL2005]"
        )
    tally.count("the prompt is too long", message, entry.count)
    return True


def _judgeable(
    problems: dict[str, list[tuple[DistinctExample, Problem]]], rule: AnswerRule, tally: Tally
) -> Iterator[Problem]:
    """One problem per prompt; for supervised steps one per prompt and answer.

    A prompt with several answers cannot be rewarded, because the right one is not known. It is left
    out with all its rows, or ends the run.
    """
    for same_prompt in problems.values():
        by_answer = {entry.answered: problem for entry, problem in reversed(same_prompt)}
        if len(by_answer) == 1 or rule == "supervised":
            yield from reversed(by_answer.values())
            continue
        if rule == "scored":
            yield same_prompt[0][1]
            continue
        (first, problem), (second, other) = same_prompt[0], same_prompt[-1]
        error = BadRow(
            "a prompt has several answers",
            f"{shorten(problem.prompt)!r} is answered {shorten(str(problem.answer), 40)!r} here, "
            f"{shorten(str(other.answer), 40)!r} in {second.example.where}",
        )
        tally.bad(first.example.where, error, sum(entry.count for entry, _ in same_prompt))


def log_report(report: SourceReport) -> None:
    """Log a warning for rows that were left out."""
    for reason, dropped in report.dropped.items():
        logger.warning(
            "%s: left out %d of %d rows (%s); the first: %s",
            report.where,
            dropped.count,
            report.rows,
            reason,
            dropped.first,
        )
    others = ", ".join(f"{name} of {count}" for name, count in report.other_columns.items())
    if report.repeats:
        logger.warning(
            "%s: left out %d of %d rows with a repeated prompt%s",
            report.where,
            report.repeats,
            report.rows,
            f"; from the row that is kept differs column {others}" if others else "",
        )
