"""Problems: a prompt as tokens, the inputs of the reward function, and an id."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from rltrain.data.source_report import SourceReport

RESERVED_COLUMNS = frozenset({"response", "response_raw", "response_clean", "prompt", "answer"})
"""Names of the arguments that rltrain gives to reward functions."""


def problem_id(prompt: str) -> str:
    """SHA-256 of the prompt's text, in hex. It serves to compare sets and to make sampling
    seeds."""
    return hashlib.sha256(prompt.encode()).hexdigest()


@dataclass(frozen=True)
class Problem:
    """A prompt that was templated and tokenized once. From here on only its tokens are used.

    ``prompt`` is the exact text of ``prompt_tokens``, without tokens that the tokenizer adds.
    ``columns`` are all other columns of the row. The reward function gets them.
    ``answer`` and ``columns`` are plain JSON values (``rltrain.data.json_values``).
    """

    prompt_tokens: tuple[int, ...]
    prompt: str
    answer: Any
    columns: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    target_tokens: tuple[int, ...] = ()
    """The answer as the target of supervised steps."""
    place: str = field(default="", compare=False, repr=False)
    """Source and row, for messages."""

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", problem_id(self.prompt))


@dataclass(frozen=True)
class Problems:
    """Three sets of problems that share no prompt, and a report of each source.

    With ``evaluated_on_train`` the held-out problems are training problems, by the user's choice.

    Raises:
        ValueError: two sets share a prompt, other than by ``evaluated_on_train``.
    """

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    warm_start: tuple[Problem, ...] = ()
    reports: tuple[SourceReport, ...] = field(default=(), compare=False)
    evaluated_on_train: bool = False

    def __post_init__(self) -> None:
        parts = {"train": self.train, "held-out": self.held_out, "warm-start": self.warm_start}
        if self.evaluated_on_train:
            del parts["held-out"]
        seen: dict[str, str] = {}
        for name, problems in parts.items():
            shared = [p for p in problems if p.id in seen]
            if shared:
                raise ValueError(
                    f"{len(shared)} {name} problems are also {seen[shared[0].id]} problems, "
                    f"e.g. {shorten(shared[0].prompt)!r}. "
                    "Sets must not overlap, or the evaluation measures memory: take them out of "
                    "one. To measure memory on purpose drop data.eval_path and set "
                    "data.eval_on_train=true"
                    " [RL2007]"
                )
            seen |= {p.id: name for p in problems}


def check_step_size(num_problems: int, prompts_per_step: int, repeat: bool = False) -> None:
    """Raise ValueError if there are too few problems for a step. With ``repeat`` one is enough."""
    if num_problems == 0:
        raise ValueError("there are no problems to train on [RL2006]")
    if num_problems < prompts_per_step and not repeat:
        raise ValueError(
            f"a step takes {prompts_per_step} different prompts (trainer.prompts_per_step and "
            f"what rollout.oversample adds) and there are {num_problems}: lower it, add data, or "
            "let a step take a prompt several times with data.repeat_in_step=true"
            " [RL2006]"
        )


def shorten(text: str, limit: int = 80) -> str:
    """The text, cut to about ``limit`` characters, for messages."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
