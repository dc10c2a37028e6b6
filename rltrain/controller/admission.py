"""Which batch of rollouts may be started with which weights.

The batch of step ``b`` is trained on by the policy after step ``b - 1``. Started with the weights
after step ``v``, none of its tokens is older than ``b - 1 - v`` steps, however late it finishes,
since weights only get newer. So a batch that would be too old is not started, and none has to be
dropped.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltrain.config.trainer import TrainerConfig
from rltrain.tracking.jsonl import read_jsonl


@dataclass(frozen=True)
class Admission:
    """A batch that was started."""

    step: int
    after: int
    """The step whose weights the engines had then."""

    @property
    def age(self) -> int:
        """Of its oldest token when it is trained on, in steps, at most."""
        return self.step - 1 - self.after

    def row(self) -> dict[str, Any]:
        """Of schedule.jsonl, beside the step."""
        return {"event": "started", "after": self.after, "age": self.age}


@dataclass(frozen=True)
class Schedule:
    """Starts batches when they are wanted, if they may be; or as they were started before.

    Args:
        max_staleness: bound of the age of a token, in steps
        last_step: of the run
        recorded: by step, the step whose weights its batch was started with; empty: none are known
    """

    max_staleness: int
    last_step: int
    recorded: Mapping[int, int] = field(default_factory=dict)

    def admit(self, step: int, after: int, *, is_wanted: bool) -> Admission | None:
        """The admission of the batch of ``step`` while the engines have the weights after
        ``after``; None if it is not started yet.

        Args:
            is_wanted: whether there is a use for it now; what is recorded does not ask
        """
        found = Admission(step, after)
        if step > self.last_step or found.age > self.max_staleness:
            return None
        starts = self.recorded[step] <= after if step in self.recorded else is_wanted
        return found if starts else None


def recorded_starts(rows: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """What `Schedule` takes of the lines of a schedule.jsonl. Of a step that a resumed run started
    again the last line counts.

    Raises:
        ValueError: a line that is none of a schedule.
    """
    starts: dict[int, int] = {}
    for number, row in enumerate(rows, 1):
        if row.get("event") not in ("started", "trained"):
            raise ValueError(
                f"line {number}: expected an event, started or trained, found {dict(row)}: "
                "trainer.schedule is the schedule.jsonl of a run"
            )
        if row["event"] == "started":
            step, after = row.get("step"), row.get("after")
            if not isinstance(step, int) or not isinstance(after, int) or not 0 <= after < step:
                raise ValueError(
                    f"line {number}: expected a step and the earlier step whose weights it was "
                    f"started with, found step={step}, after={after}"
                )
            starts[step] = after
    return starts


def make_schedule(trainer: TrainerConfig) -> Schedule:
    """
    Raises:
        ValueError: ``trainer.schedule`` is not a schedule, or one of a run with another bound.
    """
    # With sync_every=n rollouts are up to n - 1 steps old, though none is started ahead.
    bound = max(trainer.max_staleness, trainer.sync_every - 1)
    if trainer.schedule is None:
        return Schedule(bound, trainer.steps)
    path = Path(trainer.schedule)
    if not path.is_file():
        raise ValueError(f"trainer.schedule={path}: expected the schedule.jsonl of a run [RL1002]")
    try:
        recorded = recorded_starts(read_jsonl(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error} [RL1002]") from error
    for step, after in recorded.items():
        if (age := Admission(step, after).age) > bound:
            raise ValueError(
                f"{path}: the batch of step {step} was {age} steps old, and "
                f"trainer.max_staleness={trainer.max_staleness} allows {bound}: set that of the "
                "run that is to be repeated [RL1002]"
            )
    return Schedule(bound, trainer.steps, recorded)
