"""A step that was kept is run again alone: its scoring and its updates, without engines.

It starts from the newest checkpoint before the step, or from the model that the run began with, and
writes nothing into the run's folder.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from rltrain.algorithms.advantages import critic_only_steps, needs_critic
from rltrain.algorithms.sequences import require_finite, sequence_of
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.config.saved_config import load_config
from rltrain.controller import run_checkpoint, stages
from rltrain.controller.checkpoint_storage import Storage
from rltrain.controller.cluster.critic_group import CriticGroup
from rltrain.controller.cluster.disks import disks_of
from rltrain.controller.cluster.model_folders import check_imported_weights
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.controller.cluster.ray_cluster import Cluster, cluster
from rltrain.controller.cluster.worker_group import WorkerGroup
from rltrain.controller.find_checkpoint import examine
from rltrain.controller.kept_steps import KeptStep, read
from rltrain.controller.loop import UPDATE_ROUTING
from rltrain.controller.nonfinite import is_nonfinite, state_causes
from rltrain.controller.restore_checkpoint import restore
from rltrain.controller.sft import warm_started_model
from rltrain.data.packing import mini_batch_sizes
from rltrain.data.tiny_model import build_random_model
from rltrain.policy.types import Updated


def replay_step(named: Path, run: Path | None = None) -> int:
    """Run a kept step again and print its numbers; 1 if one is not finite, else 0.

    Args:
        run: the folder of its run, if the step was moved out of it

    Raises:
        ValueError: it is no kept step, or its run is not there.
    """
    about, batch, found_run = read(named)
    run_dir = (run or found_run).expanduser().absolute()
    config = load_config(run_dir)
    sizes = f"{batch.num_sequences} sequences, {batch.num_tokens} tokens"
    say(f"step {about.step} of {run_dir}: {sizes}")
    for cause in about.causes:
        say(f"the run found: {cause}")
    with (
        tempfile.TemporaryDirectory(prefix="rltrain-step-") as folder,
        groups(alone(config, folder), run_dir, about) as (policy, critic),
    ):
        replay = Replay(config, about, policy, critic)
        replay.run(batch)
    say("NOT FINITE, as above" if replay.bad else "all numbers are finite")
    return 1 if replay.bad else 0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def alone(config: Config, folder: str) -> Config:
    """The configuration with which the run's models start without its engines: they need no place
    of their own, every mini-batch is tried, and logs go to ``folder``."""
    placement = "colocated" if config.cluster.placement == "disaggregated" else None
    cluster = {"placement": placement} if placement else {}
    trainer = {"on_nonfinite": "skip", "output_dir": folder, "resume": "never"}
    # A trace compares with the route stores, which are gone.
    untraced = config.routing_replay.model_copy(update={"trace": False})
    return config.model_copy(
        update={
            "routing_replay": untraced,
            "trainer": config.trainer.model_copy(update=trainer),
            "cluster": config.cluster.model_copy(update=cluster),
        }
    )


@contextmanager
def groups(
    config: Config, run_dir: Path, about: KeptStep
) -> Iterator[tuple[PolicyGroup, CriticGroup | None]]:
    """The run's models, as the newest checkpoint before the step has them."""
    is_rl = config.algorithm.type == "rl"
    with cluster(config) as placed:
        disks = disks_of(config, placed)
        check_imported_weights(config, disks)
        if config.model.path:
            path = Path(config.model.path)
        else:
            random = build_random_model
            path = warm_started_model(config, placed, disks) if is_rl else random(config.model)
        policy = PolicyGroup(config, str(path), placed)
        has_critic = is_rl and needs_critic(config.algorithm)
        critic = CriticGroup(config, str(path), placed) if has_critic else None
        models: list[WorkerGroup[Any]] = [policy] if critic is None else [policy, critic]
        load_before(config, placed, run_dir, about.step, models)
        yield policy, critic


def load_before(
    config: Config, placed: Cluster, run_dir: Path, step: int, models: list[WorkerGroup[Any]]
) -> None:
    """Load the newest checkpoint before ``step``, and say which it is."""
    disks = disks_of(config, placed)
    disk_of = {disks.driver: disks.driver}
    if len(disks.nodes) > 1:
        disk_of = disks.shared(run_dir / run_checkpoint.FOLDER)
    storage = Storage(run_dir, config.checkpoint, disks, disk_of)
    saved = run_checkpoint.checkpoints(run_dir)
    before = [path for path in saved if run_checkpoint.step_of(path) < step]
    if not before:
        other = "" if step == 1 else f". They are not those before step {step}: no checkpoint is"
        say(f"weights: those that the run began with{other}")
        return
    newest = run_checkpoint.step_of(before[-1])
    restore(storage, examine(storage, before[-1]), models)
    same = "with which the step began" if newest == step - 1 else f"not those before step {step}"
    say(f"weights: of the checkpoint of step {newest}, {same}")


