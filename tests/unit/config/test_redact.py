"""Secrets in free text: error messages and tracebacks."""

import pytest

from rltrain.config.redact import redacted_text


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
