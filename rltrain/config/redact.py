"""Removes secrets and terminal codes from text that is written to disk or sent to a server."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "[redacted]"
# A whole word of the key: "hf_token" is a secret, "max_tokens" and "tokenizer" are not.
SECRET_KEY = re.compile(
    r"(^|[_\-.])(api_?key|access_?key|private_?key|token|secret|password|passwd|credentials?)$",
    re.I,
)
SPECIAL_TOKEN = re.compile(r"(^|_)(pad|eos|bos|unk|mask)_token$", re.I)
URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_ASSIGNED = re.compile(r"""([\w.\-]+)(["']?\s*[=:]\s*["']?)([^\s"',;]{8,})""")
SHORTEST = 8
"""Minimum characters of a secret in the environment. Shorter values occur inside other words."""


_known: list[str] = []
"""Secrets that are not in this process's environment."""


def is_secret(name: str) -> bool:
    """Whether a key or variable holds a secret, by its name."""
    return bool(SECRET_KEY.search(name) and not SPECIAL_TOKEN.search(name))


def remember_secrets(values: Iterable[str]) -> None:
    """Remove these from every text from now on."""
    _known.extend(value for value in values if len(value) >= SHORTEST)


def strip_terminal_codes(text: str) -> str:
    """``text`` without terminal codes. Of a line with carriage returns the last part is kept."""
    lines = _ANSI.sub("", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def escape_control(text: str) -> str:
    """The text with what a terminal would obey, such as an escape sequence, spelled out."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def redacted_text(text: str, environment: Mapping[str, str]) -> str:
    """``text`` without secrets and terminal codes.

    Secrets are the values of environment variables with secret-looking names, what
    `remember_secrets` was given, values assigned to such names in the text, and logins in URLs.
    """
    text = strip_terminal_codes(text)
    own = [v for n, v in environment.items() if SECRET_KEY.search(n) and len(v) >= SHORTEST]
    for value in (*own, *_known):
        text = text.replace(value, REDACTED)

    def assigned(match: re.Match[str]) -> str:
        name, between, value = match.groups()
        return f"{name}{between}{redacted(value, name)}"

    return URL_LOGIN.sub(REDACTED, _ASSIGNED.sub(assigned, text))


def redacted(value: Any, key: str = "") -> Any:
    """A copy with every string under a secret-looking key, and every login in a URL, replaced."""
    if isinstance(value, Mapping):
        return {name: redacted(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, key) for item in value]
    if not isinstance(value, str):
        return value
    if is_secret(key):
        return REDACTED
    return URL_LOGIN.sub(REDACTED, value)