@dataclass
class Replay:
    """The passes and updates of one step."""

    config: Config
    about: KeptStep
    policy: PolicyGroup
    critic: CriticGroup | None
    bad: bool = False

    def run(self, batch: Batch) -> None:
        """What was computed in the run is used as it was; what was not yet is computed now."""
        self.policy.begin_step(batch)
        try:
            batch = self.scored(batch) if self.is_rl else self.checked(batch)
        except ValueError as error:
            if not is_nonfinite(error):
                raise
            self.told(f"NOT FINITE: {error}")
            return
        if self.critic is not None:
            self.updates(batch, self.critic, self.critic.update(stages.critic_fields(batch)))
        if not self.is_rl:
            self.updates(batch, self.policy, self.policy.update({}, routing="native"))
        elif self.about.step > critic_only_steps(self.config):
            routing = UPDATE_ROUTING[self.config.routing_replay.mode]
            fields, kl_coef = stages.policy_fields(batch), self.about.kl_coef
            made = self.policy.update(fields, routing=routing, kl_coef=kl_coef)
            self.updates(batch, self.policy, made)
        models: list[WorkerGroup[Any]] = [self.policy]
        models += [] if self.critic is None else [self.critic]
        for cause in state_causes({m.role: m.nonfinite_state() for m in models}):
            self.told(f"NOT FINITE: {cause}")

    @property
    def is_rl(self) -> bool:
        return self.config.algorithm.type == "rl"

    def told(self, line: str) -> None:
        self.bad = True
        say(line)

    def checked(self, batch: Batch) -> Batch:
        """Log-probabilities, which a supervised step needs none of."""
        now = self.policy.score(routing="native").logprobs
        self.check("log-probabilities", now, batch, "native")
        return batch

    def scored(self, batch: Batch) -> Batch:
        """The batch with what an update takes.

        Raises:
            ValueError: a number is not finite.
        """
        replay = self.config.routing_replay
        routing: Literal["rollout", "native"] = "rollout" if replay.mode == "r3" else "native"
        record = replay.mode == "r2" or replay.fallback == "r2"
        now = self.policy.score(routing=routing, record=record).logprobs
        self.check("old_logprobs", now, batch, routing)
        if batch.old_logprobs is not None:
            apart = (now - batch.old_logprobs)[batch.response_mask].abs().max()
            say(f"old_logprobs: finite, at most {float(apart):g} from those of the run")
        else:
            bypass = self.config.algorithm.bypass_old_logprobs
            batch = batch.with_fields(old_logprobs=batch.rollout_logprobs if bypass else now)
            say("old_logprobs: finite")
        if self.config.algorithm.kl.coef > 0 and batch.ref_logprobs is None:
            native = replay.reference == "native"
            of = self.policy.score(
                routing="native" if native else UPDATE_ROUTING[replay.mode], of="reference"
            )
            require_finite("ref_logprobs", of.logprobs, batch.response_mask, batch.seq_lens)
            batch = batch.with_fields(ref_logprobs=of.logprobs)
        if self.critic is not None:
            self.critic.begin_step(batch)
            values = self.critic.values()
            require_finite("values", values, batch.response_mask, batch.seq_lens)
            batch = batch if batch.values is not None else batch.with_fields(values=values)
        if batch.loss_weights is None:
            batch = stages.with_signal(batch, self.config, self.about.kl_coef)[0]
        return batch

    def check(
        self, name: str, logprobs: Tensor, batch: Batch, routing: Literal["rollout", "native"]
    ) -> None:
        """As `require_finite`, and say after which layer the first such number comes."""
        try:
            require_finite(name, logprobs, batch.response_mask, batch.seq_lens)
        except ValueError:
            place = self.policy.locate(routing=routing)
            if place is not None:
                self.told(
                    f"the first number that is not finite is in the output of layer {place.layer} "
                    "(counted from 0; -1 is the embedding, one more than there are the head), "
                    f"{token(batch, place.token)}"
                )
            raise

    def updates(self, batch: Batch, group: WorkerGroup[Any], made: list[Updated]) -> None:
        lines = {
            one.mini_batch: f"loss {one.totals['loss']:.6g}, gradient norm {one.grad_norm:.6g}"
            for one in made
        }
        for one in group.unmade:
            lines[one.mini_batch] = f"NOT FINITE: {one.found}"
        for number, line in sorted(lines.items()):
            say(f"{group.role}, mini-batch {number}: {line}")
        for one in group.unmade:
            self.bad = True
            for line in largest(batch, one.mini_batch, self.config.trainer.mini_batches):
                say(f"  {line}")


def token(batch: Batch, index: int) -> str:
    sequence = int(sequence_of(batch.seq_lens)[index])
    return f"sequence {sequence}, token {index - int(batch.offsets[sequence])}"


def largest(batch: Batch, mini_batch: int, mini_batches: int) -> list[str]:
    """Where the inputs of a mini-batch's loss are the largest."""
    sizes = mini_batch_sizes(batch.num_sequences, mini_batches)
    start = sum(sizes[:mini_batch])
    ends = batch.offsets[start], batch.offsets[start + sizes[mini_batch]]
    span = slice(int(ends[0]), int(ends[1]))
    lines = []
    for name in ("loss_weights", "advantages", "old_logprobs", "returns", "correction_weights"):
        values: Tensor | None = getattr(batch, name)
        if values is None:
            continue
        magnitudes = values[span].abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
        at = int(magnitudes.argmax()) + span.start
        lines.append(f"largest of {name}: {float(values[at]):g}, {token(batch, at)}")
    return lines
