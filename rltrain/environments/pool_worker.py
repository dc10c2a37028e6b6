"""A reward worker as the pool sees it: its process, its samples, and whether it failed."""

import os
import time
from dataclasses import replace
from pathlib import Path

from rltrain.config.reward import RewardConfig
from rltrain.environments.conversation import Conversation
from rltrain.environments.error_advice import error_advice
from rltrain.environments.reward_sample import RewardResult
from rltrain.environments.supervisor import Settings
from rltrain.environments.worker_environment import worker_environment
from rltrain.environments.worker_process import WorkerProcess

START_TIMEOUT_S = 120.0
BEGIN_TIMEOUT_S = 60.0
"""Limit between giving samples to a worker and its message that it begins."""
NEEDED = {"function", "components", "correct_from", "success_at", "timeout_s", "token_env"}
"""What of the configuration a worker gets; it is an argument of its process, which all can see."""


class PoolWorker:
    """
    Args:
        log: the file of its output
    Raises:
        ValueError: ``data.reward.env`` names a variable that there is not.
    """

    def __init__(self, config: RewardConfig, log: Path) -> None:
        self.shown = config.shown
        self._environment = worker_environment(os.environ, _named(config))
        self._state = Conversation(time.monotonic(), tuple(config.components))
        self._limits = config.limits.model_dump()
        settings = Settings(os.getpid(), str(log.absolute()), **self._limits)
        module = "rltrain.environments.reward_worker"
        reward = config.model_dump_json(include=NEEDED)
        self.process = WorkerProcess(module, settings, self._environment, reward)

    @property
    def is_ready(self) -> bool:
        return self._state.is_ready

    @property
    def success_at(self) -> float | None:
        """As the reward function declares it."""
        return self._state.success_at

    @property
    def takes_groups(self) -> bool:
        """A function of the reward judges the responses to a prompt together."""
        return self._state.takes_groups

    @property
    def assigned(self) -> list[tuple[int, ...]]:
        """Positions of the samples without a result, by group and in order."""
        return self._state.assigned

    @property
    def has_begun(self) -> bool:
        """It has begun the first of ``assigned``."""
        return self._state.began is not None

    def deadline(self, timeout_s: float) -> float:
        return self._state.deadline(timeout_s)

    def assign(self, groups: list[tuple[int, ...]], lines: list[str]) -> None:
        self._state.assign(groups, time.monotonic())
        self.process.send(f"[{', '.join(lines)}]")

    def listen(self, success_at: float | None = None) -> dict[int, RewardResult]:
        """The results that have arrived, by position."""
        results: dict[int, RewardResult] = {}
        messages = self.process.receive()
        now = time.monotonic()
        for message in messages:
            try:
                taken = self._state.take(message, now, success_at)
            except ValueError as error:
                self.process.refuse(str(error))
                break
            for position, result in taken.items():
                results[position] = replace(result, detail=self._with_advice(result.detail))
        return results

    def start_failure(self) -> str:
        """Why the worker cannot be used. Empty while it starts, and once it is ready."""
        if self.is_ready:
            return ""
        if self._state.unusable:
            return self._with_advice(self._state.unusable)
        why = self.process.fault
        if not why and time.monotonic() - self._state.since > START_TIMEOUT_S:
            why = f"its process was not ready in {START_TIMEOUT_S:.0f} s"
        return why and f"{self.shown} cannot be started: {why}"

    def failure(self, timeout_s: float, now: float) -> RewardResult | None:
        """The failure of the worker, if it failed. The caller then replaces it.

        Args:
            now: a time before the last `listen`. What was written until then has been read, so a
                sample without a result had none by then.
        """
        if not self.is_ready:
            why = self.start_failure()
            return RewardResult(None, "error", why, 0.0) if why else None
        began = self._state.began
        seconds = 0.0 if began is None else max(0.0, now - began)
        called = f"component {self._state.component}: " if self._state.component else ""
        if self.process.fault:
            return RewardResult(None, "error", called + self.process.fault, seconds)
        if now > self.deadline(timeout_s):
            detail = f"{called}not done in data.reward.timeout_s={timeout_s} s"
            return RewardResult(None, "timeout", detail, seconds)
        if self.assigned and began is None and now - self._state.since > BEGIN_TIMEOUT_S:
            detail = f"its process did not begin in {BEGIN_TIMEOUT_S:.0f} s"
            return RewardResult(None, "error", detail, seconds)
        return None

    def _with_advice(self, text: str) -> str:
        return text + error_advice(text, self._limits, os.environ, self._environment)


def _named(config: RewardConfig) -> dict[str, str | int | None]:
    """The variables that the configuration passes on.

    Raises:
        ValueError: there is no token in the one that ``data.reward.token_env`` names.
    """
    name = config.token_env
    if name is None:
        return config.env
    if not os.environ.get(name):
        raise ValueError(
            f"data.reward.token_env={name}: expected a variable with a token in the environment in "
            f"which the run starts, found none of that name: export {name} [RL2017]"
        )
    if not (os.environ[name].isascii() and os.environ[name].isprintable()):
        raise ValueError(
            f"data.reward.token_env={name}: expected a token of ASCII characters on one line, "
            f"found others: look for a line's end in {name} [RL2017]"
        )
    return {**config.env, name: None}
