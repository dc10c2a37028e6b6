"""What goes to a reward function for one response, and what comes back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RewardInput:
    """The input of a reward function.

    ``raw`` and ``clean`` are the response with and without its special tokens. ``prompt_id`` is
    used only in messages."""

    raw: str
    clean: str
    answer: Any
    prompt: str
    columns: dict[str, Any]
    prompt_id: str


@dataclass(frozen=True)
class RewardResult:
    """The result of a reward function for one response.

    ``value`` is None unless ``status`` is ok. ``detail`` says why the status is not ok. ``correct``
    is None if there is no value, or if neither configuration nor function says which rewards are
    correct. ``parts`` are those numbers by name that the function returned beside the reward."""

    value: float | None
    status: Literal["ok", "timeout", "error"]
    detail: str
    seconds: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


def encode_sample(number: int, sample: RewardInput, text: Literal["raw", "clean"]) -> str:
    """One sample in JSON.

    Raises:
        ValueError: JSON would change a value, such as a tuple.
    """
    ours = {
        "prompt": sample.prompt,
        "response_raw": sample.raw,
        "response_clean": sample.clean,
    }
    for name, value in ({"answer": sample.answer} | sample.columns).items():
        try:
            is_json = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            is_json = False
        if not is_json:
            raise ValueError(
                f"prompt {sample.prompt_id[:12]}, column {name!r}: expected what JSON can hold "
                "(text, finite numbers, true, false, null, lists, objects with text as keys), "
                f"found {type(value).__name__} {str(value)[:80]!r}"
                " [RL2004]"
            )
    response = sample.raw if text == "raw" else sample.clean
    columns = sample.columns | ours
    return json.dumps(
        {"number": number, "response": response, "answer": sample.answer, "columns": columns}
    )
