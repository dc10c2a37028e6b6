"""The run of issue 19: R3 with policy pp=2 x ep=2 and two engines, over three hosts or on one."""

from tests.hosts.stage import Stage
from tests.integration.conftest import OF_RL, SMALL

LAYOUT = (
    "policy.parallel.pp=2",
    "policy.parallel.dp=2",
    "policy.parallel.ep=2",
    "rollout.num_engines=2",
)
"""Four ranks, two of each stage, and two engines: half of that on each of two hosts."""
SAME = ("rollout=deterministic", "policy.threads=1", "routing_replay.trace=true")


def arguments(stage: Stage, *overrides: str, across: bool = True) -> list[str]:
    """Of ``python -m rltrain.main``.

    Args:
        across: over all hosts; else on the host of the command alone
    """
    where = [f"cluster.address={stage.address}"] if across else []
    models = f"model.cache_dir={stage.shared / 'models'}"
    chosen = (*SMALL, *OF_RL, *LAYOUT, *SAME, models, "trainer.eval_every=0", *where)
    return ["+recipe=grpo_moe_r3", *chosen, *overrides]
