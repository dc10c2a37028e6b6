"""What an engine is started with."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rltrain.config.rollout import RolloutConfig
from rltrain.rollout.launch import (
    EngineSpec,
    RouteCapture,
    check_version,
    engine_args,
    environment,
    scheduler_args,
    stop_token_ids,
)
from rltrain.routing.integrity import RouteShape

KNOWN = [
    "hf_overrides",
    "max_num_seqs",
    "enable_return_routed_experts",
    "enable_chunked_prefill",
    "distributed_executor_backend",
]
SHAPE = RouteShape(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, experts_per_token=2)
SPEC = EngineSpec("model", RolloutConfig(max_response_tokens=16), 64, 0, "cpu", None)


def with_rollout(device: Any = "cpu", **fields: Any) -> EngineSpec:
    return replace(SPEC, device=device, rollout=RolloutConfig(**fields))


def chosen_args(spec: EngineSpec, known: Collection[str] = KNOWN) -> dict[str, Any]:
    return engine_args(spec, known, has_fp32_head=True)


def test_the_engine_has_room_for_the_longest_sequence() -> None:
    assert chosen_args(SPEC)["max_model_len"] == 80


def test_an_unknown_engine_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean max_num_seqs"):
        chosen_args(with_rollout(engine_args={"max_num_seq": 4}))


def test_engine_options_are_passed_on() -> None:
    args = chosen_args(with_rollout(engine_args={"max_num_seqs": 4}))
    assert args["max_num_seqs"] == 4


@pytest.mark.parametrize(
    ("device", "asked", "seeded"),
    [
        ("cpu", {}, True),
        ("cuda", {}, False),
        ("cuda", {"deterministic": True}, True),
        ("cuda", {"seeded": True}, True),
        ("cpu", {"seeded": False}, False),
    ],
)
def test_requests_have_seeds_where_they_cost_little_or_decide(
    device: str, asked: dict[str, Any], seeded: bool
) -> None:
    assert with_rollout(device, **asked).seeded == seeded


def test_graphs_are_the_rule_on_gpus() -> None:
    for device, asked, eager in (
        ("cpu", {}, True),
        ("cuda", {}, False),
        ("cuda", {"enforce_eager": True}, True),
    ):
        assert chosen_args(with_rollout(device, **asked))["enforce_eager"] == eager


def test_an_engine_sleeps_or_shares_experts_out_only_if_asked_to() -> None:
    plain = chosen_args(with_rollout("cuda", tensor_parallel=2))
    asked = with_rollout("cuda", tensor_parallel=2, expert_parallel=True)
    added = {"enable_sleep_mode": True, "enable_expert_parallel": True}
    assert chosen_args(replace(asked, sleeps=True)) == plain | added


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("stored", "held", "read_by_vllm"),
    [(None, None, True), (FP8, FP8, True), (None, FP8, False), (FP8, None, False)],
)
def test_vllm_reads_the_weights_itself_only_where_they_are_stored_as_it_holds_them(
    stored: Any, held: Any, read_by_vllm: bool, tmp_path: Path
) -> None:
    config = {} if stored is None else {"quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = chosen_args(replace(SPEC, model_path=str(tmp_path), quantization=held))
    if read_by_vllm:
        assert "load_format" not in args and "quantization_config" not in args["hf_overrides"]
    else:
        assert args["load_format"] == "rltrain"
        assert args["hf_overrides"]["quantization_config"] == held


def test_the_head_multiplies_in_fp32_where_the_engine_can() -> None:
    asked = with_rollout(head="fp32")
    assert chosen_args(asked)["hf_overrides"] == {"head_dtype": "float32"}
    assert chosen_args(SPEC)["hf_overrides"] == {"head_dtype": "float32"}
    assert chosen_args(with_rollout(head="params"))["hf_overrides"] == {}
    assert engine_args(SPEC, KNOWN, has_fp32_head=False)["hf_overrides"] == {}
    with pytest.raises(ValueError, match=r"set rollout\.head=auto"):
        engine_args(asked, KNOWN, has_fp32_head=False)


def test_capture_needs_an_engine_that_has_it() -> None:
    capturing = replace(SPEC, capture=RouteCapture(SHAPE, {}))
    assert chosen_args(capturing)["enable_return_routed_experts"]
    assert "enable_return_routed_experts" not in chosen_args(SPEC)
    with pytest.raises(ValueError, match=r"vllm>=0\.26"):
        chosen_args(capturing, ["max_num_seqs"])


def test_old_vllm_is_refused() -> None:
    check_version("0.26.0")
    check_version("0.100.1.dev3+cpu")
    check_version("1.0.0")
    with pytest.raises(ValueError, match=r"expected vllm>=0\.26, found 0\.25\.1"):
        check_version("0.25.1")


def test_capture_of_a_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer with a router"):
        RouteCapture(replace(SHAPE, moe_layers=()), {})


@pytest.mark.parametrize("block_sizes", [(2,), (2, 2), (0, 3), (4, -1)])
def test_blocks_must_hold_the_layers(block_sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sum to the 3 layers"):
        RouteCapture(SHAPE, {}, block_sizes)


def test_blocks_may_be_of_unequal_sizes() -> None:
    assert RouteCapture(SHAPE, {}, (1, 2)).blocks == (1, 2)
    assert RouteCapture(SHAPE, {}).blocks == (3,)


def test_prompts_are_never_cut_on_cpu() -> None:
    assert chosen_args(SPEC)["enable_chunked_prefill"] is False
    assert "enable_chunked_prefill" not in chosen_args(replace(SPEC, device="cuda"))
    with pytest.raises(ValueError, match="enable_chunked_prefill=true"):
        chosen_args(with_rollout(engine_args={"enable_chunked_prefill": True}))


def test_environment_is_for_the_device() -> None:
    cpu = environment(with_rollout(kv_cache_gib=3))
    assert cpu["VLLM_CPU_KVCACHE_SPACE"] == "3"
    cuda = environment(replace(SPEC, device="cuda"))
    assert not any("CPU" in name for name in cuda)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in cuda  # capture needs the V2 runner from 0.32 on


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "generation_config.json": {"eos_token_id": [7, 5]},
                "config.json": {"eos_token_id": 1},
            },
            [5, 7],
        ),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 0}}, [0]),
        ({"config.json": {"eos_token_id": None}}, []),
    ],
)
def test_stop_tokens_come_from_the_folder(
    tmp_path: Path, files: dict[str, Any], expected: list[int]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert stop_token_ids(str(tmp_path)) == expected


def test_a_stop_token_is_in_the_vocabulary(tmp_path: Path) -> None:
    for ids in ([3, 8], [-1, 3], -1):
        config = {"eos_token_id": ids, "vocab_size": 8}
        (tmp_path / "config.json").write_text(json.dumps(config))
        said = rf"config\.json: eos_token_id={re.escape(str(ids))}: .*vocab_size=8"
        with pytest.raises(ValueError, match=said):
            stop_token_ids(str(tmp_path))


@pytest.mark.parametrize(
    ("version", "sends_once"),
    [("0.26.0", True), ("0.30.0+cpu", True), ("0.25.1", False), ("0.31.0", False)],
)
def test_routes_are_sent_once_by_the_versions_that_this_was_read_against(
    version: str, sends_once: bool
) -> None:
    capturing = replace(SPEC, capture=RouteCapture(SHAPE, {}))
    assert ("scheduler_cls" in scheduler_args(capturing, version)) is sends_once
    assert scheduler_args(SPEC, version) == {}


def test_stop_strings_need_a_scheduler_that_this_was_read_against() -> None:
    stopping = with_rollout(stop=["a"])
    assert "scheduler_cls" in scheduler_args(stopping, "0.30.0+cpu")  # without capture, too
    with pytest.raises(ValueError, match=r"rollout\.stop=\['a'\]: stop strings need vllm>=0\.26"):
        scheduler_args(stopping, "0.31.0")


def test_updates_in_flight_need_a_scheduler_that_this_was_read_against() -> None:
    updated = with_rollout(update_in_flight=True)
    assert "scheduler_cls" in scheduler_args(updated, "0.26.0")
    with pytest.raises(ValueError, match=r"update_in_flight=true needs vllm>=0\.26.*found 0\.31"):
        scheduler_args(updated, "0.31.0")


def test_more_stop_tokens_are_in_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3, "vocab_size": 8}))
    assert stop_token_ids(str(tmp_path), [5, 1, 3]) == [1, 3, 5]
    with pytest.raises(ValueError, match=r"rollout\.stop_token_ids=\[8\]: .*vocab_size=8"):
        stop_token_ids(str(tmp_path), [8])
