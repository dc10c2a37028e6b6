"""What a run makes of its data, read and checked once, before anything heavy. Imports no torch.

Preflight raises the fault that is found here, and `rltrain data` prints all of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rltrain.config import Config
from rltrain.controller.checks.reward_trial import Trial, check_trial, try_rewards
from rltrain.data.model_tokenizer import load_tokenizer
from rltrain.data.problem import Problem, Problems, check_step_size
from rltrain.data.problems import problems_of
from rltrain.data.targets import with_targets
from rltrain.data.tokenizer_checks import (
    check_auto_tokenizer,
    check_stop_strings,
    check_tokenizer,
)
from rltrain.data.vocabulary import check_special_ids, check_vocabulary
from rltrain.weights.architecture.decoder import Architecture


@dataclass
class RunData:
    """What was found; a part is absent where a fault before it left nothing to look at."""

    tokenizer: Any = None
    problems: Problems = field(default_factory=lambda: Problems((), ()))
    trials: tuple[Trial, ...] = ()
    fault: ValueError | None = None


def examine(config: Config, model: Architecture, num_trials: int = 1) -> RunData:
    """Read, tokenize and check all that the run will train and evaluate on.

    Args:
        num_trials: how many problems the reward function is tried on
    """
    run_data = RunData()
    try:
        _read(config, model, run_data)
        if config.algorithm.type == "rl":
            _try_reward(config, run_data, num_trials)
    except ValueError as error:
        run_data.fault = error
    return run_data


def _read(config: Config, model: Architecture, run_data: RunData) -> None:
    """Tokenizer and problems, checked; what comes before a fault stays in ``run_data``."""
    supervised = config.algorithm.type == "sft"
    folder = folder_of(config)
    tokenizer = run_data.tokenizer = load_tokenizer(config.model)
    if folder is not None:
        check_tokenizer(tokenizer, folder)
    check_special_ids(tokenizer, folder, model.vocab_size, supervised=supervised)
    check_stop_strings(tokenizer, config.rollout.stop)
    problems = run_data.problems = problems_of(config, tokenizer)
    check_vocabulary(tokenizer, model.vocab_size, folder, _named(problems))
    if supervised:
        limit = config.rollout.max_response_tokens
        train, held_out = (
            with_targets(part, tokenizer, config.data, limit)
            for part in (problems.train, problems.held_out)
        )
        problems = run_data.problems = replace(problems, train=train, held_out=held_out)
    num_prompts = config.trainer.prompts_per_step if supervised else config.prompts_per_round
    check_step_size(len(problems.train), num_prompts, config.data.repeat_in_step)


def _try_reward(config: Config, run_data: RunData, num_trials: int) -> None:
    run_data.trials = tuple(try_rewards(config.data.reward, run_data.problems.train, num_trials))
    for trial in run_data.trials:
        check_trial(trial, config.data.reward)


def check_folder_tokenizer(config: Config, run_data: RunData) -> None:
    """See `check_auto_tokenizer`, which imports torch; with code of the folder's own it is the
    run's tokenizer already."""
    folder = folder_of(config)
    if folder is not None and not config.model.trust_remote_code:
        check_auto_tokenizer(run_data.tokenizer, folder)


def folder_of(config: Config) -> Path | None:
    return Path(config.model.path).expanduser() if config.model.path else None


def _named(problems: Problems) -> Iterator[tuple[str, Problem]]:
    for name in ("train", "held_out"):
        for problem in getattr(problems, name):
            yield name, problem
