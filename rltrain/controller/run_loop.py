"""What every run does around its steps: resume, save, evaluate, log, check the first step."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rltrain.actors.interrupts import signals_held
from rltrain.actors.outcome import OUTCOME
from rltrain.algorithms.advantages import critic_only_steps
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller import run_checkpoint as checkpoint
from rltrain.controller.checkpoint_space import Planned, planned
from rltrain.controller.checkpoint_storage import Storage
from rltrain.controller.checks.first_step import Check, block, require
from rltrain.controller.checks.model_checks import read_model
from rltrain.controller.choose_checkpoint import PENDING
from rltrain.controller.cluster.critic_group import CriticGroup
from rltrain.controller.cluster.node_gpus import gpu_listener
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.controller.cluster.worker_group import UpdateNotFinite, WorkerGroup
from rltrain.controller.find_checkpoint import Found
from rltrain.controller.keep_best import Ranking
from rltrain.controller.nonfinite import CODE, Guard, InHand, is_nonfinite, state_causes
from rltrain.controller.restore_checkpoint import restore
from rltrain.controller.resume_changes import settings_of
from rltrain.controller.save_checkpoint import save_last
from rltrain.controller.saver import Saver
from rltrain.controller.speed import Speed
from rltrain.data.loader import PromptLoader
from rltrain.policy.types import Scored, Updated
from rltrain.tracking.environment import describe_environment
from rltrain.tracking.progress import RunProgress
from rltrain.tracking.timers import StepTimer
from rltrain.tracking.tracker import Tracker, read_facts
from rltrain.weights.huggingface.identity import ModelIdentity

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What a step did."""

    batch: Batch
    metrics: dict[str, float]
    updates: Sequence[Updated]
    scored: Scored | None = None  # before the updates; None where that pass was left out
    paired: Batch | None = None  # with the reference scored as the policy was
    left_out: int = 0  # updates that were not made, because a number was not finite


class Evaluation(Protocol):
    def is_due(self, step: int) -> bool: ...
    def evaluate(self, step: int) -> dict[str, float]: ...


@dataclass(frozen=True)
class Start:
    """Where a run starts from, fresh or resumed."""

    model: ModelIdentity
    """What its checkpoints say of their model."""
    storage: Storage
    """Where they are."""
    after: int = 0
    """The step of the checkpoint that was loaded; 0 in a fresh run."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What that checkpoint keeps beside the models; empty in a fresh run."""


