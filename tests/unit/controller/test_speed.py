"""A step against its card's limits: counts of published models, and seconds written out by hand."""

from pathlib import Path

import pytest
import torch

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.speed import Speed, work_of
from rltrain.planning.nodes import LOCAL, Slot
from rltrain.planning.placement import Placement
from rltrain.planning.roofline import Card
from rltrain.tracking.metrics import check_metrics
from rltrain.weights.families import read_architecture

CONF = Path(__file__).parents[3] / "conf/model"
GPUS = tuple(Slot(LOCAL, gpu) for gpu in range(6))
CARD = Card(flops=1e12, bandwidth=1e9)
STEP = {
    "rollout/num_tokens": 9.0,
    "rollout/num_response_tokens": 5.0,
    "time/generate": 4.0,
    "rollout/generate_seconds": 4.0,
    "time/old_logprobs": 2.0,
    "time/update": 3.0,
    "time/step": 10.0,
}
BATCH = Batch(
    tokens=torch.zeros(9, dtype=torch.int64),
    seq_lens=torch.tensor([5, 4]),
    response_mask=torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1]).bool(),
)


def _work(name, **values):
    return work_of(Config.model_validate(values), read_architecture(CONF / name))


def test_qwen3_30b_a3b_counts_what_a_token_passes():
    work = _work("Qwen3-30B-A3B")
    attention = 2048 * (32 + 4 + 4) * 128 + 32 * 128 * 2048
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    dense = 48 * (attention + 2048 * 128) + norms + 151_936 * 2048
    assert work.active_parameters == dense + 48 * 8 * 3 * 2048 * 768
    assert 3.0e9 < work.active_parameters < 3.3e9  # "A3B"; 3.3 with the embedding
    assert work.attention_channels == 48 * 32 * (128 + 128)
    assert work.engine_bytes == 2 * dense
    assert work.engine_expert_bytes == 2 * 48 * 128 * 3 * 2048 * 768
    assert work.kv_bytes == 48 * 2 * 4 * 128 * 2
    # Keys and values of four heads, which eight ranks hold twice.
    assert _work("Qwen3-30B-A3B", rollout={"tensor_parallel": 8}).kv_bytes == 2 * work.kv_bytes


def test_fp8_halves_what_is_quantized_and_no_more():
    plain, fp8 = (
        _work("Qwen3-30B-A3B", rollout={"quantization": kind}, cluster={"device": "cuda"})
        for kind in ("none", "fp8")
    )
    assert fp8.engine_expert_bytes * 2 == plain.engine_expert_bytes
    kept = 2 * (151_936 * 2048 + 48 * (2048 * 128 + 2048) + 2048)  # head and routers, their norms
    assert plain.engine_bytes - fp8.engine_bytes == (plain.engine_bytes - kept) / 2


def test_latent_attention_has_heads_of_two_sizes():
    work = _work("DeepSeek-V3")
    assert work.attention_channels == 61 * 128 * (192 + 128)
    assert work.kv_bytes == 61 * (512 + 64) * 2
    assert 36e9 < work.active_parameters < 38e9  # 37 billion, as published


def test_a_step_is_held_against_the_gpus_of_each_phase():
    work = _work("Qwen3-30B-A3B")
    placement = Placement("cuda", (LOCAL,), GPUS[:4], (), (GPUS[4:5], GPUS[5:]))
    found = Speed(placement, work, CARD).metrics(BATCH, STEP, scored=True, updated=True)
    check_metrics(found)
    forward = 2 * work.active_parameters * 9 + 2 * work.attention_channels * (15 + 10)
    assert found["throughput/mfu_scoring"] == pytest.approx(forward / 4e12 / 2)
    assert found["throughput/mfu_update"] == pytest.approx(3 * forward / 4e12 / 3)
    assert found["throughput/tokens_per_second_per_gpu"] == pytest.approx(0.9 / 6)
    assert found["throughput/trainer_idle_fraction"] == pytest.approx(0.4)
    # Two engines of a GPU each: one response apiece for two steps, and then half of one.
    read = work.engine_bytes + work.engine_expert_bytes * 8 / 128
    keys = work.kv_bytes * ((2 + 2) + (3 + 3) + 4) / 2
    decoding = (3 * read + keys) / 1e9
    assert found["throughput/generate_over_bound"] == pytest.approx(decoding / 4)
    seconds = decoding + 4 * forward / 4e12
    bound = found["throughput/bound_tokens_per_second_per_gpu"]
    assert bound == pytest.approx(9 / seconds / 6)


def test_what_was_not_done_has_no_number():
    placement = Placement("cuda", (LOCAL,), GPUS[:1], (), (GPUS[1:2],))
    speed = Speed(placement, _work("Qwen3-30B-A3B"), CARD)
    found = speed.metrics(BATCH, STEP, scored=False, updated=False)
    assert not {"throughput/mfu_scoring", "throughput/mfu_update"} & found.keys()
    sampled = {**STEP, "rollout/num_tokens": 18.0}  # half of it was left out
    found = speed.metrics(BATCH, sampled, scored=True, updated=True)
    assert "throughput/mfu_update" in found
    assert "throughput/generate_over_bound" not in found


def test_a_cpu_and_a_policy_in_fp32_are_held_against_no_card():
    arch = read_architecture(CONF / "Qwen3-30B-A3B")
    on_cpu = Speed.of(Config(), arch, Placement("cpu"), None)
    found = on_cpu.metrics(BATCH, STEP, scored=True, updated=True)
    assert found.keys() == {
        "throughput/tokens_per_second",
        "throughput/generated_tokens_per_second",
        "throughput/trainer_idle_fraction",
        "memory/host_rss_gib",
    }
    config = Config.model_validate({"policy": {"precision": {"params": "fp32"}}})
    placement = Placement("cuda", (LOCAL,), GPUS[:1], (), (GPUS[:1],))
    assert Speed.of(config, arch, placement, CARD).card is None
    assert Speed.of(Config(), arch, placement, CARD).card is CARD
