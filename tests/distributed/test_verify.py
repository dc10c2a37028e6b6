"""A short part of `rltrain verify`, and its table reports a failure."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rltrain.config.policy import ParallelConfig
from rltrain.verification.layout_case import FULL, LAYOUTS, MOE, LayoutCase, whole_product
from rltrain.verification.layout_row import Row
from rltrain.verification.verify_command import (
    Result,
    judge_row,
    result_line,
    run_layouts,
    table_head,
    verify_layouts,
)

SHORT = [
    LayoutCase(ParallelConfig(dp=2, cp=2, ep=4), seq_lens=(17,), options=FULL),
    LayoutCase(ParallelConfig(pp=2, vpp=2), "deepseek mtp", options=FULL),
    LayoutCase(ParallelConfig(tp=2, cp=2, pp=2), options=MOE),
    LayoutCase(ParallelConfig(tp=2, cp=2, ep=2), "gpt-oss", options=MOE),
    LayoutCase(ParallelConfig(tp=2, etp=2, ep=2, dp=2, pp=2), "deepseek mla", options=FULL),
]
ROW = Row(
    native={"logits": 1e-7, "loss": 1e-7, "gradient": 1e-6},
    recorded={"logits": 1e-7, "loss": 1e-7, "gradient": 1e-6},
    perturbed={"logits": 1e-7, "loss": 1e-7, "gradient": 1e-6},
    worst_gradient="lm_head.weight",
    wrong_records=0,
    num_forwards=12,
    num_reruns=12,
    seconds=1.0,
)


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_short_table_passes(tmp_path: Path) -> None:
    results: list[Result] = []
    run_layouts(SHORT, tmp_path, "cpu", results.append)
    assert [result.problem for result in results] == [""] * len(SHORT)
    assert {result.case.name for result in results} == {case.name for case in SHORT}
    assert all(result.row and result.row.num_reruns for result in results)


@pytest.mark.integration
def test_a_row_that_breaks_its_world_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    """The model is refused when it is built, which ends every rank of that world."""
    broken = LayoutCase(
        ParallelConfig(ep=2, dp=2), options={"megatron_args": {"moe_ffn_hidden_size": 1}}
    )
    results: list[Result] = []
    run_layouts([broken, LayoutCase(ParallelConfig(tp=2))], tmp_path, "cpu", results.append)
    assert [result.passed for result in results] == [False, True]
    assert "moe_ffn_hidden_size" in results[0].problem


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"perturbed": {"logits": 2e-4, "loss": 0.0, "gradient": 0.0}}, "perturbed: logits is off"),
        ({"native": {"logits": 0.0, "loss": 0.0, "gradient": float("nan")}}, "native: gradient"),
        ({"recorded": {"logits": 0.0, "loss": 1.0, "gradient": 0.0}}, "recorded: loss is off"),
        ({"wrong_records": 1}, "1 recorded experts differ"),
    ],
)
def test_what_fails_a_row(change: dict[str, Any], problem: str) -> None:
    result = judge_row(SHORT[0], replace(ROW, **change))
    assert result.passed == (problem == "") and problem in result.problem
    text = result_line(result)
    assert ("FAILED" in text) == (not result.passed)
    assert len(text.splitlines()[0]) <= len(table_head()) + 20


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"native": {"logits": 1.0, "loss": 1.0, "gradient": 1.0}, "wrong_records": 7}, ""),
        ({"perturbed": {"logits": 0.05, "loss": 0.0, "gradient": 0.0}}, "perturbed: logits is off"),
        ({"recorded": {"logits": 0.0, "loss": 0.0, "gradient": 0.09}}, "recorded: gradient is off"),
        ({"recorded": {"logits": float("nan"), "loss": 0.0, "gradient": 0.0}}, "recorded: logits"),
    ],
)
def test_what_fails_a_row_in_bf16(change: dict[str, Any], problem: str) -> None:
    """On given routes, by what one rank is off in bf16."""
    errors = {"logits": 0.012, "loss": 1.0, "gradient": 0.02}
    yardstick = replace(ROW, native=errors, recorded=errors, perturbed=errors)
    result = judge_row(replace(SHORT[0], params="bf16"), replace(yardstick, **change), yardstick)
    assert result.passed == (problem == "") and problem in result.problem


@pytest.mark.integration
@pytest.mark.slow
def test_a_layout_in_bf16_is_as_near_to_fp32_as_one_rank(tmp_path: Path) -> None:
    results: list[Result] = []
    run_layouts(
        [LayoutCase(ParallelConfig(tp=2, ep=2), params="bf16")], tmp_path, "cpu", results.append
    )
    assert [result.problem for result in results] == ["", ""]
    assert results[0].case.parallel.world_size == 1


def test_the_tables_hold_what_they_promise() -> None:
    names = [case.name for case in LAYOUTS]
    assert len(set(names)) == len(names)
    layouts = {(c.parallel, c.num_layers, c.dense_layers, c.seq_lens) for c in LAYOUTS}
    assert {(2, 2, 1), (2, 2, 4)} <= {
        (c.parallel.dp, c.parallel.cp, c.parallel.ep) for c in LAYOUTS
    }
    idle = [c for c in LAYOUTS if c.parallel.dp > len(c.seq_lens)]
    assert {c.parallel.pp for c in idle} == {1, 2}, "with a rank without sequences"
    full = whole_product(["qwen3", "deepseek mla"])
    for model in ("qwen3", "deepseek mla"):
        found = [case for case in full if case.model == model]
        assert {(c.parallel, c.num_layers, c.dense_layers, c.seq_lens) for c in found} == layouts
        kinds = {(c.policy.recompute, c.policy.dispatcher) for c in found}
        assert kinds >= {("none", "alltoall"), ("full", "alltoall"), ("none", "allgather")}


def test_nothing_to_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="no row has that in its name"):
        verify_layouts(only="tp=77")
    with pytest.raises(ValueError, match="llama: expected some of qwen3"):
        verify_layouts(models="llama")
