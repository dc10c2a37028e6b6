"""Supervised fine-tuning through the policy worker that GRPO trains with."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from rltrain.algorithms.reduce import loss_weights
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.config.data import DataConfig
from rltrain.controller.cluster import Cluster, cluster
from rltrain.controller.policy_group import PolicyGroup
from rltrain.data.loader import PromptLoader
from rltrain.data.problem import Problem
from rltrain.data.problems import load_problems
from rltrain.data.prompts import Tokenizer, encode_response
from rltrain.data.tiny_model import build_random_model, save_atomically, warm_started_path
from rltrain.tracking.environment import describe_environment
from rltrain.tracking.timers import StepTimer
from rltrain.tracking.tracker import Tracker

logger = logging.getLogger(__name__)


def run(config: Config) -> None:
    """``algorithm.type=sft``: fit the data's answers and save a Hugging Face folder."""
    run_dir = Path(config.trainer.output_dir)
    path = Path(config.model.path) if config.model.path else build_random_model(config.model)
    tokenizer = AutoTokenizer.from_pretrained(
        path, trust_remote_code=config.model.trust_remote_code
    )
    problems = load_problems(config.data, tokenizer).train
    with cluster(config) as placed:
        versions = describe_environment()
        with Tracker(
            run_dir,
            config.tracking,
            config.model_dump(mode="json"),
            versions,
            num_steps=config.trainer.steps,
            gpus=placed.gpu_ids,
        ) as tracker:
            policy = PolicyGroup(config, str(path), placed)
            fit(config, policy, problems, tokenizer, tracker)
            policy.call("export", str(run_dir / "model"), "float32")
    logger.info("model: %s", run_dir / "model")


def fit(
    config: Config,
    policy: PolicyGroup,
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    tracker: Tracker | None = None,
) -> None:
    """One optimizer update a step on ``prompts_per_step`` problems and their answers."""
    loader = PromptLoader(problems, config.trainer.prompts_per_step, config.trainer.seed)
    for step in range(1, config.trainer.steps + 1):
        timer = StepTimer()
        batch = supervised_batch(next(loader), tokenizer, config)
        with timer.phase("update"):
            policy.begin_step(batch)
            update = policy.update({}, routing="native")[0]
        if tracker is not None:
            tracker.log(
                step,
                {
                    "sft/loss": update.totals["loss"],
                    "policy/grad_norm": update.grad_norm,
                    "policy/lr": update.lr,
                    **timer.metrics(),
                },
            )
        elif step % 50 == 0 or step == config.trainer.steps:
            logger.info(
                "warm start %d/%d: loss %.3f", step, config.trainer.steps, update.totals["loss"]
            )


def supervised_batch(problems: Sequence[Problem], tokenizer: Tokenizer, config: Config) -> Batch:
    """Prompts and their answers, the answer's tokens and its end-of-sequence in the loss."""
    responses = [encode_response(str(p.answer), tokenizer) for p in problems]
    pairs = list(zip(problems, responses, strict=True))
    mask = [[False] * len(p.prompt_tokens) + [True] * len(r) for p, r in pairs]
    seq_lens = torch.tensor([len(m) for m in mask])
    response_mask = torch.tensor([flag for flags in mask for flag in flags])
    return Batch(
        tokens=torch.tensor([t for p, r in pairs for t in (*p.prompt_tokens, *r)]),
        seq_lens=seq_lens,
        response_mask=response_mask,
        loss_mask=response_mask,
        loss_weights=loss_weights(
            response_mask,
            seq_lens,
            config.algorithm.aggregation,
            config.rollout.max_response_tokens,
        ),
    )


def warm_started_model(config: Config, placed: Cluster) -> Path:
    """The tiny model after its supervised steps, from the cache if it is there.

    The steps run on one rank whatever the run's layout is, so that every layout starts alike.
    """
    cached = warm_started_path(config.model)
    path = cached / "model"
    if path.exists():
        return path
    random_path = build_random_model(config.model)
    tokenizer = AutoTokenizer.from_pretrained(random_path)
    warm = config.model.tiny.warm_start
    problems = load_problems(DataConfig(), tokenizer, warm.num_problems).warm_start
    fitting = warm_start_config(config)
    logger.info("warm start: %d supervised steps on %d problems", warm.steps, len(problems))
    policy = PolicyGroup(fitting, str(random_path), placed)
    try:
        fit(fitting, policy, problems, tokenizer)
        save_atomically(
            cached, lambda folder: policy.call("export", str(folder / path.name), "float32")
        )
    finally:
        policy.shutdown()
    return path


def warm_start_config(config: Config) -> Config:
    """The supervised run that precedes a GRPO run on the tiny model."""
    warm = config.model.tiny.warm_start
    values = config.model_dump()
    values["algorithm"] = {"type": "sft"}
    values["routing_replay"] = {"mode": "off"}
    values["optimizer"] = {
        "lr": warm.lr,
        "router_lr": warm.router_lr,
        "schedule": "linear",
        "warmup_steps": 20,
    }
    values["policy"]["parallel"] = {}
    values["trainer"] |= {
        "steps": warm.steps,
        "prompts_per_step": warm.batch_size,
        "mini_batches": 1,
    }
    values["trainer"]["seed"] = config.model.tiny.seed
    return Config.model_validate(values)
