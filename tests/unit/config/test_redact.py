"""Secrets in free text, plain data, command lines and logs."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.actors.log_pieces import LogPiece, append_piece
from rltrain.config import Config
from rltrain.config.redact import (
    REDACTED,
    Redactor,
    WithoutSecrets,
    redacted,
    redacted_text,
)
from rltrain.config.secret_names import is_secret


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the key is wandb-0123456789", "the key is [redacted]"),
        ("https://me:pass@host/x failed", "https://[redacted]@host/x failed"),
        ("HF_TOKEN='hf_abcdefghij' set", "HF_TOKEN='[redacted]' set"),
        ("api_key: abcdefghijkl", "api_key: [redacted]"),
        ("max_tokens=123456789", "max_tokens=123456789"),
        ("pad_token=<|endoftext|>", "pad_token=<|endoftext|>"),
        ("row 3, token: 5", "row 3, token: 5"),
        ("yes to all", "yes to all"),
    ],
)
def test_what_looks_like_a_secret_goes(text: str, expected: str) -> None:
    environment = {"WANDB_API_KEY": "wandb-0123456789", "MY_TOKEN": "yes", "USER": "row 3"}
    assert redacted_text(text, environment) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Bearer abcdefghijk", "Authorization: Bearer [redacted]"),
        ("curl --api-key abcdefghijk x", "curl --api-key [redacted] x"),
        ("['--token', 'abcdefghijk']", "['--token', '[redacted]']"),
        ("{'password': 'two words', 'x': 3}", "{'password': '[redacted]', 'x': 3}"),
        (r'{"a": "{\"api_key\": \"abcdefghijk\"}"}', r'{"a": "{\"api_key\": \"[redacted]\"}"}'),
        ("http://me:p@ss@host/?a=1&sig=ab", "http://[redacted]@host/?a=1&sig=[redacted]"),
        ("hf_abcdefghijklmnopqrst is old", "[redacted] is old"),
        ("it's wandb%2B0123456789", "it's [redacted]"),
        ("cluster.env.HF_TOKEN: expected text", "cluster.env.HF_TOKEN: expected text"),
        ("sort_key=by_the_length num_key_value_heads: 12345678", None),
    ],
)
def test_secrets_of_free_text_go(text: str, expected: str | None) -> None:
    assert redacted_text(text, {"A_KEY": "wandb+0123456789"}) == (expected or text)


@pytest.mark.parametrize(
    "name",
    [
        "OPENAI_KEY",
        "openai_key",
        "x-api-key",
        "apiKey",
        "Authorization",
        "bearer",
        "dbPassword",
        "HF_TOKEN_2",
        "aws.secret",
        "SLACK_WEBHOOK_URL",
        "credentials",
        "+rollout.engine_args.hf_token",
        "--auth-token",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "stop_token_ids",
        "tokenizer",
        "num_key_value_heads",
        "sort_key",
        "PWD",
        "prompt_key",
        "PUBLIC_KEY",
        "KEY",
        "eos_token",
        "image_token",
        "tokens_per_second",
        "token_mean",
        "key",
        "author",
        "monkey",
    ],
)
def test_names_of_settings(name: str) -> None:
    assert not is_secret(name)


def test_the_settings_of_rltrain_are_left_as_they_are() -> None:
    values = Config().model_dump(mode="json")
    assert redacted(values, {}) == values


SECRETS = st.text(st.characters(exclude_characters="[]", codec="utf-8"), min_size=8, max_size=40)
NAMES = st.sampled_from(["api_key", "OPENAI_KEY", "authorization", "hub.hf_token", "dbPassword"])
PLANTED = "5up3r-s3cr3t-value"


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """``inner`` at any depth of plain data, with something beside it."""

    def wrap(value: Any, levels: list[str]) -> Any:
        for level in levels:
            value = [1, value] if level == "list" else {"max_tokens": 1, level: value}
        return value

    return st.builds(wrap, inner, st.lists(st.sampled_from(["list", "key", "a"]), max_size=5))


def leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from (name, *leaves(item))
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield str(value)


@given(around(st.builds(lambda name, deep: {name: deep}, NAMES, around(st.just(PLANTED)))))
def test_below_a_secrets_name_nothing_stays(value: Any) -> None:
    assert PLANTED not in str(redacted(value, {}))


@given(st.data(), SECRETS, st.text(), st.text())
def test_a_secret_of_the_environment_is_in_no_leaf(
    data: st.DataObject, secret: str, before: str, after: str
) -> None:
    text = before + secret + after
    shapes = st.sampled_from([text, {text: 1}, json.dumps({"a": text}), repr(text), quote(text)])
    value = data.draw(around(shapes))
    redactor = Redactor({"A_TOKEN": secret, "PATH": "/bin"})
    for clean in (redactor.value(value), redactor.known(value)):
        assert not any(form in leaf for leaf in leaves(clean) for form in redactor.secrets)


OF_TEXT = st.from_regex(r"[A-Za-z0-9+/=_.\-]{8,40}", fullmatch=True)


@given(OF_TEXT, NAMES, st.sampled_from(["{n}={v}", "--{n} {v}", '{{"{n}": "{v}"}}', "{n}: {v}"]))
def test_a_named_secret_is_in_no_text(secret: str, name: str, form: str) -> None:
    text = f"it said: {form.format(n=name, v=secret)} and went on"
    assert secret not in redacted_text(text, {}).replace(name, "").replace(REDACTED, "")


@given(SECRETS, NAMES, st.sampled_from(["", "x: ", "[", "{a: 1, b: {"]))
def test_a_secret_is_in_no_command_line(secret: str, name: str, before: str) -> None:
    """Hydra's own quotes, and what a shell takes, however they are nested."""
    quoted = "'" + secret.replace("\\", "\\\\").replace("'", "\\'") + "'"
    arguments = [f"+rollout.engine_args={{{before}{name}: {quoted}}}", f"+a.{name}={secret}"]
    arguments += [f"--{name}", secret, f"data.path={quoted}", f"+b=[--{name},{quoted}]"]
    unknown = Redactor({}).arguments(arguments)
    assert [secret in unknown[n] for n in (0, 1, 3, 5)] == [False] * 4, unknown
    known = Redactor({"A_KEY": secret}).arguments(arguments)
    assert not any(form in " ".join(known) for form in (secret, quoted[1:-1])), known


