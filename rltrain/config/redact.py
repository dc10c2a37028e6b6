"""Removes secrets and terminal codes from what is written to disk or sent to a server.

A secret is known by the name it stands under (`is_secret`), by its shape, such as a login in a URL
or ``Bearer ...``, and by its value, if this process has it in its environment under such a name.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rltrain.config.secret_names import is_secret

REDACTED = "[redacted]"
SHORTEST = 8
"""Minimum characters of a secret that has no place of its own: shorter ones are in other words."""
URL_LOGIN = re.compile(r"(?<=://)[^/\s]+(?=@)")
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s]+)@")
_SIGNED_URL = re.compile(r"(?<=[?&])((?:[\w\-]*-)?(?:sig|signature))=[^&\s\"']+", re.I)
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=\bBearer )[^\s\"',]{8,}|(?<=\bBasic )[A-Za-z0-9+/=]{12,}"
    r"|(?<![\w\-])(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w\-]{16,}"
    r"|sk-(?=[\w\-]{0,99}\d)[\w\-]{20,}|xox[abeprs]-[\w\-]{10,}|AKIA[A-Z0-9]{16}|AIza[\w\-]{30,}"
    r"|eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]+)",
    re.S,
)
_NAMED = re.compile(
    r"(?P<name>(?:(?<!\S)|(?<=[\"'(\[,]))--?[\w.\-]++)(?:[\"']?\s*,\s*|\s+)"
    r"|(?<![\w.\-])(?P<key>[\w.\-]++)\\*[\"']?\s*(?:=>|[=:])\s*"
)
_VALUE = re.compile(
    r"(?:(?:Bearer|Basic|Token) )?"
    r"(?:(?P<open>\\*[\"'])(?P<quoted>(?:(?!(?P=open))(?:\\.|[^\\\n]))*)"
    r"|(?!expected\b)(?P<bare>[^\s\"']+))"
)
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")

_known: list[str] = []
"""Secrets that are not in this process's environment."""


def remember_secrets(values: Iterable[str]) -> None:
    """Remove these from every text from now on."""
    _known.extend(value for value in values if len(value) >= SHORTEST)


def remembered_secrets() -> list[str]:
    """All of `remember_secrets`, for another process of ours."""
    return list(_known)


def strip_terminal_codes(text: str) -> str:
    """``text`` without terminal codes. Of a line with carriage returns the last part is kept."""
    lines = _ANSI.sub("", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def escape_control(text: str) -> str:
    """The text with what a terminal would obey, such as an escape sequence, spelled out."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def redacted_text(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """``text`` without secrets and terminal codes."""
    return Redactor(environment).text(strip_terminal_codes(text))


def redacted(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """A copy of plain data without secrets."""
    return Redactor(environment).value(value)


class Redactor:
    """Knows the secrets of an environment, and those of `remember_secrets`, by value."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        own = [value for name, value in environment.items() if is_secret(name)]
        own += [m[1] for value in environment.values() for m in _URL_PASSWORD.finditer(value)]
        secrets = [secret for secret in (*own, *_known) if len(secret) >= SHORTEST]
        # The longest first: one may be the beginning of another.
        self.secrets = sorted({form for one in secrets for form in _forms(one)}, key=len)[::-1]

    def known(self, value: Any) -> Any:
        """A copy without the secrets that are known by value. Of what a model or a data set says
        nothing else is changed."""
        if isinstance(value, str):
            for secret in self.secrets:
                value = value.replace(secret, REDACTED)
            return value
        if isinstance(value, Mapping):
            return {self.known(name): self.known(item) for name, item in value.items()}
        return [self.known(item) for item in value] if isinstance(value, list | tuple) else value

    def text(self, text: str) -> str:
        """``text`` without secrets that are known by value, shape or what stands before them."""
        text = _SHAPES.sub(REDACTED, _without_named(self.known(text)))
        return URL_LOGIN.sub(REDACTED, _SIGNED_URL.sub(rf"\1={REDACTED}", text))

    def value(self, value: Any, key: str = "") -> Any:
        """A copy of plain data without secrets: all texts below a secret's name, and after a flag
        with one in a list of arguments, are taken for secrets."""
        if isinstance(value, Mapping):
            return {
                self.known(name): self.value(item, key if is_secret(key) else str(name))
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            flags = [str(item) if _is_flag(item) else "" for item in ("", *value)]
            return [
                self.value(item, key if is_secret(key) or _is_flag(item) else flag)
                for item, flag in zip(value, flags, strict=False)
            ]
        if not is_secret(key):
            return self.text(value) if isinstance(value, str) else value
        # A number below "..._token" is a count; a boolean says whether there is one.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        may_count = key.lower().endswith(("token", "auth"))
        return REDACTED if isinstance(value, str) or (is_number and not may_count) else value

    def arguments(self, arguments: Sequence[str]) -> list[str]:
        """A command line without secrets. Of Hydra's overrides, with its own quotes and nested
        dictionaries, the whole value goes if any of it is a secret."""
        return [self._argument(argument) for argument in self.value(list(arguments))]

    def _argument(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        if not equals:
            return argument
        plain = value.replace("\\", "")
        hidden = any(secret.replace("\\", "") in plain for secret in self.secrets)
        if is_secret(name) or hidden or any(map(is_secret, _names(value))):
            return f"{name}={REDACTED}"
        return argument


class WithoutSecrets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted_text(super().format(record))


def log_without_secrets() -> None:
    """Log to the terminal, which the log of a batch job keeps, with secrets redacted."""
    handler = logging.StreamHandler()
    handler.setFormatter(WithoutSecrets("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _forms(secret: str) -> Iterator[str]:
    """The secret as itself, in JSON, in Python's and a URL's notation."""
    yield from (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe=""))
    yield json.dumps(secret, ensure_ascii=False)[1:-1]


def _is_flag(item: object) -> bool:
    return isinstance(item, str) and item.startswith("-") and is_secret(item)


def _names(text: str) -> Iterator[str]:
    """What stands before a value in ``text``: of keys, assignments and flags."""
    return (match["name"] or match["key"] for match in _NAMED.finditer(f"{text} "))


def _without_named(text: str) -> str:
    """``text`` with the values of secrets' names replaced. Others are looked into."""
    parts, at = [], 0
    for match in _NAMED.finditer(text):
        name = match["name"] or match["key"]
        if match.start() < at or not is_secret(name):
            continue
        value = _VALUE.match(text, match.end())
        if value is None or len(value["quoted"] or value["bare"] or "") < SHORTEST:
            continue
        which = "quoted" if value["open"] else "bare"
        parts += [text[at : value.start(which)], REDACTED]
        at = value.end(which)
    return "".join([*parts, text[at:]])
