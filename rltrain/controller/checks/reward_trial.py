"""What the reward function says of an answer that is right and of one that is wrong, before a run.

It runs as in a run: in a process of its own that is killed when it takes too long.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rltrain.config.error_codes import with_code
from rltrain.config.reward import BUILT_IN_REWARDS, RewardConfig
from rltrain.data.problem import Problem, shorten
from rltrain.environments.dry_run import dry_run
from rltrain.environments.reward_sample import RewardInput, RewardResult

_log = logging.getLogger(__name__)

NO_ANSWER = "I do not know."


@dataclass(frozen=True)
class Trial:
    """The reward of a problem's own answer and the lower one of two that are wrong."""

    problem: Problem
    answer: str | None
    """The answer as a response; None where it is no text or number, or there is none."""
    right: RewardResult | None
    """None: there is no such response."""
    other: str = NO_ANSWER
    wrong: RewardResult | None = None


def try_rewards(config: RewardConfig, problems: Sequence[Problem], number: int) -> list[Trial]:
    """Trials on the first ``number`` problems.

    Raises:
        ValueError: the reward function cannot be used.
    """
    chosen = list(problems[:number])
    answers = [_as_response(problem.answer) for problem in chosen]
    answered = {n: answer for n, answer in enumerate(answers) if answer is not None}
    first = dry_run(config, [_sample(chosen[n], answer) for n, answer in answered.items()])
    rights = dict(zip(answered, first, strict=True))
    trials = [
        Trial(p, a, rights.get(n)) for n, (p, a) in enumerate(zip(chosen, answers, strict=True))
    ]
    if any(right.status != "ok" for right in rights.values()):
        return trials
    others = [(NO_ANSWER, _another(problems, answer)) for answer in answers]
    pairs = [(p, other) for p, pair in zip(chosen, others, strict=True) for other in pair]
    scored = iter(zip(pairs, dry_run(config, [_sample(*pair) for pair in pairs]), strict=True))
    for n, trial in enumerate(trials):
        (_, other), wrong = min(islice(scored, 2), key=lambda trial_result: _low(trial_result[1]))
        trials[n] = replace(trial, other=other, wrong=wrong)
    return trials


def check_trial(trial: Trial, config: RewardConfig) -> None:
    """The reference answer has a reward, and a higher one than a wrong answer.

    A function of the user's may judge something else than answers: that is a warning.

    Raises:
        ValueError: it has none, or a built-in reward gives no more for it.
    """
    right, wrong = trial.right, trial.wrong
    of = f"{config.shown}, prompt {shorten(trial.problem.prompt)!r}"
    if right is not None and right.status != "ok":
        message = (
            f"{of}: expected a reward for the reference answer {shorten(str(trial.answer))!r}, "
            f"found {right.status}: {right.detail}. Mend the function or the answer"
        )
        raise ValueError(with_code(message, "RL2010"))
    if wrong is not None and wrong.status != "ok":
        _log.warning("%s: the response %r has no reward: %s", of, trial.other, wrong.detail)
    if right is None or wrong is None or right.value is None or wrong.value is None:
        return
    if right.value <= wrong.value:
        comparison = (
            f"{of}: the reference answer {shorten(str(trial.answer))!r} has the reward "
            f"{right.value:g}, and the response {trial.other!r} has {wrong.value:g}"
        )
        if all(function in BUILT_IN_REWARDS for function in config.functions.values()):
            raise ValueError(
                f"{comparison}: right answers would never be rewarded. Is data.answer_column the "
                "right one, and does this function compare such answers?"
                " [RL2012]"
            )
        _log.warning(
            "%s: it rewards no right answer as such, or answers in another form", comparison
        )


def _as_response(answer: object) -> str | None:
    if isinstance(answer, str):
        return answer
    number = isinstance(answer, int | float) and not isinstance(answer, bool)
    return str(answer) if number else None


def _another(problems: Sequence[Problem], answer: str | None) -> str:
    """The answer to another problem, which has the form of a right one."""
    others = (_as_response(problem.answer) for problem in problems)
    return next((other for other in others if other is not None and other != answer), NO_ANSWER)


def _low(result: RewardResult) -> float:
    return float("inf") if result.value is None else result.value


def _sample(problem: Problem, response: str) -> RewardInput:
    return RewardInput(
        response, response, problem.answer, problem.prompt, dict(problem.columns), problem.id
    )
