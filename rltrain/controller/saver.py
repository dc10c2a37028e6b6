"""Writes the checkpoints of a run, one after the other: at once, or while the run goes on.

A checkpoint in the background is begun in its step and counts once it is finished: in a later step
in which the ranks say that they have written it, at the latest when the next one is due.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rltrain.controller.checkpoint_space import DiskFull
from rltrain.controller.checkpoint_storage import Storage
from rltrain.controller.cluster.worker_group import WorkerGroup
from rltrain.controller.pending_save import ANSWER_S, PendingSave
from rltrain.controller.run_checkpoint import checkpoints, step_of
from rltrain.controller.save_checkpoint import begin_save, finish_save, save

logger = logging.getLogger(__name__)


@dataclass
class Saver:
    storage: Storage
    models: Sequence[WorkerGroup[Any]]
    least: Callable[[], int]
    """Bytes of a checkpoint by the plan."""
    values: Mapping[int, float]
    """Of ``checkpoint.best_metric``, by step; whoever measures it adds to them."""
    skipped: int = 0
    """Checkpoints that found no room; see ``checkpoint.on_full``."""
    pending: PendingSave | None = None

    @property
    def steps(self) -> list[int]:
        """Of the checkpoints that there are, and of the one that is written."""
        there = [step_of(path) for path in checkpoints(self.storage.run_dir)]
        return there if self.pending is None else [*there, self.pending.step]

    def save(self, step: int, kept: Mapping[str, Any], *, at_once: bool = True) -> None:
        """The checkpoint of ``step``, after the one that was begun before it.

        Args:
            kept: beside the models
            at_once: it is there when this returns, whatever ``checkpoint.asynchronous`` says

        Raises:
            RuntimeError: as `save_checkpoint.save`, unless ``checkpoint.on_full`` skips it.
        """
        self.finish()
        arguments = self.storage, step, self.models, kept, self.least()
        with self._may_skip(step):
            if self.storage.config.asynchronous and not at_once:
                self.pending = begin_save(*arguments)
            else:
                save(*arguments, self.values)

    def finish(self, *, waits: bool = True) -> None:
        """Finish what is pending; unless this ``waits``, only if all of it is written.

        Raises:
            RuntimeError: as `save`.
        """
        pending = self.pending
        if pending is None or not (waits or pending.is_written()):
            return
        self.pending = None
        with self._may_skip(pending.step):
            finish_save(pending, self.values)

    def finish_after_error(self) -> None:
        """The run ends, or its parts start again: finish what is pending if all ranks answer."""
        if (pending := self.pending) is None:
            return
        try:
            pending.is_written(ANSWER_S)
            self.finish()
        except RuntimeError as error:
            self.pending = None
            pending.drop()
            logger.warning("no checkpoint of step %d: %s", pending.step, error)

    @contextmanager
    def _may_skip(self, step: int) -> Iterator[None]:
        try:
            yield
        except DiskFull as error:
            if self.storage.config.on_full == "stop":
                raise
            self.skipped += 1
            logger.warning(
                "NO CHECKPOINT of step %d, %d left out so far (checkpoint.on_full=skip): %s",
                step,
                self.skipped,
                error,
            )
