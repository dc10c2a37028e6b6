"""The components of a reward: which says what is correct, and their weighted sum. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rltrain.environments.rewards import LARGEST, Judgement, Reward


class Component(NamedTuple):
    name: str
    function: Reward
    weight: float
    success_at: float | None
    """From which value on a response is correct; None where nobody says."""


def correct_component(components: Sequence[Component], named: str | None) -> str | None:
    """The component that says which responses are correct; None: no component does.

    Args:
        named: ``data.reward.correct_from``
    Raises:
        ValueError: none is named, and several could.
    """
    if named is not None:
        return named
    able = [component.name for component in components if component.success_at is not None]
    if len(able) > 1:
        raise ValueError(
            f"data.reward.components: {' and '.join(able)} all say which responses are correct, by "
            "their success_at: expected one that counts: name it with data.reward.correct_from, "
            f"e.g. data.reward.correct_from={able[0]} [RL2009]"
        )
    return able[0] if able else None


def weighted_sum(
    components: Sequence[Component],
    said: Mapping[str, Judgement | str],
    correct_from: str | None,
    *,
    asks_whole: bool = False,
) -> Judgement:
    """The reward of a response, with what each component gave as a part of its name.

    A component's own part is ``COMPONENT_PART``.

    Args:
        said: by component, its judgement, or why there is none
        asks_whole: the reward itself says what is correct (``data.reward.success_at``)
    Raises:
        ValueError: a component failed, two parts have one name, float32 cannot hold a term, or a
            component says what is correct and none is chosen for it. The message names components.
    """
    if failed := [f"component {n}: {why}" for n, why in said.items() if isinstance(why, str)]:
        raise ValueError("; ".join(failed))
    judged = {name: one for name, one in said.items() if isinstance(one, Judgement)}
    parts = {name: one.reward for name, one in judged.items()}
    for name, one in judged.items():
        own = {f"{name}_{part}": value for part, value in one.parts.items()}
        if twice := sorted(own.keys() & parts.keys()):
            raise ValueError(
                f"component {name}: its part {twice[0].removeprefix(f'{name}_')} would be logged "
                f"as {twice[0]}, as another part is: rename one of them [RL2011]"
            )
        parts |= own
    total = math.fsum([_term(one, judged[one.name].reward) for one in components])
    if abs(total) > LARGEST:
        raise ValueError(f"the weighted sum of the components is {total:g}: {TOO_LARGE} [RL2011]")
    correct = None if asks_whole else _correct(components, judged, correct_from)
    return Judgement(total, correct, parts)


TOO_LARGE = "float32 cannot hold it: lower the weights (data.reward.components.NAME.weight)"


def _term(component: Component, reward: float) -> float:
    term = component.weight * reward
    if not abs(term) <= LARGEST:
        raise ValueError(
            f"component {component.name}: {component.weight:g} * {reward:g}: {TOO_LARGE} [RL2011]"
        )
    return term


def _correct(
    components: Sequence[Component], judged: Mapping[str, Judgement], correct_from: str | None
) -> bool | None:
    if correct_from is None:
        if saying := [name for name, one in judged.items() if one.correct is not None]:
            raise ValueError(
                f"component {saying[0]}: it says whether the response is correct, and no component "
                f"is chosen for that: set data.reward.correct_from={saying[0]} [RL2011]"
            )
        return None
    said = judged[correct_from].correct
    threshold = next(one.success_at for one in components if one.name == correct_from)
    if said is None and threshold is not None:
        return judged[correct_from].reward >= threshold
    return said
