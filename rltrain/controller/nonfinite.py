"""What becomes of a step in which a number is NaN or infinite: ``trainer.on_nonfinite``."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.config.error_codes import codes_in
from rltrain.controller.cluster.worker_group import UpdateNotFinite
from rltrain.controller.kept_steps import KeptStep, keep
from rltrain.controller.run_checkpoint import checkpoints, step_of
from rltrain.policy.actor import Role

logger = logging.getLogger(__name__)

CODE = "RL5005"
SHOWN = 3
"""Parameters in a message."""


@dataclass(frozen=True)
class InHand:
    """A step before its updates."""

    batch: Batch
    metrics: dict[str, float]
    kl_coef: float = 0.0
    """Of the KL in its loss."""


def is_nonfinite(error: Exception) -> bool:
    """Whether it says that a number of a step is not finite."""
    is_ours = isinstance(error, ValueError | UpdateNotFinite)
    return is_ours and codes_in(str(error)) == [CODE]


def state_causes(found: Mapping[Role, Mapping[int, Sequence[str]]]) -> list[str]:
    """What a broken model is told as.

    Args:
        found: by role and rank, the names of what is not finite
    """
    return [
        f"{role}, rank {rank}: after the update, {', '.join(names[:SHOWN])} "
        f"{'is' if len(names) == 1 else 'are'} not finite"
        + (f", and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        for role, by_rank in found.items()
        for rank, names in by_rank.items()
    ]


@dataclass
class Guard:
    """Keeps the batch of such a step, and says whether the run goes on."""

    config: Config
    in_a_row: int = 0
    """Steps up to the last one that left an update out."""

    def passed(self) -> None:
        """All updates of a step were made."""
        self.in_a_row = 0

    def left_out(self, step: int, batch: Batch, kl_coef: float, causes: Sequence[str]) -> None:
        """Updates of a step were not made.

        Raises:
            RuntimeError: the run ends.
        """
        trainer = self.config.trainer
        self.in_a_row += 1
        skips = trainer.on_nonfinite == "skip"
        kept = self._keep(step, batch, kl_coef, causes)
        said = f"step {step}: {'; '.join(causes)}"
        if skips and self.in_a_row <= trainer.max_skipped_steps:
            logger.warning(
                "UPDATE LEFT OUT in %s. %s (trainer.on_nonfinite=skip; step %d in a row of at most "
                "trainer.max_skipped_steps=%d)",
                *(said, kept, self.in_a_row, trainer.max_skipped_steps),
            )
            return
        why = (
            f"This is step {self.in_a_row} in a row with such an update, and "
            f"trainer.max_skipped_steps={trainer.max_skipped_steps}"
            if skips
            else "trainer.on_nonfinite=skip goes on without such an update"
        )
        raise RuntimeError(
            f"{said}. That update was not made, on any rank. {kept}. {why}. Otherwise lower "
            f"optimizer.lr or mend the reward or loss, and go on with trainer.resume=auto [{CODE}]"
        )

    def broken(self, step: int, batch: Batch, kl_coef: float, causes: Sequence[str]) -> None:
        """An update was made, and the model is of no use after it.

        Raises:
            RuntimeError: always.
        """
        kept = self._keep(step, batch, kl_coef, causes)
        raise RuntimeError(
            f"step {step}: {'; '.join(causes)}. No checkpoint is written of it. {kept}. Lower "
            "optimizer.lr, then go on from the newest checkpoint with trainer.resume=auto "
            f"[{CODE}]"
        )

    def _keep(self, step: int, batch: Batch, kl_coef: float, causes: Sequence[str]) -> str:
        """A sentence that says where the batch is."""
        run_dir = Path(self.config.trainer.output_dir)
        saved = [step_of(path) for path in checkpoints(run_dir)]
        about = KeptStep(step, list(causes), kl_coef, max(saved, default=0), [])
        try:
            folder = keep(run_dir, about, batch)
        except (OSError, RuntimeError) as error:
            return f"Its batch could not be kept ({error})"
        return f"Its batch is kept: `rltrain step replay {folder}` runs it again alone"

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"nonfinite_in_a_row": self.in_a_row}
