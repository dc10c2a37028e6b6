"""Made-up runs with the shape of real ones, logged through the real tracker."""

import math
import random
from typing import Any

import pytest

from rltrain.config.errors import validate
from rltrain.config.saved_config import save_config
from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.tracker import Tracker

NUM_STEPS = 60


def step_metrics(step: int, noise: random.Random) -> dict[str, float]:
    learned = 1 - math.exp(-step / 18)
    sampled = step % 10 == 0 or step == NUM_STEPS
    metrics = {
        "reward/mean": 0.38 + 0.5 * learned + noise.gauss(0, 0.02),
        "group/zero_std_fraction": 0.1 + 0.5 * learned,
        "routing/coverage": 1.0,
        "mismatch/k3": 3e-5 * math.exp(noise.gauss(0, 0.25)),
        "mismatch/num_tokens": 3100.0,
        "policy/loss": noise.gauss(0, 0.01),
        "policy/entropy": 0.9 - 0.6 * learned,
        "policy/grad_norm": math.nan if step == 3 else 0.4,
        "time/generate": 2.1 + noise.random() * 0.4,
        "time/reward": 0.1,
        "time/old_logprobs": 0.6,
        "time/update": 1.9 + noise.random() * 0.2,
        "time/weight_sync": 0.35,
        "time/other": 0.08,
        "throughput/tokens_per_second": 1200.0,
    }
    if sampled:
        metrics |= {
            "eval/accuracy": 0.41 + 0.45 * learned,
            "mismatch_native/k3": 4e-4 * math.exp(noise.gauss(0, 0.25)),
            "mismatch_native/num_tokens": 3100.0,
            "mismatch/num_flipped": 410.0,
            "mismatch_native/num_flipped": 410.0,
            "mismatch/abs_diff_median_flipped": 3.1e-3 * math.exp(noise.gauss(0, 0.1)),
            "mismatch_native/abs_diff_median_flipped": 1.4e-2 * math.exp(noise.gauss(0, 0.1)),
            "time/native_logprobs": 0.6,
            "time/eval": 1.8,
            "routing/overlap": 0.975,
            **{f"routing/overlap/layer_{i}": 0.995 - 0.012 * i for i in range(1, 5)},
        }
    phases = sum(value for name, value in metrics.items() if name.startswith("time/"))
    return {**metrics, "time/step": phases}


def sample_rows(step: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"<user>What is {a} + {b}?",
            "response": f"<think>{a} and {b}\n{a} + {b} = {a + b}</think> {a + b + (a + step) % 3}",
            "answer": str(a + b),
            "reward": float((a + step) % 3 == 0),
            "finish_reason": "length" if a == 5 else "stop",
        }
        for a, b in zip(range(3, 9), range(17, 11, -1), strict=True)
    ]


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    """A finished run of 60 steps."""
    folder = tmp_path_factory.mktemp("run")
    noise = random.Random(0)
    values = {
        "routing_replay": {"mode": "r3"},
        "trainer": {"output_dir": str(folder), "steps": NUM_STEPS},
    }
    config = validate(values)
    save_config(config, "python -m rltrain.main", ["+recipe=grpo_moe_r3"])
    versions = {"torch": "2.13.0", "vllm": "0.30.0", "machine": "2 cores, 24 GiB, no GPU"}
    tracking = TrackingConfig(backends=[])
    with Tracker(
        folder, tracking, config.model_dump(mode="json"), versions, num_steps=NUM_STEPS
    ) as tracker:
        for step in range(NUM_STEPS + 1):
            tracker.log(step, step_metrics(step, noise))
            if step % 10 == 0 or step == NUM_STEPS:
                tracker.samples(step, sample_rows(step))
    return folder


LAYERS = {"routing/overlap": 0.95} | {f"routing/overlap/layer_{i}": 0.9 for i in (1, 2)}
SECRET = "hf_do_not_show"
KNOWN = "known-by-its-value"
"""Of a variable of the environment."""
ANSWER = "2 | `**`\n```<b>"
"""Text that would break a table, a block of code or a page."""
SAMPLE = {
    "prompt": f"1+1 {KNOWN}",
    "response": ANSWER,
    "answer": "2",
    "reward": 1,
    "finish_reason": "stop",
}
ROLLOUT = SAMPLE | {"answer": {"value": 2}, "reward_parts": {"brief": -0.5}, "advantage": 0.25}
ROLLOUT |= {"group": 0, "sample": 0, "tokens": ["2"], "rollout_logprobs": [-0.5], "loss_mask": [1]}


@pytest.fixture(scope="session")
def copied_run(tmp_path_factory):
    """A run of two steps that fails and its resumption from step 1, in all three trackers."""
    folder = tmp_path_factory.mktemp("copied")
    config = {"trainer": {"seed": 7, "steps": 4}, "hub": {"hf_token": SECRET}, "empty": {}}
    config |= {"notes": [{"of": f"it is {KNOWN}"}], "headers": {"authorization": [SECRET]}}
    backends = ["wandb", "tensorboard", "mlflow"]
    tracking = TrackingConfig(backends=backends, wandb="offline", project="p", name="two-steps")
    versions = {"commit": KNOWN}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("A_SERVICE_KEY", KNOWN)
        patch.setattr("sys.argv", ["rltrain", "train", f"+a={{api_key: {SECRET}}}", KNOWN])
        for first_step, error in ((0, RuntimeError(f"cut off: {KNOWN}")), (1, None)):
            tracker = Tracker(
                folder, tracking, config, versions, num_steps=4, first_step=first_step
            )
            for step in (first_step, first_step + 1):
                tracker.rollouts(step, [ROLLOUT])
                metrics = {"reward/mean": 0.25 * step + first_step, "mismatch/k3": 1e-5, **LAYERS}
                metrics |= {"policy/grad_norm": math.nan, "routing/coverage": 0.5}
                tracker.log(step, metrics)
            tracker.samples(first_step, [SAMPLE, SAMPLE])
            tracker.finish(error)
    return folder
