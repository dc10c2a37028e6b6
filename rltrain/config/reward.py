"""What rewards a response."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rltrain.config.base import NotEmpty, Section
from rltrain.config.environment import check_reward_env
from rltrain.config.redact import URL_LOGIN

Positive = Annotated[int, Field(gt=0)]

BUILT_IN_REWARDS = ("exact", "math_verify", "reasoning_gym")
PART_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
"""What a part of a reward may be called: the name is the end of a metric's."""
MOST_COMPONENTS = 16
"""A worker tells of each call, and the pool reads a bounded number of messages at once."""


class RewardLimits(Section):
    """Of each reward worker. null: no limit."""

    memory_gib: Annotated[float, Field(gt=0)] | None = 32.0
    """Private memory that a process may have (``RLIMIT_DATA``). Beyond it Python raises
    MemoryError, which costs the sample. What CUDA reserves does not count."""
    file_gib: Annotated[float, Field(gt=0)] | None = 16.0
    """Size of a file that it may write (``RLIMIT_FSIZE``)."""
    core_gib: Annotated[float, Field(ge=0)] | None = 0.0
    """Size of a core dump (``RLIMIT_CORE``)."""
    processes: Positive | None = 256
    """Processes at once, the worker and all that it started. They are counted every second; the
    worker is killed if there are more, which costs the sample."""
    log_mib: Annotated[float, Field(gt=0)] | None = 4.0
    """Size of ``logs/reward-N.log``. Beyond it the older half is cut."""


def is_url(function: str) -> bool:
    """Whether a service computes the reward."""
    return function.startswith(("http://", "https://"))


class NamesFunction(Section):
    function: str

    @model_validator(mode="after")
    def the_function_is_built_in_or_in_a_file_or_module(self) -> Self:
        if is_url(self.function) and not URL_LOGIN.search(self.function):
            return self
        if is_url(self.function):
            raise ValueError(
                "function: a URL with a login in it would be in files of the run: leave it out, "
                "and name the variable with the token in data.reward.token_env [RL2009]"
            )
        if "." not in self.function and self.function not in BUILT_IN_REWARDS:
            raise ValueError(
                f"function={self.function}: expected one of {', '.join(BUILT_IN_REWARDS)}, a "
                "function of a file, e.g. reward.py:score, or of a module, e.g. my_rewards.score"
                " [RL2009]"
            )
        return self


class RewardComponent(NamesFunction):
    """A term of a reward: what a function gives, times its weight."""

    function: str
    """As ``data.reward.function``."""
    weight: float = 1.0
    """Its share in the reward. It may be negative. With 0 the component is logged alone."""
    success_at: float | None = None
    """A response counts as correct if this component gives at least this. null: what its function
    declares."""


class RewardConfig(NamesFunction):
    function: str = "exact"
    """``exact``, ``math_verify``, ``reasoning_gym``, or your own function ``(response: str, answer:
    object, **columns) -> float``: ``reward.py:score`` of a file, or ``my_rewards.score`` of a
    module. A relative file starts at the folder in which the command runs. One that has the
    attribute ``takes_group = True`` judges all responses to a prompt in one call (docs/data.md). Or
    the address of a service: ``http://127.0.0.1:8000/score``."""
    components: dict[str, RewardComponent] = Field(default_factory=dict)
    """Several functions by name, instead of ``function``: the reward is the sum of what they give,
    each times its ``weight`` (docs/data.md). What each gives is logged under its name."""
    correct_from: str | None = None
    """The component that says which responses are correct. null: the only one that has a
    ``success_at``, its own or that of its function."""
    token_env: NotEmpty | None = None
    """The environment variable with the token for services, sent as ``Authorization: Bearer``. The
    token itself is in no file of the run."""
    text: Literal["raw", "clean"] = "raw"
    """Text that the function gets as ``response``. ``raw``: the text as sampled. ``clean``: without
    the special tokens of the tokenizer; ``<|channel|>final<|message|>42`` then reads ``final42``.
    Neither contains the token or stop string that ended the response."""
    success_at: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """A response counts as correct if its reward is at least this. null: the value that the
    function declares as ``success_at``, which is 1 for the built-in functions. If the function
    declares none, no accuracy is logged."""
    num_workers: Positive = 8
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    max_failed_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The run stops if more than this share of the rewards of a step timed out or failed."""
    shuffle: bool = False
    """Permute the rewards over the step. Use it as a control experiment, which must not learn."""
    limits: RewardLimits = RewardLimits()
    env: dict[str, Any] = Field(default_factory=dict)
    """Environment variables of the workers beside the usual ones (docs/data.md): a value, or null
    for the value that the run was started with. Secrets are never usual. Name them with null, e.g.
    ``OPENAI_API_KEY: null``, so that no file of the run holds them."""

    @field_validator("env")
    @classmethod
    def env_names_variables_and_holds_no_secret(cls, env: dict[str, Any]) -> dict[str, Any]:
        check_reward_env(env)
        return env

    @model_validator(mode="after")
    def the_name_of_a_component_is_one_of_a_metric(self) -> Self:
        for name in self.components:
            if not PART_NAME.fullmatch(name) or name in ("reward", "correct"):
                raise ValueError(
                    f"found a component named {name!r}: a name has ASCII letters, digits and "
                    "underscores, begins with a letter, and is neither reward nor correct [RL2009]"
                )
        if len(self.components) > MOST_COMPONENTS:
            raise ValueError(
                f"expected at most {MOST_COMPONENTS} components, found {len(self.components)}: let "
                "a function return several terms as parts [RL2009]"
            )
        return self

    @model_validator(mode="after")
    def a_reward_is_one_function_or_its_components(self) -> Self:
        if self.components and self.function != "exact":
            raise ValueError(
                f"components are the whole reward and would ignore function={self.function}: make "
                "it one of them, or drop it [RL2009]"
            )
        if self.components and not any(part.weight for part in self.components.values()):
            raise ValueError(
                "components: every weight is 0, so every reward would be: give one a weight"
                " [RL2009]"
            )
        return self

    @model_validator(mode="after")
    def a_token_is_for_a_service(self) -> Self:
        if self.token_env is not None and not any(map(is_url, self.functions.values())):
            raise ValueError(
                f"token_env={self.token_env} is sent to a service, and no reward function is an "
                "http:// or https:// address: drop it [RL2009]"
            )
        return self

    @model_validator(mode="after")
    def one_component_says_what_is_correct(self) -> Self:
        if self.correct_from is None:
            return self
        if self.correct_from not in self.components:
            names = ", ".join(self.components) or "none"
            raise ValueError(
                f"correct_from={self.correct_from}: expected the name of a component ({names})"
                " [RL2009]"
            )
        if self.success_at is not None:
            raise ValueError(
                f"correct_from={self.correct_from} asks a component and success_at="
                f"{self.success_at} the whole reward: drop one, or set components."
                f"{self.correct_from}.success_at [RL2009]"
            )
        return self

    @property
    def functions(self) -> dict[str, str]:
        """The functions that make the reward, by the key that names each."""
        if not self.components:
            return {"data.reward.function": self.function}
        return {
            f"data.reward.components.{name}.function": part.function
            for name, part in self.components.items()
        }

    @property
    def shown(self) -> str:
        """For messages: ``data.reward.function=exact``, or the components with their weights."""
        if not self.components:
            return f"data.reward.function={self.function}"
        terms = [f"{part.weight:g} * {name}" for name, part in self.components.items()]
        return f"data.reward.components ({' + '.join(terms)})"
