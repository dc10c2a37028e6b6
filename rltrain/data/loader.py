"""An endless, seeded, resumable loader of the prompts of each step."""

import hashlib
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from rltrain.data.problem import Problem, check_step_size

# torchdata makes this call, which torch deprecates. Users cannot change it.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


class PromptLoader:
    """Endless lists of ``prompts_per_step`` problems, shuffled again in every epoch.

    A list never contains a problem twice, unless there are too few problems and ``repeat`` is true.
    Then every step is an epoch, and the counts of the problems differ by at most one. Problems left
    over after the last full step of an epoch are not used in that epoch. ``state_dict`` is plain
    JSON data. A new loader over the same problems resumes from it exactly.

    Raises:
        ValueError: there is no problem, or there are fewer than one step needs and ``repeat`` is
            false.
    """

    def __init__(
        self, problems: Sequence[Problem], prompts_per_step: int, seed: int, repeat: bool = False
    ) -> None:
        check_step_size(len(problems), prompts_per_step, repeat)
        self._fingerprint = _fingerprint(problems, prompts_per_step, seed)
        self._loader: StatefulDataLoader[list[Problem]] = StatefulDataLoader(
            problems,  # type: ignore[arg-type]  # a sequence is a map-style dataset
            batch_sampler=_Sampler(len(problems), prompts_per_step, seed),
            collate_fn=list,
        )
        self._iterator: Iterator[list[Problem]] | None = None

    def __iter__(self) -> Iterator[list[Problem]]:
        return self

    def __next__(self) -> list[Problem]:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self._fingerprint, "loader": self._loader.state_dict()}

    def matches(self, state: dict[str, Any]) -> bool:
        """Whether it was saved with these problems, this seed and step size."""
        return bool(state["fingerprint"] == self._fingerprint)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``.

        Raises:
            ValueError: it was saved with other problems, another seed or step size.
        """
        if not self.matches(state):
            raise ValueError(
                "the checkpoint's data position was saved with other data, data.seed, "
                "trainer.seed, trainer.prompts_per_step or rollout.oversample: resume with those "
                "of the checkpoint, or set trainer.resume_with_changes=true to begin with the "
                "first of these data, or start anew"
                " [RL6006]"
            )
        self._loader.load_state_dict(state["loader"])
        self._iterator = None


def _fingerprint(problems: Sequence[Problem], prompts_per_step: int, seed: int) -> str:
    digest = hashlib.sha256(f"{prompts_per_step} {seed}".encode())
    for problem in problems:
        digest.update(problem.id.encode())
    return digest.hexdigest()


class _Sampler:
    """Batch sampler: its iterator yields the indices of each step."""

    def __init__(self, num_problems: int, prompts_per_step: int, seed: int) -> None:
        self.num_problems, self.prompts_per_step, self.seed = num_problems, prompts_per_step, seed

    def __iter__(self) -> "_Position":
        return _Position(self)


class _Position:
    """Iterator with its position: the epoch and the number of steps taken in it."""

    def __init__(self, sampler: _Sampler) -> None:
        self.sampler = sampler
        self.load_state_dict({"epoch": 0, "step": 0})

    def __iter__(self) -> "_Position":
        return self

    def __next__(self) -> list[int]:
        size = self.sampler.prompts_per_step
        if (self.step + 1) * size > len(self.order):
            self.load_state_dict({"epoch": self.epoch + 1, "step": 0})
        start = self.step * size
        self.step += 1
        return self.order[start : start + size]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]
        # A string seed is hashed, so epochs of neighbouring seeds are unrelated.
        shuffler = random.Random(f"{self.sampler.seed}/{self.epoch}")
        self.order = list(range(self.sampler.num_problems))
        shuffler.shuffle(self.order)
        while len(self.order) < self.sampler.prompts_per_step:
            self.order += self.order[: self.sampler.prompts_per_step - len(self.order)]