def test_long_texts_take_no_long_time() -> None:
    """A pattern that tries every place of a word again for every other one takes hours here."""
    for piece in ("a", "-", "--", "sk-", "eyJ-", "x=", "'", "://", "token: ", "\\", "a.b-c "):
        redacted_text(piece * (200_000 // len(piece)), {})


def test_a_log_of_another_node_holds_no_secret(tmp_path: Path, monkeypatch: Any) -> None:
    """Also where it falls on two pieces, and what is after it stays at its place."""
    monkeypatch.setenv("A_TOKEN", PLANTED)
    log = f"one\n{PLANTED} two {PLANTED}\n".encode()
    for cut in range(len(log)):
        name = f"policy-{cut}.log"
        for data in (log[:cut], log[cut:]):
            append_piece(tmp_path, LogPiece(name, data, 0))
        hidden = b"*" * len(PLANTED)
        assert (tmp_path / name).read_bytes() == b"one\n%b two %b\n" % (hidden, hidden)


def test_what_is_logged_to_the_terminal_holds_no_secret(monkeypatch: Any) -> None:
    monkeypatch.setenv("A_TOKEN", PLANTED)
    record = logging.LogRecord("a", logging.WARNING, "f", 1, "failed: %s", (PLANTED,), None)
    assert WithoutSecrets("%(message)s").format(record) == "failed: [redacted]"
