"""Reward functions. A reward is a function ``(response, answer, **columns)``, or one of a whole
group, ``(responses, answer, **columns)``, which says so by its attribute ``takes_group = True``.

``columns`` holds ``prompt``, the text the model saw, ``response_raw`` and ``response_clean``, and
every other column of the dataset. `judgement` defines what a reward may return. Rewards run in the
worker processes of ``pool``: they may be slow, hang or crash. Each reward imports its heavy
libraries itself, so that this module imports fast."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rltrain.config.reward import PART_NAME

Reward = Callable[..., Any]

LARGEST = 3.4028234e38
"""Batches hold rewards in float32."""
LONGEST_DETAIL = 2000
"""Maximum characters of what is said about an error."""

EXPECTED = (
    'expected a finite number (int, float, bool or a NumPy scalar) or {"reward": number, '
    '"correct": bool, "NAME_OF_A_PART": number, ...}'
)


class Judgement(NamedTuple):
    reward: float
    correct: bool | None  # None: the reward function does not say
    parts: dict[str, float]  # what the reward is made of, by name


def judgement(value: object) -> Judgement:
    """Check the return value of a reward function.

    It is a number, or a mapping with ``reward``, optionally ``correct``, and the parts of the
    reward: numbers by name, which are logged and not trained on. A number is an int, a float, a
    bool, a NumPy scalar, or an array or tensor of shape (). A part is no bool, so that a misspelt
    ``correct`` is not taken for one.

    Raises:
        ValueError: for anything else, such as text, None, NaN or an infinite number.
    """
    if not isinstance(value, Mapping):
        return Judgement(_number(value), None, {})
    if "reward" not in value:
        raise ValueError(f"{EXPECTED}, found a mapping of {sorted(map(str, value))} [RL2011]")
    correct = _item(value.get("correct"))
    if correct is not None and not isinstance(correct, bool):
        raise ValueError(f"{EXPECTED}, found correct={_shown(correct)} [RL2011]")
    names = [name for name in value if name not in ("reward", "correct")]
    parts = {_part_name(name): _number(value[name], f"{name}=", bools=False) for name in names}
    return Judgement(_number(value["reward"]), correct, parts)


def group_values(value: Any, number: int) -> list[Any]:
    """The rewards in what a function of a group returned: a list, a tuple, or an array or tensor of
    shape (number,).

    Raises:
        ValueError: it is something else, or has not one reward per response.
    """
    expected = f"expected a list of {number} rewards, one for each response in their order"
    if not isinstance(value, list | tuple) and getattr(value, "ndim", None) != 1:
        raise ValueError(f"{expected}, found {_shown(value)} [RL2011]")
    values = list(value)
    if len(values) != number:
        raise ValueError(f"{expected}, found {len(values)} [RL2011]")
    return values


def _number(value: object, label: str = "", *, bools: bool = True) -> float:
    number = _item(value)
    if isinstance(number, bool) and not bools:
        raise ValueError(f"{EXPECTED}, found {label}{_shown(number)} [RL2011]")
    if not isinstance(number, int | float):
        raise ValueError(f"{EXPECTED}, found {label}{_shown(value)} [RL2011]")
    if not abs(number) <= LARGEST:  # also true for NaN
        raise ValueError(
            f"{EXPECTED}, found {label}{_shown(value)}, which float32 cannot hold [RL2011]"
        )
    return float(number)


def _part_name(name: object) -> str:
    if isinstance(name, str) and PART_NAME.fullmatch(name):
        return name
    raise ValueError(
        f"{EXPECTED}, found a part named {_shown(name)}: a name has ASCII letters, digits and "
        "underscores, and begins with a letter"
        " [RL2011]"
    )


def _item(value: Any) -> object:
    """The Python number in a scalar of NumPy, or in an array or tensor of shape ()."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"


def exact(response: str, answer: object, **columns: object) -> float:
    """1 if the response equals the answer, ignoring surrounding spaces; else 0.

    A number is compared as Python writes it: 42 is "42", 42.0 is "42.0".

    Raises:
        ValueError: for an answer that is neither text nor a number.
    """
    return float(response.strip() == _answer_text(answer).strip())


exact.success_at = 1.0  # type: ignore[attr-defined]


def math_verify(response: str, answer: object, **columns: object) -> float:
    """1 if math-verify finds the response mathematically equal to the answer; else 0.

    Both may be LaTeX or plain expressions. In a longer text the last, or boxed, answer counts.

    Raises:
        ValueError: for an answer that math-verify cannot read, or reads in part.
    """
    from rltrain.environments.math_answers import is_equal

    return float(is_equal(response, _answer_text(answer)))


math_verify.success_at = 1.0  # type: ignore[attr-defined]
math_verify.needs = "math_verify"  # type: ignore[attr-defined]


def _answer_text(answer: Any) -> str:
    if isinstance(answer, str) or (type(answer) in (int, float) and math.isfinite(answer)):
        return str(answer)
    raise ValueError(
        f"expected an answer that is text or a finite number, found {_shown(answer)}: name another "
        "column with data.answer_column, leave the row out, or use a reward function of your own"
        " [RL2013]"
    )


COMPARES_TUPLES = ("arc_agi", "rearc")
"""Tasks of reasoning-gym whose verifier compares tuples. Columns come as JSON, which has lists."""


def reasoning_gym(response: str, answer: object, **columns: Any) -> float:
    """The score from 0 to 1 by the verifier of the reasoning-gym task.

    The verifier gets the text in the last ``<answer>`` tags of the response, or all of it.

    Raises:
        ValueError: for a problem that does not come from reasoning-gym.
    """
    from reasoning_gym import get_score_answer_fn

    try:
        task = columns["metadata"]["source_dataset"]
    except (KeyError, TypeError):
        raise ValueError(
            "reward.function=reasoning_gym scores problems of data.source=reasoning_gym: "
            f"expected column metadata with source_dataset, found {sorted(columns)}"
            " [RL2013]"
        ) from None
    tagged = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    given_answer = (tagged[-1] if tagged else response).strip()
    metadata = columns["metadata"]
    if task in COMPARES_TUPLES:
        metadata = metadata | {"output": tuple(map(tuple, metadata["output"]))}
    entry = {"question": columns["question"], "answer": answer, "metadata": metadata}
    return float(get_score_answer_fn(task)(given_answer, entry))


reasoning_gym.success_at = 1.0  # type: ignore[attr-defined]
reasoning_gym.needs = "reasoning_gym"  # type: ignore[attr-defined]

BUILT_IN: dict[str, Reward] = {
    "exact": exact,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}


def takes_group(reward: Reward, of: str = "the reward function") -> bool:
    """Whether the function judges all responses to a prompt in one call.

    Args:
        of: the function, for messages
    Raises:
        ValueError: its ``takes_group`` is neither True nor False.
    """
    value = getattr(reward, "takes_group", False)
    if isinstance(value, bool):
        return value
    raise ValueError(f"{of}'s takes_group: expected True or False, found {_shown(value)} [RL2011]")


def declared_success(reward: Reward, of: str = "the reward function") -> float | None:
    """The reward from which on a response is correct, if the function declares it.

    Args:
        of: the function, for messages
    Raises:
        ValueError: its ``success_at`` is no finite number.
    """
    value = getattr(reward, "success_at", None)
    if value is None or (type(value) in (int, float) and math.isfinite(value)):
        return value
    raise ValueError(f"{of}'s success_at: expected a number, found {_shown(value)} [RL2011]")
