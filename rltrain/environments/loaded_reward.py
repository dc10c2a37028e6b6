"""The functions of a reward, loaded, and what they give for a response. In the workers alone."""

import copy
import importlib
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rltrain.config.reward import RewardComponent, RewardConfig, is_url
from rltrain.environments.components import Component, correct_component, weighted_sum
from rltrain.environments.load_reward import load_reward
from rltrain.environments.rewards import (
    LONGEST_DETAIL,
    Judgement,
    Reward,
    declared_success,
    group_values,
    judgement,
    takes_group,
)

Group = dict[str, Any]
"""As `encode_group` writes it: responses of one problem that are judged together."""
Said = Judgement | str
"""A judgement, or why there is none."""
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

    @property
    def takes_groups(self) -> bool:
        functions = [component.function for component in self.components]
        return any(takes_group(f) for f in (self.function, *functions) if f is not None)


def load(config: RewardConfig) -> LoadedReward:
    """
    Raises:
        ValueError: a function cannot be used, or it is not clear which says what is correct.
    """
    loaded = {name: _load(key, name, config) for key, name in config.functions.items()}
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


def _load(key: str, name: str, config: RewardConfig) -> Reward:
    if is_url(name):
        from rltrain.environments.http_reward import http_reward  # ssl takes a while

        token = os.environ.get(config.token_env) if config.token_env else None
        return http_reward(name, config.timeout_s, token)
    reward = load_reward(name, key)
    # Import it now, so that it does not count against the limit of the first sample.
    importlib.import_module(getattr(reward, "needs", "json"))
    return reward


def score(reward: LoadedReward, group: Group, begin: Begin) -> list[dict[str, Any]]:
    """Of each response ``reward``, ``correct`` and ``parts``, or ``error`` with its place."""
    if reward.function is not None:
        said = _said(reward.function, group, lambda: group)
    else:
        by_component: dict[str, list[Said]] = {}
        for component in reward.components:

            def fresh(name: str = component.name) -> Group:
                begin(name)
                # A function may take something out of an answer or a column.
                return copy.deepcopy(group)

            by_component[component.name] = _said(component.function, group, fresh)
        said = [
            _sum(reward, {name: ones[n] for name, ones in by_component.items()})
            for n in range(len(group["responses"]))
        ]
    return [{"error": one} if isinstance(one, str) else one._asdict() for one in said]


def _said(function: Reward, group: Group, fresh: Callable[[], Group]) -> list[Said]:
    """What a function says of each response.

    Args:
        fresh: the group for one call, which begins
    """
    if takes_group(function):
        return _of_group(function, fresh())
    return [_of_response(function, fresh(), n) for n in range(len(group["responses"]))]


def _sum(reward: LoadedReward, said: dict[str, Said]) -> Said:
    try:
        chosen, whole = reward.correct_from, reward.asks_whole
        return weighted_sum(reward.components, said, chosen, asks_whole=whole)
    except ValueError as error:
        return str(error)[:LONGEST_DETAIL]


def _of_response(function: Reward, group: Group, n: int) -> Said:
    """What a function gives, or why it gives nothing, with the place of the error."""
    texts = {"response_raw": group["raw"][n], "response_clean": group["clean"][n]}
    columns = group["columns"] | texts
    try:
        return judgement(function(group["responses"][n], group["answer"], **columns))
    except BaseException as error:  # the user's function may raise anything, or exit
        return described(error)[:LONGEST_DETAIL]


def _of_group(function: Reward, group: Group) -> list[Said]:
    """As `_of_response`, of all responses by one call. A bad value costs its response alone."""
    texts = {"responses_raw": group["raw"], "responses_clean": group["clean"]}
    columns = group["columns"] | texts
    if "responses" in columns:  # the name of the argument
        columns["row_responses"] = columns.pop("responses")
    number = len(group["responses"])
    said: list[Said] = []
    try:
        values = group_values(function(group["responses"], group["answer"], **columns), number)
    except BaseException as error:  # as above
        return [described(error)[:LONGEST_DETAIL]] * number
    for value in values:
        try:
            said.append(judgement(value))
        except BaseException as error:  # a value of the user's own class may raise anything
            said.append(described(error)[:LONGEST_DETAIL])
    return said


def described(error: BaseException) -> str:
    (at,) = traceback.extract_tb(error.__traceback__, limit=-1)
    last_line = traceback.format_exception_only(error)[-1].strip()
    return f"{last_line} ({at.filename}:{at.lineno}, in {at.name})"
