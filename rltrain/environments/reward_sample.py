"""What goes to a reward function for one response, and what comes back."""

import json
from collections.abc import Mapping, Sequence
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

    ``value`` is None unless ``status`` is ok. ``detail`` says why the status is not ok. ``seconds``
    is the share in what the group took. ``correct`` is None if there is no value, or if neither
    configuration nor function says which rewards are correct. ``parts`` are those numbers by name
    that the function returned beside the reward."""

    value: float | None
    status: Literal["ok", "timeout", "error"]
    detail: str
    seconds: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


def encode_group(
    numbers: Sequence[int], samples: Sequence[RewardInput], text: Literal["raw", "clean"]
) -> str:
    """Samples of one problem that are judged together, in JSON; most often one.

    Raises:
        ValueError: JSON would change a value, such as a tuple.
    """
    first = samples[0]
    same = (first.prompt_id, first.prompt, first.answer, first.columns)
    assert all((s.prompt_id, s.prompt, s.answer, s.columns) == same for s in samples[1:])
    for name, value in ({"answer": first.answer} | first.columns).items():
        _check_json(value, name, first.prompt_id)
    responses = [sample.raw if text == "raw" else sample.clean for sample in samples]
    return json.dumps(
        {
            "numbers": list(numbers),
            "responses": responses,
            "raw": [sample.raw for sample in samples],
            "clean": [sample.clean for sample in samples],
            "answer": first.answer,
            "columns": first.columns | {"prompt": first.prompt},
        }
    )


def _check_json(value: object, name: str, prompt_id: str) -> None:
    try:
        is_json = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):
        is_json = False
    if not is_json:
        raise ValueError(
            f"prompt {prompt_id[:12]}, column {name!r}: expected what JSON can hold "
            "(text, finite numbers, true, false, null, lists, objects with text as keys), "
            f"found {type(value).__name__} {str(value)[:80]!r}"
            " [RL2004]"
        )
