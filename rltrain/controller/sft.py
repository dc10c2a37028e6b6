"""Supervised fine-tuning: the loop and the policy worker that GRPO trains with."""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rltrain.actors import node_files
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.config.data import DataConfig
from rltrain.config.durable import rename_durably, sync_all
from rltrain.controller import stages, step_metrics
from rltrain.controller.checkpoint_space import check_first_checkpoint, check_free, planned
from rltrain.controller.checkpoint_storage import open_storage
from rltrain.controller.checks.first_step import Check, check_first_supervised_step
from rltrain.controller.checks.precision_bounds import Precision, bound_for, trainer_precision
from rltrain.controller.cluster.disks import Disks
from rltrain.controller.cluster.model_folders import (
    check_imported_weights,
    export_here,
    share_folder,
)
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.controller.cluster.ray_cluster import Cluster, cluster
from rltrain.controller.evaluation import is_due
from rltrain.controller.find_checkpoint import find_checkpoint
from rltrain.controller.nonfinite import InHand
from rltrain.controller.run_data import RunData
from rltrain.controller.run_loop import Loop, Step, is_finished, open_tracker, resume
from rltrain.controller.run_timeline import draw_calls
from rltrain.controller.speed import Speed
from rltrain.data.cache import save_atomically
from rltrain.data.loader import PromptLoader
from rltrain.data.problem import Problem
from rltrain.data.problems import load_problems
from rltrain.data.targets import with_targets
from rltrain.data.tiny_model import build_random_model, warm_started_path
from rltrain.data.tokenizer import tiny_tokenizer
from rltrain.planning.roofline import find_card
from rltrain.tracking.progress import RunProgress
from rltrain.tracking.timers import StepTimer
from rltrain.weights.families import read_architecture

logger = logging.getLogger(__name__)

MODEL = "model"
"""What a supervised run leaves: a Hugging Face folder of this name."""


def run(config: Config, data: RunData, progress: RunProgress) -> None:
    """``algorithm.type=sft``: fit the data's answers and save a Hugging Face folder."""
    if is_finished(config):
        return
    path = Path(config.model.path) if config.model.path else build_random_model(config.model)
    problems = data.problems
    arch = read_architecture(path, config.model.mtp)
    progress.phase("start_ray")
    with cluster(config) as placed:
        storage = open_storage(config, placed)
        found = find_checkpoint(config, storage)
        check_first_checkpoint(config, storage, placed.policy_nodes)
        check_imported_weights(config, storage.disks)
        if config.model.path is None:
            share_folder(storage.disks, path)
        speed = Speed.of(config, arch, placed.placement, find_card(placed.gpu_name))
        progress.phase("load_weights")
        policy = PolicyGroup(config, str(path), placed)
        prompts = PromptLoader(
            problems.train,
            config.trainer.prompts_per_step,
            config.trainer.seed,
            repeat=config.data.repeat_in_step,
        )
        start = resume(config, storage, found, [policy], prompts)
        with open_tracker(config, placed, start.after, progress) as tracker:
            draw_calls(tracker.timeline, [policy])
            SupervisedTrainer(
                config,
                prompts,
                policy,
                None,
                speed,
                HeldOutLoss(config, policy, problems.held_out),
                tracker,
                start,
                precision=trainer_precision(config, placed.device),
                has_experts=bool(arch.moe_layers),
            ).train()
            fp32 = 4 * planned(config, arch).parameters
            export(policy, storage.disks, Path(config.trainer.output_dir) / MODEL, fp32)


