"""Which checkpoints stay: the newest, and the best by a metric of their steps.

What a metric was is read from ``metrics.jsonl``, so a resumed run knows the best so far. A step is
evaluated after its checkpoint is there; it is among the newest until the next one is saved.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rltrain.config import Config
from rltrain.config.trainer import CheckpointConfig
from rltrain.tracking.jsonl import read_jsonl
from rltrain.tracking.metrics import find_metric

logger = logging.getLogger(__name__)

Mode = Literal["max", "min"]


def best_steps(values: Mapping[int, float], count: int, mode: Mode) -> list[int]:
    """The steps with the best values, the best first; of equal ones the earlier."""
    sign = -1 if mode == "max" else 1
    finite = [step for step, value in values.items() if math.isfinite(value)]
    return sorted(finite, key=lambda step: (sign * values[step], step))[:count]


def staying(
    saved: Sequence[int], values: Mapping[int, float], config: CheckpointConfig
) -> Collection[int]:
    """The steps whose checkpoints stay.

    Args:
        values: of ``checkpoint.best_metric``, by step; of those that are not saved they count not
    """
    newest = sorted(saved)[-config.keep :]
    if config.keep_best == 0:
        return newest
    known = {step: values[step] for step in saved if step in values}
    return {*newest, *best_steps(known, config.keep_best, mode_of(config))}


def mode_of(config: CheckpointConfig) -> Mode:
    """Whether the largest or the smallest value of ``checkpoint.best_metric`` is the best.

    Raises:
        ValueError: there is no such metric, or neither is better by docs/metrics.md.
    """
    try:
        better = find_metric(config.best_metric).better
    except ValueError as error:
        text = str(error).removesuffix(" [RL7006]")
        raise ValueError(f"checkpoint.best_metric: {text} [RL1003]") from error
    if config.best_mode is not None:
        return config.best_mode
    if better == "neither":
        raise ValueError(
            f"checkpoint.best_metric={config.best_metric}: neither a higher nor a lower value is "
            "better by docs/metrics.md: set checkpoint.best_mode to max or min, or choose another "
            "metric [RL1003]"
        )
    return "max" if better == "higher" else "min"


def check_best(config: Config) -> None:
    """Every checkpoint of the run will have the metric, as far as can be known.

    Raises:
        ValueError: it will not.
    """
    settings, every = config.checkpoint, config.trainer.eval_every
    if settings.keep_best == 0:
        return
    mode_of(settings)
    asked = f"checkpoint.keep_best={settings.keep_best} by {settings.best_metric}"
    if find_metric(settings.best_metric).when != "evaluation":
        return
    if every == 0 or settings.every % every:
        raise ValueError(
            f"{asked}: expected an evaluation after every checkpoint, found checkpoint.every="
            f"{settings.every} and trainer.eval_every={every}: make the first a multiple of the "
            "second [RL1003]"
        )
    is_loss, supervised = settings.best_metric == "eval/loss", config.algorithm.type == "sft"
    if is_loss != supervised:
        measured = "eval/loss alone" if supervised else "no eval/loss"
        raise ValueError(
            f"{asked}: algorithm.type={config.algorithm.type} measures {measured}: choose another "
            "checkpoint.best_metric [RL1003]"
        )


@dataclass
class Ranking:
    """The values of ``checkpoint.best_metric`` so far."""

    config: CheckpointConfig
    values: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of_run(cls, config: Config, after: int) -> "Ranking":
        """Of the steps up to ``after``, from which the run goes on."""
        settings = config.checkpoint
        if settings.keep_best == 0:
            return cls(settings)
        rows = read_jsonl(Path(config.trainer.output_dir) / "metrics.jsonl")
        values = {row["step"]: row.get(settings.best_metric) for row in rows}
        known = {s: float(v) for s, v in values.items() if s <= after and v is not None}
        return cls(settings, known)

    def add(self, step: int, metrics: Mapping[str, float], *, saved: Collection[int]) -> None:
        """The metrics of a step are known.

        Args:
            saved: the steps of the checkpoints that there are

        Raises:
            RuntimeError: the metric is not among them, and the step is saved or is 0.
        """
        name = self.config.best_metric
        if self.config.keep_best == 0 or (step and step not in saved):
            return
        if name not in metrics:
            area = name.partition("/")[0]
            found = [other for other in metrics if other.startswith(f"{area}/")]
            raise RuntimeError(
                f"step {step}: expected checkpoint.best_metric={name} to be measured, found "
                f"{', '.join(found) or f'nothing of {area}/'}: choose one of these, or set "
                "checkpoint.keep_best=0, and go on with trainer.resume=auto [RL6006]"
            )
        self.values[step] = float(metrics[name])
        known = {s: value for s, value in self.values.items() if s in saved}
        if best_steps(known, 1, mode_of(self.config)) == [step]:
            logger.info("step %d is the best so far: %s is %g", step, name, metrics[name])
