"""Two GRPO steps with R3 on a folder of every family with experts, as a user starts them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rltrain.data.tokenizer import VOCAB_SIZE, tiny_tokenizer
from tests.distributed.tiny_families import BF16_ALONE, WITH_EXPERTS, make

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1200),
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]
# A random model says nothing right, so what is rewarded is what it says anyway, now and then.
REWARD = "def score(response, answer, **columns):\n    return len(set(response)) % 3 / 2\n"


def folder_of(name: str, folder: Path) -> Path:
    model = make(name, scale=0.5)
    model.resize_token_embeddings(VOCAB_SIZE)
    tokenizer = tiny_tokenizer()
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_two_steps_with_r3(
    name: str, start: Any, tmp_path: Path, measured: dict[str, dict[str, Any]]
) -> None:
    """In fp32 on both sides, where vLLM can: weights that a sync got wrong would show."""
    dtype, most = ("bfloat16", 1e-3) if name in BF16_ALONE else ("float32", 1e-9)
    (tmp_path / "family_reward.py").write_text(REWARD)
    run = start(
        "run",
        f"model.path={folder_of(name, tmp_path / 'model')}",
        "data.reward.function=family_reward.score",
        "trainer.steps=2",
        "routing_replay.sample_every=1",
        "optimizer.lr=1e-3",
        "optimizer.warmup_steps=0",
        f"rollout.dtype={dtype}",
        "rollout.max_response_tokens=8",
        "data.max_prompt_tokens=48",
        "checkpoint.every=2",
    ).wait()
    for step in (1, 2):
        row = run.metrics[step]
        assert row["routing/coverage"] == 1.0
        assert row["policy/grad_norm"] > 0
        assert row["mismatch/k3"] < most
        assert row["routing/overlap"] > (0.9 if name in BF16_ALONE else 0.999)
    measured[name]["grpo k3"] = max(run.metrics[step]["mismatch/k3"] for step in (1, 2))
