"""What the installed vLLM cannot run of a model is refused before an engine starts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rltrain.cli.app import main as rltrain
from rltrain.config import Config
from rltrain.controller.checks.engine_shapes import (
    check_cpu_heads,
    check_engine_shapes,
    check_expert_parallel,
    check_tensor_parallel,
)
from rltrain.controller.checks.model_checks import read_model
from rltrain.main import main
from rltrain.weights.families import read_architecture

CONF = Path(__file__).parents[3] / "conf" / "model"
MOE = read_model(Config())
LATENT = read_architecture(CONF / "Moonlight-16B-A3B")


def with_rollout(**rollout: Any) -> Config:
    return Config.model_validate({"rollout": rollout})


@pytest.mark.parametrize("size", [8, 16, 24, 40, 72, 144, 320, 576])
def test_a_head_size_that_cpu_attention_lacks(size: int) -> None:
    model = replace(MOE, head_dim=size)
    answer = rf"head_dim={size}: expected one of 32, 48, 64, .*, 512, .*roll out on a GPU"
    with pytest.raises(ValueError, match=answer):
        check_engine_shapes(Config(), model, "cpu")
    check_engine_shapes(Config(), model, "cuda")


@pytest.mark.parametrize("size", [32, 48, 64, 128, 256, 512])
def test_a_head_size_that_cpu_attention_has(size: int) -> None:
    check_engine_shapes(Config(), replace(MOE, head_dim=size), "cpu")


def test_latent_attention_has_one_size_on_cpus() -> None:
    check_cpu_heads(LATENT, "folder")
    assert LATENT.mla is not None
    for rank, rope in ((16, 8), (512, 32), (544, 32)):
        small = replace(LATENT.mla, kv_lora_rank=rank, qk_rope_head_dim=rope)
        answer = rf"kv_lora_rank={rank}, qk_rope_head_dim={rope}: expected 512 and 64"
        with pytest.raises(ValueError, match=answer):
            check_cpu_heads(replace(LATENT, mla=small, head_dim=small.qk_head_dim), "folder")


def test_blocks_on_a_cpu() -> None:
    odd = with_rollout(engine_args={"block_size": 16})
    with pytest.raises(ValueError, match=r"block_size=16: expected a multiple of 32"):
        check_engine_shapes(odd, MOE, "cpu")
    check_engine_shapes(odd, MOE, "cuda")
    check_engine_shapes(with_rollout(engine_args={"block_size": 64}), MOE, "cpu")


@pytest.mark.parametrize(
    ("ranks", "sizes", "answer"),
    [
        (3, {}, "a divisor of the 4 attention heads"),
        (2, {"num_heads": 6, "num_kv_heads": 3}, "a divisor of the 3 key-value heads"),
        (6, {"num_heads": 12, "num_kv_heads": 4}, "a divisor or a multiple of the 4 key-value"),
        (4, {"expert_size": 42}, "the 42 rows of an expert"),
        (4, {"moe_layers": (1, 2, 3), "ffn_size": 42}, "the 42 rows of a dense layer"),
        (4, {"shared_expert_size": 42}, "the 42 rows of the shared expert"),
    ],
)
def test_the_engine_s_ranks_divide_the_model(
    ranks: int, sizes: dict[str, Any], answer: str
) -> None:
    rollout = with_rollout(tensor_parallel=ranks).rollout
    with pytest.raises(ValueError, match=rf"rollout.tensor_parallel={ranks}: expected .*{answer}"):
        check_tensor_parallel(rollout, replace(MOE, **sizes))


def test_more_ranks_than_key_value_heads_hold_copies() -> None:
    check_tensor_parallel(with_rollout(tensor_parallel=4).rollout, MOE)
    check_tensor_parallel(with_rollout(tensor_parallel=8).rollout, LATENT)


def test_whole_experts_are_shared_out_on_gpus() -> None:
    config = with_rollout(tensor_parallel=2, expert_parallel=True)
    check_expert_parallel(config, MOE, "cuda")
    check_tensor_parallel(config.rollout, replace(MOE, expert_size=43))  # none is cut
    with pytest.raises(ValueError, match=r"expert_parallel=true: expected a GPU, found"):
        check_expert_parallel(config, MOE, "cpu")
    for found in (0, 33):
        with pytest.raises(ValueError, match=rf"divisor of the model's experts, found {found} exp"):
            check_expert_parallel(config, replace(MOE, num_experts=found), "cuda")


def test_run_and_plan_refuse_a_head_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((CONF / "Qwen3-30B-A3B" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    asked = ["+recipe=grpo_moe_r3", "cluster.device=cpu", f"trainer.output_dir={tmp_path}/run"]
    for model, where in (
        ("model.tiny.head_dim=16", "model.tiny.head_dim=16"),
        (f"model.path={tmp_path}", f"{tmp_path}/config.json: head_dim=16"),
    ):
        assert main([*asked, model]) == 2
        assert f"{where}: expected one of 32, " in capsys.readouterr().err
        assert rltrain(["plan", *asked, model]) == 2
        assert f"{where}: expected one of 32, " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
