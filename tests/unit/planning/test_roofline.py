"""The roofline of a card, against sums written out token by token."""

import numpy as np
import pytest

from rltrain.planning.roofline import (
    CARDS,
    Card,
    Work,
    decoding_seconds,
    describe_bottleneck,
    find_card,
    forward_flops,
    update_flops,
)

WORK = Work(
    active_parameters=1000,
    attention_channels=64,
    engine_bytes=5_000,
    engine_expert_bytes=80_000,
    kv_bytes=10,
    num_experts=16,
    experts_per_token=2,
    window=3,
    window_channels=32,
)


def test_a_forward_pass_counts_parameters_and_causal_pairs():
    expected = 0
    for n in (5, 2):
        query, key = np.mgrid[:n, :n]
        expected += 2 * 1000 * n
        expected += 2 * 64 * (key <= query).sum()
        expected += 2 * 32 * ((key <= query) & (query - key < 3)).sum()
    assert forward_flops(WORK, [5, 2]) == expected
    assert update_flops(WORK, [5, 2]) == 3 * expected


def _step_by_step(card, prompts, responses, engines, gpus):
    """Each engine's share of every decoding step, the longest response's last."""
    seconds = 0.0
    for step in range(max(responses)):
        live = [p + step for p, r in zip(prompts, responses, strict=True) if r > step]
        tokens, context = len(live) / engines, sum(live) / engines
        touched = 80_000 * (1 - (1 - 2 / 16) ** max(1.0, tokens))
        nbytes = 5_000 + touched + 10 * context
        flops = 2 * 1000 * tokens + 2 * 64 * context
        seconds += max(nbytes / card.bandwidth, flops / card.flops) / (gpus / engines)
    return seconds


@pytest.mark.parametrize("card", [Card(1e9, 1e6), Card(1e4, 1e9)])
@pytest.mark.parametrize(("engines", "gpus"), [(1, 1), (2, 4)])
def test_decoding_reads_weights_and_keys_in_every_step(card, engines, gpus):
    prompts, responses = [4, 9, 2, 7], [3, 8, 8, 1]
    expected = _step_by_step(card, prompts, responses, engines, gpus)
    found = decoding_seconds(WORK, card, prompts, responses, engines=engines, gpus=gpus)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_dense_model_reads_all_its_weights():
    dense = Work(10, 0, engine_bytes=6_000, engine_expert_bytes=0, kv_bytes=0)
    assert decoding_seconds(dense, Card(1e12, 1e3), [1], [5], engines=1, gpus=1) == 30


def test_a_card_is_found_by_its_longest_name():
    assert find_card("NVIDIA H200") is CARDS["NVIDIA H200"]
    assert find_card("NVIDIA H200 NVL") is CARDS["NVIDIA H200 NVL"]
    assert find_card("NVIDIA H100 80GB HBM3 MIG 3g.40gb") is CARDS["NVIDIA H100 80GB HBM3"]
    assert find_card("NVIDIA H2000") is None


ROWS = [
    {"step": 0, "eval/accuracy": 0.1},
    {"step": 1, "time/generate": 90.0, "time/other": 10.0, "time/step": 100.0},
    *(
        {
            "step": step,
            "time/generate": 6.0,
            "time/update": 3.0,
            "time/old_logprobs": 0.9,
            "time/other": 0.1,
            "time/step": 10.0,
            "throughput/tokens_per_second": 8000.0,
            "throughput/tokens_per_second_per_gpu": 1000.0 + step,
        }
        for step in (2, 3, 4)
    ),
]
BOUNDS = {
    "throughput/bound_tokens_per_second_per_gpu": 4000.0,
    "throughput/generate_over_bound": 0.41,
    "throughput/mfu_update": 0.3,
}


def test_the_hint_leaves_the_first_step_out_and_names_the_longest_phases():
    rows = [*ROWS[:2], *({**row, **BOUNDS} for row in ROWS[2:])]
    assert describe_bottleneck(rows, "NVIDIA H200") == (
        "Where a step goes: generate 60%, update 30%, old logprobs 9%. 1,003 tokens/s per GPU. At "
        "its limits NVIDIA H200 would give 4,000: generation at 41% of its memory's bound, update "
        "at 30% of its peak (MFU)."
    )
    tiny = [{**row, "throughput/mfu_update": 0.0004} for row in rows]
    assert "update under 1% of its peak (MFU)." in describe_bottleneck(tiny, "NVIDIA H200")


def test_the_hint_says_when_it_has_no_number():
    assert "8,000 tokens/s. No GPU was sampled" in describe_bottleneck(ROWS, None)
    assert describe_bottleneck(ROWS, "NVIDIA GT 710").endswith(
        "1,003 tokens/s per GPU. No limits of NVIDIA GT 710 are known "
        "(rltrain/planning/roofline.py)."
    )
    assert describe_bottleneck(ROWS[:1], None) == describe_bottleneck([], None) == ""
    assert describe_bottleneck(ROWS[:2], None).startswith(
        "Where a step goes: generate 90%, other 10%."
    )