def export(policy: PolicyGroup, disks: Disks, folder: Path, nbytes: int) -> None:
    """Write the model beside ``folder`` and swap it in: an older one is whole until then.

    Args:
        nbytes: that it takes, at least

    Raises:
        RuntimeError: a disk is full or cannot be written; nothing is left.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    writers = (policy.nodes[0], disks.driver)
    disks.call_each(node_files.remove, dict.fromkeys(writers, (partial,)))
    check_free(disks, folder.parent, dict.fromkeys(writers, nbytes), f"the model in {folder}")
    try:
        export_here(policy, disks, partial, "float32")
        sync_all(partial)
    except (OSError, RuntimeError):
        disks.call_each(node_files.remove, dict.fromkeys(writers, (partial,)))
        raise
    shutil.rmtree(folder, ignore_errors=True)
    rename_durably(partial, folder)
    logger.info("model: %s", folder)


@dataclass
class SupervisedTrainer(Loop):
    """Maximum likelihood of the answers."""

    precision: Precision
    has_experts: bool

    def take(self, step: int, timer: StepTimer, *, is_first: bool) -> Step:
        batch = supervised_batch(next(self.prompts), self.config)
        self.policy.begin_step(batch)
        self.in_hand = InHand(batch, {})
        scored = self.policy.score(routing="native") if is_first else None
        self.finish_first()
        with timer.phase("update"):
            updates = self.policy.update({}, routing="native")
        counted = self.config.trainer.mini_batches - len(self.policy.unmade)
        metrics = step_metrics.supervised_metrics(updates, counted)
        return Step(batch, metrics, updates, scored)

    def first_checks(self, taken: Step) -> list[Check]:
        assert taken.scored is not None, "the first step scores its batch"
        return check_first_supervised_step(
            taken.batch,
            taken.scored,
            taken.updates,
            self.config.trainer.mini_batches,
            self.policy.native_losses(),
            bound_for(self.precision, same_experts=not self.has_experts),
        )


@dataclass(frozen=True)
class HeldOutLoss:
    """How improbable the policy finds the answers of the held-out problems."""

    config: Config
    policy: PolicyGroup
    held_out: Sequence[Problem]

    def is_due(self, step: int) -> bool:
        return bool(self.held_out) and is_due(self.config.trainer, step)

    def evaluate(self, step: int) -> dict[str, float]:
        """The mean over all their target tokens, whatever ``algorithm.aggregation`` is."""
        batch = supervised_batch(self.held_out, self.config)
        self.policy.begin_step(batch)
        logprobs = self.policy.score(routing="native").logprobs
        return {"eval/loss": -float(logprobs[batch.response_mask].double().mean())}


def supervised_batch(problems: Sequence[Problem], config: Config) -> Batch:
    """Prompts and their answers, the answer's tokens and its end-of-sequence in the loss."""
    lens = [(len(p.prompt_tokens), len(p.target_tokens)) for p in problems]
    mask = torch.tensor([flag for n, m in lens for flag in [False] * n + [True] * m])
    batch = Batch(
        tokens=torch.tensor([t for p in problems for t in (*p.prompt_tokens, *p.target_tokens)]),
        seq_lens=torch.tensor([n + m for n, m in lens]),
        response_mask=mask,
        loss_mask=mask,
    )
    return stages.with_loss_weights(batch, config)


def warm_started_model(config: Config, placed: Cluster, disks: Disks) -> Path:
    """The tiny model after its supervised steps, from the cache if it is there; on every node.

    The steps run on one rank whatever the run's layout is, so that every layout starts alike.
    """
    cached = warm_started_path(config.model)
    path = cached / MODEL
    if path.exists():
        return share_folder(disks, path)
    random_path = share_folder(disks, build_random_model(config.model))
    warm = config.model.tiny.warm_start
    if warm.steps == 0:
        return random_path
    tokenizer = tiny_tokenizer()
    fitting = warm_start_config(config)
    problems = load_problems(DataConfig(), tokenizer, warm.num_problems).warm_start
    problems = with_targets(problems, tokenizer, fitting.data, fitting.rollout.max_response_tokens)
    logger.info("warm start: %d supervised steps on %d problems", warm.steps, len(problems))
    policy = PolicyGroup(fitting, str(random_path), placed)
    try:
        fit(fitting, policy, problems)
        save_atomically(
            cached, lambda folder: export_here(policy, disks, folder / path.name, "float32")
        )
    finally:
        policy.shutdown()
    return share_folder(disks, path)


def fit(config: Config, policy: PolicyGroup, problems: Sequence[Problem]) -> None:
    """The steps of a supervised run, and nothing around them."""
    prompts = PromptLoader(problems, config.trainer.prompts_per_step, config.trainer.seed)
    for step in range(1, config.trainer.steps + 1):
        policy.begin_step(supervised_batch(next(prompts), config))
        updates = policy.update({}, routing="native")
        if step % 50 == 0 or step == config.trainer.steps:
            loss = step_metrics.supervised_metrics(updates, 1)["sft/loss"]
            logger.info("warm start %d/%d: loss %.3f", step, config.trainer.steps, loss)


def warm_start_config(config: Config) -> Config:
    """The supervised run that precedes a GRPO run on the tiny model.

    It takes from the run what decides how its workers compute, and where.
    """
    warm = config.model.tiny.warm_start
    return Config.model_validate(
        {
            "model": config.model.model_dump(exclude={"tiny": {"warm_start"}}),
            "policy": config.policy.model_dump(exclude={"parallel"}),
            "cluster": config.cluster.model_dump(exclude={"placement"}),
            "algorithm": {"type": "sft"},
            "optimizer": {
                "lr": warm.lr,
                "router_lr": warm.router_lr,
                "schedule": "linear",
                "warmup_steps": 20,
            },
            "trainer": {
                "steps": warm.steps,
                "prompts_per_step": warm.batch_size,
                "seed": config.model.tiny.seed,
            },
            # As short as its sequences are, so that any micro-batch of the run holds one.
            "data": {"max_prompt_tokens": 8},
            "rollout": {"max_response_tokens": 4},
        }
    )
