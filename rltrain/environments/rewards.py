"""What a response is worth. A reward is a function ``(response, answer, **columns) -> float``.

``columns`` holds ``prompt``, the text the model saw, and every other column of the dataset. These
run in the worker processes of ``pool``: a function may be slow, hang or crash. Heavy libraries are
imported by the reward that needs them, so that a worker starts in a moment.
"""

import difflib
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

Reward = Callable[..., float]


def exact(response: str, answer: object, **columns: object) -> float:
    """1 when the response is the answer, spaces around both aside; else 0."""
    return float(response.strip() == str(answer).strip())


def math_verify(response: str, answer: object, **columns: object) -> float:
    """1 when math-verify finds the response mathematically equal to the answer; else 0.

    Both may be LaTeX or plain expressions; of a longer text the last, or boxed, answer counts.

    Raises:
        ValueError: when no mathematics can be found in ``answer``.
    """
    from math_verify import parse, verify

    # Its own time limits use signals, which fail off the main thread; the pool has a better one.
    gold = _parse_answer(str(answer), parse)
    if not gold:
        raise ValueError(f"math-verify finds no mathematics in the answer {answer!r}")
    found = parse(response, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))


def _parse_answer(answer: str, parse: Callable[..., list[Any]]) -> list[Any]:
    """Bare LaTeX such as ``\\frac{1}{2}`` only counts as LaTeX between dollar signs."""
    delimited = any(mark in answer for mark in ("$", r"\(", r"\[", r"\boxed"))
    return parse(answer if delimited else f"${answer}$", parsing_timeout=None) or parse(
        answer, parsing_timeout=None
    )


def reasoning_gym(response: str, answer: object, **columns: Any) -> float:
    """The score of reasoning-gym's own verifier of the task, from 0 to 1.

    Judged is what stands in the last ``<answer>`` tags of the response, or all of it.

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
        ) from None
    tagged = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    given = (tagged[-1] if tagged else response).strip()
    entry = {"question": columns["question"], "answer": answer, "metadata": columns["metadata"]}
    return float(get_score_answer_fn(task)(given, entry))


BUILT_IN: dict[str, Reward] = {
    "exact": exact,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}


def load_reward(name: str) -> Reward:
    """The built-in of that name, or the function at a dotted path such as ``my_rewards.score``.

    Raises:
        ValueError: when it cannot be imported, is no function, or cannot be called as a reward.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        raise ValueError(
            f"data.reward.function={name} is neither built in ({', '.join(BUILT_IN)}) nor a dotted "
            "path such as my_rewards.score" + (f": did you mean {near[0]}?" if near else "")
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ValueError(
            f"data.reward.function={name} cannot be imported: {type(error).__name__}: {error}. "
            f"Module {module_name} must be importable from the folder the run starts in "
            "or from PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        raise ValueError(
            f"data.reward.function={name}: module {module_name} has no {attribute!r}"
            + (f": did you mean {near[0]!r}?" if near else "")
        )
    function = getattr(module, attribute)
    _check_signature(name, function)
    reward: Reward = function
    return reward


def _check_signature(name: str, function: object) -> None:
    expected = "expected a function (response: str, answer: object, **columns) -> float"
    if not callable(function):
        raise ValueError(f"data.reward.function={name}: {expected}, found {function!r}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"data.reward.function={name}: {expected}, found an async function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature: the first call will tell
        return
    keywords = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    try:
        signature.bind_partial("response", "answer")
    except TypeError:
        keywords = False
    if not keywords:
        raise ValueError(f"data.reward.function={name}: {expected}, found {signature}")
