"""Reads chat messages of datasets, and rejects what a chat template would silently change."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from rltrain.config.bounded_files import parse_json
from rltrain.data.bad_rows import BadRow
from rltrain.data.columns import describe_value, is_messages, kind_of
from rltrain.data.json_values import as_json, check_text

Messages = list[dict[str, Any]]
LastTurn = Literal["error", "answer", "drop"]

ROLES = ("system", "developer", "user", "assistant", "tool")

SHARE_GPT = {"human": "user", "gpt": "assistant"}
"""Role names of the ShareGPT format -> role. It also uses ``system`` and the names of `ROLES`."""

MORE_THAN_TEXT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's turn whose content is not in its text."""

EXPECTED = "expected text or a list of messages like {'role': 'user', 'content': '...'}"


def read_prompt(value: object, name: str, filled: bool = False) -> str | Messages:
    """Text, or messages with text as ``content`` and without null members.

    Text that is the JSON of messages is read as messages, because some tables store them so.

    Args:
        filled: remove null members everywhere in a message. Arrow adds them: it gives every object
            of a column the members of all objects

    Raises:
        BadRow: it is neither; the message names the column ``name`` and the message.
    """
    if isinstance(value, str):
        return _read_text(value, name)
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else describe_value(value)
        raise BadRow(
            "the prompt is neither text nor messages", f"column {name!r}: {EXPECTED}, found {kind}"
        )
    items = without_null(value) if filled else value
    return [_read_message(item, f"{name}.{number}") for number, item in enumerate(items)]


def _read_text(text: str, name: str) -> str | Messages:
    start = text.lstrip()[:40]
    if start.startswith("[") and '"' in start:
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            parsed = None
        if is_messages(parsed) or _is_share_gpt(parsed):
            return read_prompt(parsed, name)
    if start.startswith(("[{'role':", "[{'content':", "[{'from':", "array([{'", "[array([{'")):
        raise BadRow(
            "the prompt is the printed form of Python objects",
            f"column {name!r} starts with {start!r}: write messages as JSON, or keep them as a "
            "list in JSONL or Parquet",
        )
    if not text.strip():
        raise BadRow("the prompt is empty", f"column {name!r} is {text!r}")
    return _prompt_text(text, name)


def _prompt_text(text: str, name: str) -> str:
    if "\0" in text:
        raise BadRow(
            "the prompt has a NUL character", f"column {name!r}, at character {text.index(chr(0))}"
        )
    return check_text(text, name)


def _is_share_gpt(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and {"from", "value"} <= item.keys() for item in value)
    )


def _read_message(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadRow(
            "a message is no object", f"column {name!r}: {EXPECTED}, found {describe_value(value)}"
        )
    members = {key: item for key, item in value.items() if item is not None}
    if "role" not in members and "from" in members and "content" not in members:
        role = members.pop("from")
        members = {
            "role": SHARE_GPT.get(str(role), role),
            "content": members.pop("value", None),
        } | members
    role = members.pop("role", None)
    if role not in ROLES:
        role_found = "no role" if role is None else f"the role {role!r}"
        raise BadRow(
            "a message has an unknown role",
            f"column {name!r} has {role_found}, expected one of {', '.join(ROLES)} (human and gpt "
            "in messages with from and value)",
        )
    calls = role == "assistant" and bool(members.get("tool_calls"))
    content = _content(members.pop("content", "" if calls else None), f"{name}.content")
    if role == "user" and not content.strip():
        raise BadRow("a message is empty", f"column {f'{name}.content'!r} is {content!r}")
    return {"role": role, "content": content, **as_json(members, name)}


def _content(content: object, name: str) -> str:
    """Text, or the joined texts of a list of parts."""
    if isinstance(content, str):
        return _prompt_text(content, name)
    if not isinstance(content, list):
        raise BadRow(
            f"the content of a message is {kind_of(content)}",
            f"column {name!r}: expected text or a list of text parts, found "
            f"{describe_value(content)}",
        )
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            described = f"a part of type {kind!r}" if kind is not None else str(part)[:60]
            raise BadRow(
                "a part of a message is no text",
                f"column {f'{name}.{number}'!r} is {described}: rltrain trains on text alone; "
                "expected {'type': 'text', 'text': '...'}",
            )
        texts.append(_prompt_text(text, f"{name}.{number}.text"))
    return "".join(texts)


def take_last_turn(messages: Messages, last_turn: LastTurn, name: str) -> tuple[Messages, str]:
    """The messages of the prompt, and the text of the assistant's last turn if it was removed, or
    "".

    Raises:
        BadRow: there is such a turn and ``last_turn`` is error, there is none and ``last_turn`` is
            answer, or no prompt is left without it.
    """
    if messages[-1]["role"] != "assistant":
        if last_turn == "answer":
            raise BadRow(
                "the messages do not end with the assistant's turn",
                f"column {name!r} ends with {messages[-1]['role']}'s, and data.last_turn=answer "
                "makes the last turn the answer",
            )
        return messages, ""
    if last_turn == "error":
        raise BadRow(
            "the messages end with the assistant's turn",
            f"column {name!r}: the model would read it as part of the prompt. Take it off: "
            "data.last_turn=drop where a column holds the answer, data.last_turn=answer where it "
            "is the answer",
        )
    *prompt, last = messages
    more = sorted(last.keys() & set(MORE_THAN_TEXT))
    if last_turn == "answer" and more:
        raise BadRow(
            "the assistant's last turn is more than text",
            f"column {name!r}: it has {more[0]!r} beside its content, and data.last_turn=answer "
            "would lose that",
        )
    if not prompt or prompt[-1]["role"] == "assistant":
        raise BadRow(
            "no prompt is left without the assistant's last turn",
            f"column {name!r} has {len(messages)} messages, the last two of the assistant"
            if prompt
            else f"column {name!r} has nothing before it",
        )
    return prompt, last["content"]


def read_tools(value: object, name: str, filled: bool = False) -> list[dict[str, Any]] | None:
    """Tools for a chat template: JSON schemas, from a list or its JSON text.

    Null and an empty list mean no tools.

    Args:
        filled: as in `read_prompt`; it has no effect on JSON text

    Raises:
        BadRow: the value is something else.
    """
    expected = "expected a list of tools like {'name': ..., 'parameters': {...}} or its JSON text"
    tools = value
    if isinstance(value, str):
        try:
            tools = parse_json(value, name) if value.strip() else None
        except ValueError as error:
            raise BadRow(
                "the tools are not JSON", f"column {name!r}: {expected} ({error})"
            ) from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise BadRow(
            "the tools are no list", f"column {name!r}: {expected}, found {kind_of(tools)}"
        )
    for number, tool in enumerate(tools):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise BadRow(
                "a tool has no name",
                f"column {f'{name}.{number}'!r}: {expected}, found {describe_value(tool)}",
            )
    read: list[dict[str, Any]] = as_json(tools, name)
    return without_null(read) if filled and not isinstance(value, str) else read


def without_null(value: Any) -> Any:
    """The value without null members of objects."""
    if isinstance(value, dict):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value
