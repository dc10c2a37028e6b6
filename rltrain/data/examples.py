"""Reads the prompt, answer and other columns of a row, and checks them before tokenization."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rltrain.config.data import DataConfig
from rltrain.data.answers import AnswerRule, read_answer
from rltrain.data.bad_rows import BadRow
from rltrain.data.columns import MISSING, find_column, is_messages, leaves, listed
from rltrain.data.json_values import Json, as_json
from rltrain.data.messages import Messages, read_prompt, read_tools, take_last_turn
from rltrain.data.problem import RESERVED_COLUMNS

RENAMED = "row_"
"""Prefix for a column whose name is that of an argument which rltrain gives to reward functions."""

NUM_SUGGESTED = 6

LIKELY = {
    "answer": ("answer", "truth", "solution", "response", "completion", "label", "target", "final"),
    "prompt": ("prompt", "message", "conversation", "question", "problem", "instruction", "query"),
}


@dataclass(frozen=True)
class Example:
    """A usable row. ``where`` is its place in the source."""

    prompt: str | Messages
    tools: list[dict[str, Any]] | None
    answer: Json
    columns: dict[str, Json]
    where: str

    def asked(self) -> bytes:
        """Digest of prompt and tools."""
        return _digest([self.prompt, self.tools])

    def answered(self, by_columns: bool) -> bytes:
        """Digest of the answer, and with ``by_columns`` of all columns too."""
        return _digest([self.answer, self.columns] if by_columns else self.answer)


def _digest(value: Json) -> bytes:
    return hashlib.blake2b(json.dumps(value, ensure_ascii=False).encode(), digest_size=16).digest()


def read_example(
    row: Mapping[str, Any], config: DataConfig, rule: AnswerRule, where: str
) -> Example:
    """Read ``row`` as an example.

    Raises:
        BadRow: a column is missing or its value cannot be used; the message names the column.
        ValueError: the configuration is ambiguous for such rows.
    """
    filled = config.source in ("parquet", "huggingface")
    prompt = read_prompt(_column(row, "prompt", config), config.prompt_column, filled)
    last = ""
    if isinstance(prompt, list):
        prompt, last = take_last_turn(prompt, config.last_turn, config.prompt_column)
    elif config.last_turn == "answer":
        raise BadRow(
            "the prompt is no messages",
            f"column {config.prompt_column!r} is text, and data.last_turn=answer makes the last "
            "turn of messages the answer",
        )
    tools = None
    if config.tools_column is not None:
        tools = read_tools(_column(row, "tools", config), config.tools_column, filled)
    if (tools or config.template_args) and isinstance(prompt, str) and not config.as_chat:
        raise ValueError(
            f"{where}: the prompt in column {config.prompt_column!r} is text, which no chat "
            "template reads, and data.tools_column and data.template_args are for one: set "
            "data.as_chat=true, or drop them"
            " [RL2008]"
        )
    answer = _answer(row, config, rule, last, where)
    return Example(prompt, tools, answer, _others(row, config), where)


def _answer(
    row: Mapping[str, Any], config: DataConfig, rule: AnswerRule, last: str, where: str
) -> Json:
    pattern, name = config.answer_pattern, config.answer_column
    if config.last_turn == "answer":
        if name is not None and find_column(row, name) is not MISSING:
            raise ValueError(
                f"{where}: both column {name!r} and the assistant's last turn can be the answer: "
                "set data.last_turn=drop for the column, or data.answer_column=null for the turn"
                " [RL2002]"
            )
        return read_answer(last, config.prompt_column, rule, pattern)
    if name is None:
        return None
    value = _column(row, "answer", config)
    try:
        return read_answer(value, name, rule, pattern)
    except BadRow as error:
        if isinstance(value, str):
            raise
        raise BadRow(
            error.reason, f"{_detail(error)}. {_suggest(row, 'answer', config)}"
        ) from error


def _detail(error: BadRow) -> str:
    return str(error).removeprefix(f"{error.reason}: ")


def _column(row: Mapping[str, Any], use: str, config: DataConfig) -> object:
    name = getattr(config, f"{use}_column")
    value = find_column(row, name)
    if value is not MISSING:
        return value
    missing = f"no column {name!r}"
    if {"chosen", "rejected"} <= row.keys():
        raise BadRow(
            missing,
            "it is a preference pair (chosen, rejected), which rltrain does not train on. To teach "
            "the chosen responses set data.prompt_column and data.answer_column, or for messages "
            "data.prompt_column=chosen data.answer_column=null data.last_turn=answer"
            " [RL2002]",
        )
    raise BadRow(missing, f"columns found: {listed(row)}. {_suggest(row, use, config)} [RL2002]")


def _suggest(row: Mapping[str, Any], use: str, config: DataConfig) -> str:
    """Advice to set the option to a column that could be used."""
    taken = None if use == "prompt" else config.prompt_column
    serving = [name for name, value in leaves(row) if name != taken and _serves(value, use)]
    words = LIKELY.get(use, ("tool",))
    serving.sort(key=lambda name: not any(word in name.lower() for word in words))
    if not serving:
        return f"None of them holds {'an answer' if use == 'answer' else 'a prompt'}"
    names = " or ".join(islice(serving, NUM_SUGGESTED))
    return f"Set data.{use}_column, e.g. to {names}"


def _serves(value: object, use: str) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    if use == "answer":
        return isinstance(value, int) and not isinstance(value, bool)
    return is_messages(value) if use == "prompt" else isinstance(value, list)


def _others(row: Mapping[str, Any], config: DataConfig) -> dict[str, Json]:
    """All columns except prompt and answer. Reserved names get the prefix `RENAMED`."""
    used = {config.prompt_column, config.answer_column}
    others = {}
    for name, value in row.items():
        if name in used:
            continue
        argument = f"{RENAMED}{name}" if name in RESERVED_COLUMNS else name
        if argument != name and argument in row:
            raise BadRow(
                f"the row has columns {name!r} and {argument!r}",
                "reward functions get the first under the second's name: rename one",
            )
        others[argument] = as_json(value, name)
    return others
