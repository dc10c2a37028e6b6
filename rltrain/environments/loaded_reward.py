"""The functions of a reward, loaded, and what they give for a response. In the workers alone."""

import copy
import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rltrain.config.reward import RewardComponent, RewardConfig
from rltrain.environments.components import Component, correct_component, weighted_sum
from rltrain.environments.load_reward import load_reward
from rltrain.environments.rewards import (
    LONGEST_DETAIL,
    Judgement,
    Reward,
    declared_success,
    judgement,
)

Begin = Callable[[str], None]
"""Told of each call of a component, before it."""


@dataclass(frozen=True)
class LoadedReward:
    """One function, or components, of which there are none then."""

    function: Reward | None
    success_at: float | None
    """As the one function declares it."""
    components: tuple[Component, ...] = ()
    correct_from: str | None = None
    asks_whole: bool = False
    """``data.reward.success_at`` decides about the weighted sum."""


def load(config: RewardConfig) -> LoadedReward:
    """
    Raises:
        ValueError: a function cannot be used, or it is not clear which says what is correct.
    """
    loaded = {name: _load(key, name) for key, name in config.functions.items()}
    if not config.components:
        function = loaded[config.function]
        return LoadedReward(function, declared_success(function))
    components = tuple(
        _component(name, part, loaded[part.function]) for name, part in config.components.items()
    )
    if config.success_at is not None:
        return LoadedReward(None, None, components, asks_whole=True)
    chosen = correct_component(components, config.correct_from)
    return LoadedReward(None, None, components, chosen)


def _component(name: str, part: RewardComponent, function: Reward) -> Component:
    success_at = part.success_at
    if success_at is None:
        success_at = declared_success(function, f"data.reward.components.{name}: the function")
    return Component(name, function, part.weight, success_at)


def _load(key: str, name: str) -> Reward:
    reward = load_reward(name, key)
    # Import it now, so that it does not count against the limit of the first sample.
    importlib.import_module(getattr(reward, "needs", "json"))
    return reward


def score(reward: LoadedReward, sample: dict[str, Any], begin: Begin) -> dict[str, Any]:
    """``reward``, ``correct`` and ``parts``, or ``error`` with its place."""
    if reward.function is not None:
        said = _judged(reward.function, sample)
    else:
        said = _sum(reward, sample, begin)
    return {"error": said} if isinstance(said, str) else said._asdict()


def _sum(reward: LoadedReward, sample: dict[str, Any], begin: Begin) -> Judgement | str:
    said: dict[str, Judgement | str] = {}
    for component in reward.components:
        begin(component.name)
        # Its own copy: a function may take something out of an answer or a column.
        said[component.name] = _judged(component.function, copy.deepcopy(sample))
    try:
        chosen, whole = reward.correct_from, reward.asks_whole
        return weighted_sum(reward.components, said, chosen, asks_whole=whole)
    except ValueError as error:
        return str(error)[:LONGEST_DETAIL]


def _judged(function: Reward, sample: dict[str, Any]) -> Judgement | str:
    """What a function gives, or why it gives nothing, with the place of the error."""
    try:
        return judgement(function(sample["response"], sample["answer"], **sample["columns"]))
    except BaseException as error:  # the user's function may raise anything, or exit
        return described(error)[:LONGEST_DETAIL]


def described(error: BaseException) -> str:
    (at,) = traceback.extract_tb(error.__traceback__, limit=-1)
    last_line = traceback.format_exception_only(error)[-1].strip()
    return f"{last_line} ({at.filename}:{at.lineno}, in {at.name})"
