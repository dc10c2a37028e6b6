"""Messages for errors in a configuration: the key, the nearest valid name, the broken rule."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rltrain.config.error_codes import with_code
from rltrain.config.reference import Key, keys, keys_below, sections, show
from rltrain.config.root import Config

OTHER_SAMPLING = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "structured_outputs",
        "thinking_token_budget",
        "top_k",
        "top_p",
    }
)
"""Sampling parameters of vLLM that change the distribution. Tokens would then come from another
distribution than the one that is trained."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message says which key and why."""


def validate(values: dict[str, Any]) -> Config:
    """The configuration that ``values`` describe.

    Raises:
        ConfigError: names every key that is unknown, mistyped, out of range or breaks a rule.
    """
    if bad := list(_no_text(values)):
        raise ConfigError("\n".join(bad))
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        by_name = {key.name: key for key in keys()}
        problems = [describe_error(detail, by_name) for detail in error.errors()]
        raise ConfigError("\n".join(problems)) from None


def _no_text(values: Any, name: str = "") -> Iterator[str]:
    """Of every text that no file or terminal can hold, such as half a surrogate, a line."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _no_text(key, name)
            below = f"{name}.{key}" if name else str(key)
            yield from _no_text(value, below.encode(errors="replace").decode())
    elif isinstance(values, list):
        for value in values:
            yield from _no_text(value, name)
    elif isinstance(values, str):
        try:
            values.encode()
        except UnicodeEncodeError:
            shown = ascii(values[:100])
            yield f"{name}: expected text that UTF-8 can write, found {shown} [RL1002]"


def describe_error(detail: ErrorDetails, by_name: dict[str, Key]) -> str:
    """One pydantic error as one line."""
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return unknown_key(name)
    if detail["type"] == "value_error":
        error = detail["ctx"]["error"]
        message = f"{name + ': ' if name else ''}{error} (rule: {broken_rule(error)})"
        return with_code(message, "RL1003")
    shown = show(detail["input"])
    if not name:
        return f"expected sections such as trainer and data, found {shown or 'nothing'} [RL1002]"
    by_name = by_name | {key.name: key for key in _in_dictionaries(name, by_name.values())}
    if detail["type"] == "missing" and name in by_name:
        return f"{name}: expected {by_name[name].type}, found nothing: set it [RL1002]"
    while name and name not in by_name:  # a member of a union or a dictionary has a longer path
        if name in set(sections()):
            return f"{name}: expected a section with keys of its own, found {shown} [RL1002]"
        name = name.rpartition(".")[0]
    return (
        f"{name}: expected {by_name[name].type}, found {shown}{quoting_hint(by_name[name], detail)}"
        " [RL1002]"
    )


def _in_dictionaries(name: str, known: Iterable[Key]) -> Iterator[Key]:
    """The keys beside ``name``, where it lies in a section that is the value of a dictionary."""
    for key in known:
        if key.section is not None and name.startswith(f"{key.name}."):
            yield from keys_below(key, name.removeprefix(f"{key.name}.").partition(".")[0])


def broken_rule(error: BaseException) -> str:
    """The name of the validator that raised ``error``: it states the rule."""
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_name.replace("_", " ")


def quoting_hint(key: Key, detail: ErrorDetails) -> str:
    if isinstance(detail["input"], bool) and "off" in key.type:
        return ' (YAML reads a bare off as false: write "off")'
    if detail["type"] == "string_type" and isinstance(detail["input"], int | float):
        return f" (to give a number as text, quote it twice: {key.name}=\"'{detail['input']}'\")"
    return ""


def unknown_key(name: str, groups: Iterable[str] = ()) -> str:
    if name.removeprefix("rollout.") in OTHER_SAMPLING:
        return (
            f"{name}: there is no such key. Tokens are sampled from the whole distribution that is "
            "trained; the importance ratio would be wrong for any other. Leave it out [RL1013]"
        )
    known = [*keys(), *_in_dictionaries(name, keys())]
    valid = [*(key.name for key in known), *(() if "." in name else groups)]
    return f"{name or '(no name)'}: there is no such key. {nearest(name, valid)} [RL1001]"


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid names closest to ``name``, or the shortest list to choose from."""
    valid = list(valid)
    parent, _, leaf = name.rpartition(".")
    same_leaf = [other for other in valid if other.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.75)
    if nearest_names := [*sorted(same_leaf, key=lambda other: other.count(".")), *close]:
        return f"Nearest: {', '.join(list(dict.fromkeys(nearest_names))[:3])}"
    siblings = [other for other in valid if other.rpartition(".")[0] == parent]
    return f"Choose from: {', '.join(siblings or sorted({o.partition('.')[0] for o in valid}))}"