@dataclass
class Loop(ABC):
    """The steps of a run; a subclass says what one step does."""

    config: Config
    prompts: PromptLoader
    policy: PolicyGroup
    critic: CriticGroup | None
    speed: Speed
    evaluator: Evaluation
    tracker: Tracker
    start: Start

    @abstractmethod
    def take(self, step: int, timer: StepTimer, *, is_first: bool) -> Step:
        """Learn from the next prompts. It calls `finish_first` before the first update.

        Args:
            is_first: whether `first_checks` follow, which may need more than other steps measure
        """

    @abstractmethod
    def first_checks(self, taken: Step) -> list[Check]:
        """What must hold in a step before which nothing was learned."""

    def begin(self) -> dict[str, float]:  # nothing, unless there are engines
        """What precedes the first evaluation and step of this process. Returns metrics that the
        step has which it starts after."""
        return {}

    def hand_over(self, step: int, timer: StepTimer) -> dict[str, float]:  # likewise
        """What follows the updates of a step. Returns metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the models."""
        return {"prompts": self.prompts.state_dict()}

    def __post_init__(self) -> None:
        self.ranking = Ranking.of_run(self.config, self.start.after)
        self.saver = Saver(
            self.start.storage,
            self.models,
            lambda: self.planned.whole,
            self.ranking.values,
            int(self.start.state.get("skipped", 0)),
        )
        self.guard = Guard(self.config, int(self.start.state.get("nonfinite_in_a_row", 0)))
        self.in_hand: InHand | None = None
        """What `take` has made of its step so far, once there is a batch."""
        self._in_step = ExitStack()
        self._is_signalled: Callable[[], bool] = lambda: False
        self._settled: tuple[int, Mapping[str, Any]] | None = None
        """The last step of which the models have all updates, and what its checkpoint keeps."""

    @cached_property
    def planned(self) -> Planned:
        return planned(self.config, read_model(self.config))

    def train(self) -> None:
        """All steps after the one that the run starts from."""
        try:
            self.take_steps()
        except KeyboardInterrupt:
            self.save_settled()
            raise
        except Exception:
            self.saver.finish_after_error()
            raise

    def take_steps(self) -> None:
        done = self.start.after
        begun = self.begin()
        if done == 0 and self.evaluator.is_due(0):
            self.tracker.phase("eval")
            self.log(0, self.evaluator.evaluate(0))
        if done > 0:
            self.complete(done, begun)
        for step in range(done + 1, self.config.trainer.steps + 1):
            self.step(step)

    def complete(self, step: int, begun: Mapping[str, float]) -> None:
        """What a killed run did not come to after the checkpoint of ``step``: the metrics, less
        those of the time after it, with the evaluation; and the link to the last weights.

        Args:
            begun: as `begin` returned it
        """
        if self.tracker.lacks_row:
            metrics = {**self.start.state.get("metrics", {}), **begun}
            if self.evaluator.is_due(step):
                self.tracker.phase("eval")
                metrics |= self.evaluator.evaluate(step)
            self.log(step, metrics)
        if self.config.checkpoint.last and step == self.config.trainer.steps:
            self.save_last(step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.tracker.log(step, metrics)
        if self.config.checkpoint.keep_best:  # else nobody need look at the disk
            self.ranking.add(step, metrics, saved=self.saver.steps)

    def finish_first(self) -> None:
        """The models change from now on: a signal waits until the checkpoint of the step is saved,
        if there are checkpoints."""
        self._is_signalled = self._in_step.enter_context(signals_held())

    def step(self, step: int) -> None:
        self.tracker.timeline.begin_step(step)
        timer = StepTimer(on_phase=self.tracker.phase)
        is_first = step == max(self.start.after, critic_only_steps(self.config)) + 1
        self.in_hand = None
        with ExitStack() as self._in_step:
            taken = self.take_finite(step, timer, is_first=is_first)
            metrics = taken.metrics
            self.save(step, timer, metrics)
            self._settled = step, self.kept(metrics)
        metrics |= self.hand_over(step, timer)
        if self.evaluator.is_due(step):
            with timer.phase("eval"):
                metrics |= self.evaluator.evaluate(step)
        metrics |= self.finish_written(timer)
        metrics |= timer.metrics()
        metrics |= self.speed.metrics(
            taken.batch,
            metrics,
            scored=taken.scored is not None,
            updated=len(taken.updates) == self.config.trainer.mini_batches,
        )
        self.log(step, metrics)
        if is_first and taken.left_out:
            logger.warning("step %d left updates out: its invariants are not checked", step)
        elif is_first:
            self.check_invariants(step, self.first_checks(taken))

    def take_finite(self, step: int, timer: StepTimer, *, is_first: bool) -> Step:
        """`take`, less the updates whose numbers are not finite. After it the models are finite.

        Raises:
            RuntimeError: as `Guard`.
        """
        try:
            taken = self.take(step, timer, is_first=is_first)
            causes = [str(unmade) for model in self.models for unmade in model.unmade]
            count = len(causes)
        except (ValueError, UpdateNotFinite) as error:
            if self.in_hand is None or not is_nonfinite(error):
                raise
            # A log-probability, a value or an advantage, before any update of the policy.
            causes = [str(error).removesuffix(f" [{CODE}]")]
            count = self.config.trainer.mini_batches
            taken = Step(self.in_hand.batch, self.in_hand.metrics, [])
        kl_coef = 0.0 if self.in_hand is None else self.in_hand.kl_coef
        found = state_causes({model.role: model.nonfinite_state() for model in self.models})
        if found:
            self.guard.broken(step, taken.batch, kl_coef, [*causes, *found])
        if causes:
            self.guard.left_out(step, taken.batch, kl_coef, causes)
        else:
            self.guard.passed()
        if self.config.trainer.on_nonfinite == "skip":
            taken.metrics["policy/nonfinite_updates"] = float(count)
        return replace(taken, left_out=count)

    def check_invariants(self, step: int, checks: Sequence[Check]) -> None:
        """Print what must hold in a first step, and end the run unless it does.

        Raises:
            RuntimeError: as `invariants.require`, where ``trainer.invariants=stop``.
        """
        logger.info("%s", block(checks, step))
        self.tracker.invariants(step, [asdict(check) for check in checks])
        if self.config.trainer.invariants == "stop":
            require(checks, step)

    def save(self, step: int, timer: StepTimer, metrics: dict[str, float]) -> None:
        """Write what is due: a checkpoint, and after the last step its weights. One that was begun
        before is finished if it is written, or if another is due.

        Args:
            metrics: of the step so far, kept for `complete`

        Raises:
            RuntimeError: as `save_checkpoint.save`, unless ``checkpoint.on_full`` skips it.
        """
        settings, is_last = self.config.checkpoint, step == self.config.trainer.steps
        is_interrupted = settings.every > 0 and self._is_signalled()
        is_due = is_checkpoint_due(self.config, step) or is_interrupted
        if is_due or self.saver.pending is not None:
            with timer.phase("checkpoint"):
                self.saver.finish(waits=is_due)
                if is_due:
                    self.tracker.sync()  # of the steps before, no metrics may be lost any more
                    at_once = is_last or is_interrupted
                    self.saver.save(step, self.kept(metrics), at_once=at_once)
            if settings.on_full == "skip":
                metrics["checkpoint/skipped"] = float(self.saver.skipped)
        if settings.last and is_last:
            with timer.phase("checkpoint"):
                self.save_last(step)

    def finish_written(self, timer: StepTimer) -> dict[str, float]:
        """A checkpoint that was begun is finished if it is written. Returns metrics."""
        if self.saver.pending is not None and not self.is_aside():
            with signals_held(), timer.phase("checkpoint"):
                self.saver.finish(waits=False)
        settings = self.config.checkpoint
        if not (settings.asynchronous and settings.every):
            return {}
        return {PENDING: float(self.saver.pending is not None)}

    def kept(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """What a checkpoint keeps beside the models, and what `complete` needs."""
        about = {"model": self.start.model, "config": settings_of(self.config)}
        kept = {"metrics": dict(metrics), "skipped": self.saver.skipped}
        return about | kept | self.guard.state() | self.state()

    def save_settled(self) -> None:
        """The run was interrupted: keep the steps since the last checkpoint."""
        if self._settled is None or not self.config.checkpoint.every:
            return
        step, kept = self._settled
        try:
            self.saver.finish()
            if self.is_aside() or max(self.saver.steps, default=0) >= step:
                return
            logger.info("saving step %d", step)
            self.saver.save(step, kept)
        except RuntimeError as error:
            logger.warning("no checkpoint of step %d: %s", step, error)

    def is_aside(self) -> bool:
        """Whether the memory of the models may be where they cannot be saved from."""
        return False

    def save_last(self, step: int) -> None:
        least = self.planned.weights
        save_last(self.start.storage, step, self.policy, self.start.model, least)

    @property
    def models(self) -> list[WorkerGroup[Any]]:
        """Those that learn."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    @property
    def run_dir(self) -> Path:
        return Path(self.config.trainer.output_dir)


def is_checkpoint_due(config: Config, step: int) -> bool:
    every = config.checkpoint.every
    return every > 0 and (step % every == 0 or step == config.trainer.steps)


def resume(
    config: Config,
    storage: Storage,
    found: Found,
    models: Sequence[WorkerGroup[Any]],
    prompts: PromptLoader,
) -> Start:
    """Load the checkpoint that was found into models and prompts, if there is one."""
    if (record := found.record) is None:
        return Start(found.model, storage)
    restore(storage, record, models)
    state = dict(record.state)
    if config.trainer.resume_with_changes and not prompts.matches(state["prompts"]):
        logger.warning("the training data were changed: the run goes on with the first of them")
    else:
        prompts.load_state_dict(state["prompts"])
    if "algorithm.kl.coef" in found.changes:
        state.pop("kl_coef", None)
    return Start(found.model, storage, record.step, state)


def is_finished(config: Config) -> bool:
    """Whether the run in ``trainer.output_dir`` has taken all its steps already; says so.

    Raises:
        ValueError: it ended without a checkpoint, so it could only start again from the beginning.
    """
    run_dir = Path(config.trainer.output_dir)
    if config.trainer.resume != "auto":
        return False
    if read_facts(run_dir / OUTCOME).get("state") != "finished":
        return False
    if not (saved := checkpoint.checkpoints(run_dir)):
        raise ValueError(
            f"trainer.resume=auto: the run in {run_dir} is finished and has no checkpoint to go on "
            "from (checkpoint.every was 0), so it would start again. Choose another "
            "trainer.output_dir"
            " [RL6006]"
        )
    done = checkpoint.step_of(saved[-1])
    if done < config.trainer.steps:
        return False
    logger.info(
        "nothing to do: the run in %s is finished, after step %d. Raise trainer.steps to go on",
        run_dir,
        done,
    )
    return True


def open_tracker(
    config: Config,
    placed: Cluster,
    done: int,
    progress: RunProgress,
    versions: Mapping[str, str] | None = None,
) -> Tracker:
    """The tracker of a run that goes on after step ``done``, 0 for a fresh one."""
    return Tracker(
        Path(config.trainer.output_dir),
        config.tracking,
        config.model_dump(mode="json"),
        describe_environment() | dict(versions or {}),
        num_steps=config.trainer.steps,
        first_step=done + 1 if done else 0,
        gpus=placed.gpu_ids,
        node_gpus=gpu_listener(placed),
        progress=progress,
    )
