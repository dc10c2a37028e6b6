"""Runs whose whole state matters after a resume, as small as they can be.

In six steps the data begin a second epoch, the learning rate has left its warm-up, the coefficient
of the KL has moved and the reference was replaced, with R3, R2 and PPO; DAPO draws more prompts in
a step than it trains on.
"""

from pathlib import Path

from tests.tiny_run import SIZES, WARM_START

STEPS = 6
COMMON = (
    *SIZES,
    *WARM_START,
    "data.size=20",
    "data.eval_size=4",
    "data.reward.function=by_letters.score",
    "algorithm.group_size=2",
    "rollout=deterministic",
    "rollout.max_response_tokens=12",
    "optimizer=cosine",
    "optimizer.lr=1e-3",
    "optimizer.warmup_steps=3",
    "routing_replay.sample_every=1",
    "trainer.prompts_per_step=4",
    "trainer.mini_batches=2",
    "trainer.eval_every=3",
    "checkpoint.every=1",
    f"checkpoint.keep={STEPS}",
    "tracking.backends=[wandb]",
    "tracking.wandb=offline",
    "tracking.rollouts_every=1",
    "tracking.num_samples=8",
)
KL = (
    "algorithm.kl.coef=0.05",
    "algorithm.kl.target=0.001",
    "algorithm.kl.horizon=40",
    "algorithm.kl.refresh_every=2",
)
ALGORITHMS = {
    "grpo_r3": ("grpo_moe_r3", KL),
    "grpo_r2": ("grpo_moe_r2", KL),
    # All responses are as long as they can be, so the filter would leave nothing to learn from.
    "dapo": ("dapo_moe_r3", ("algorithm.overlong.mask=false",)),
    "ppo": ("ppo_moe_r3", (*KL, "critic.warmup_steps=1")),
}
"""Recipe and overrides."""
RANKS = {1: (), 2: ("policy=ep2",)}


def overrides_of(algorithm: str, ranks: int) -> list[str]:
    recipe, options = ALGORITHMS[algorithm]
    return [f"+recipe={recipe}", *COMMON, *options, *RANKS[ranks], f"trainer.steps={STEPS}"]


LAYOUTS = {
    "1 rank": (),
    "pp2": ("policy.parallel.pp=2",),
    "dp2 ep2": ("policy=ep2",),
}


def overrides_of_layout(*layout: str) -> list[str]:
    """Four steps. Gradients below eps are noise that Adam would make as large as all others."""
    recipe, options = ALGORITHMS["grpo_r3"]
    return [
        f"+recipe={recipe}",
        *COMMON,
        *options,
        *layout,
        "optimizer.eps=1e-4",
        "trainer.steps=4",
    ]


def write_reward(folder: Path) -> None:
    """A model of five supervised steps has no right answer. This differs by response."""
    text = (
        "def score(response, answer, **columns):\n    return float(sum(map(ord, response)) % 3)\n"
    )
    (folder / "by_letters.py").write_text(text)
