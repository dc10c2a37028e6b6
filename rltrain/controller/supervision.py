"""A run goes on by itself after a part of it has died, frozen or lost its weights.

All parts are started again, in this process, from the newest checkpoint: the same folder, the same
runs of the trackers, and the steps after that checkpoint once more. Before the first checkpoint
they start from where the run began. An engine alone needs none of this: `engine_restarts`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ray.exceptions import RayError

from rltrain.actors.failures import ActorFailed
from rltrain.config import Config
from rltrain.controller.run_checkpoint import checkpoints, step_of

logger = logging.getLogger(__name__)

SYNC = ("start_weight_sync", "load_weight_bucket", "finish_weight_sync", "connect")
"""Methods after whose failure an engine has no weights to generate with."""

FROM_STEP_0 = "step 0, since the run has saved no checkpoint yet (checkpoint.every)"


@dataclass
class Restarts:
    """At most ``limit`` in any ``window_s`` seconds."""

    limit: int
    window_s: float
    _times: deque[float] = field(default_factory=deque)

    def take(self, now: float) -> bool:
        """Whether there may be one more at ``now``, in seconds of any steady clock."""
        while self._times and self._times[0] <= now - self.window_s:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return False
        self._times.append(now)
        return True

    @property
    def taken(self) -> int:
        """How many of the window's there have been, when the last one was taken."""
        return len(self._times)


def supervise(config: Config, attempt: Callable[[Config, Restarts], None]) -> None:
    """``attempt(config, restarts)``, and again from the newest checkpoint each time a part is lost.

    Args:
        attempt: a whole run, which has ended all that it started when it raises. It takes from the
            restarts, too, what it starts again by itself.

    Raises:
        RuntimeError: parts were lost more than ``trainer.max_restarts`` times.
        Exception: as ``attempt`` raises it: no part was lost.
    """
    trainer = config.trainer
    restarts = Restarts(trainer.max_restarts, trainer.restart_window_s)
    while True:
        try:
            return attempt(config, restarts)
        except Exception as error:
            if trainer.max_restarts == 0 or not lost_a_part(error):
                raise
            if not restarts.take(time.monotonic()):
                raise RuntimeError(
                    f"{error}\nBefore this, parts were started again {trainer.max_restarts} times "
                    f"within {trainer.restart_window_s:g} s, which is trainer.max_restarts. Mend "
                    "the cause, then go on with trainer.resume=auto"
                ) from error
            saved = checkpoints(Path(trainer.output_dir))
            place = f"the checkpoint of step {step_of(saved[-1])}" if saved else FROM_STEP_0
            logger.error(
                "%s\n  All parts start again from %s (restart %d; at most trainer.max_restarts=%d "
                "in %g s).",
                error,
                place,
                restarts.taken,
                restarts.limit,
                restarts.window_s,
            )
        if saved:  # else what was asked for: a run that resumes has a checkpoint
            config = config.model_copy(
                update={"trainer": config.trainer.model_copy(update={"resume": "auto"})}
            )


def lost_a_part(error: BaseException | None) -> bool:
    """Whether the error, or what it followed from, says that a process died, froze or has no usable
    weights; what a process raised while it worked would most likely be raised again."""
    while error is not None:
        if isinstance(error, ActorFailed):
            return error.kind != "raised" or error.where.rpartition(".")[2] in SYNC
        if isinstance(error, RayError):
            return True
        error = error.__cause__  # a checkpoint that could not be written says so in its own words
    return False
