"""What counts as worse between two results."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.step import report
from rltrain.cli.app import main
from rltrain.cli.bench_command import _sign


def interval(value: float, width: float = 0.01) -> dict[str, float | None]:
    return {"value": value, "low": value - width, "high": value + width, "target": 0.97}


def write(path: Path, benchmark: str = "rollout", **changed: Any) -> Path:
    result = {
        "benchmark": benchmark,
        "settings": {"layers": 4},
        "measured": {
            "trainer_tokens_per_second": interval(100.0, 5.0),
            "sync_seconds": interval(2.0, 0.1),
            "route_bytes": 4096,
            "load_seconds": 1.0,
            "steps": interval(7.0),
        },
        "ratios": {"trainer_over_raw": interval(0.98)},
        "machine": {"gpu": "H100", "torch": "2.11.0"},
    }
    for key, values in changed.items():
        result[key] = {**result[key], **values}  # type: ignore[dict-item]
    path.write_text(json.dumps(result))
    return path


@pytest.mark.parametrize(
    ("changed", "worse"),
    [
        ({}, []),
        ({"ratios": {"trainer_over_raw": interval(0.965)}}, []),
        ({"ratios": {"trainer_over_raw": interval(0.95)}}, ["trainer_over_raw"]),
        ({"ratios": {"trainer_over_raw": interval(1.2)}}, []),
        ({"measured": {"trainer_tokens_per_second": interval(80.0, 5.0)}}, ["trainer_tokens_"]),
        ({"measured": {"trainer_tokens_per_second": interval(120.0, 5.0)}}, []),
        ({"measured": {"sync_seconds": interval(2.5, 0.1)}}, ["sync_seconds"]),
        ({"measured": {"sync_seconds": interval(1.5, 0.1)}}, []),
        ({"measured": {"route_bytes": 4097}}, ["route_bytes"]),
        ({"measured": {"load_seconds": 9.0}}, []),  # one number says nothing
        ({"measured": {"steps": interval(1.0)}}, []),  # neither way is better
        ({"measured": {"sync_seconds": interval(9)}, "machine": {"gpu": "H200"}}, []),
        ({"machine": {"torch": "2.12.0"}, "measured": {"route_bytes": 1}}, []),
    ],
)
def test_worse_is_what_lies_outside_of_both_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: Any, worse: list[str]
) -> None:
    old, new = write(tmp_path / "old.json"), write(tmp_path / "new.json", **changed)
    assert main(["bench", "compare", str(old), str(new)]) == bool(worse)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("WORSE")]
    assert len(lines) == len(worse) and all(map(str.__contains__, lines, worse))


def test_folders_are_compared_by_benchmark_and_a_lost_number_is_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        write(folder / "a.json", "rollout", ratios={"lost": interval(1)} if folder == old else {})
        write(folder / "b.json", "step")
    assert main(["bench", "compare", str(old), str(new)]) == 1
    assert main(["bench", "compare", str(old / "b.json"), str(new)]) == 0
    assert "lost" in capsys.readouterr().out
    (new / "b.json").unlink()
    assert main(["bench", "compare", str(old), str(new)]) == 2
    assert r"expected results of ['step'] too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "KeyError"), ("no", "JSONDecodeError"), (None, "FileNotFoundError")],
)
def test_what_is_no_result_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    old, new = write(tmp_path / "old.json"), tmp_path / "new.json"
    if text is not None:
        new.write_text(text)
    assert main(["bench", "compare", str(old), str(new)]) == 2
    found = capsys.readouterr().err
    assert "new.json: expected what a command of benchmarks/ writes" in found and message in found


def test_other_settings_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write(tmp_path / "old.json")
    new = write(tmp_path / "new.json", settings={"layers": 8})
    assert main(["bench", "compare", str(old), str(new)]) == 2
    assert "found {'layers': 4} and {'layers': 8}" in capsys.readouterr().err


def test_a_step_is_its_phases_and_what_benchmarks_write_can_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(generate: float, reward: float, update: float, other: float) -> dict[str, float]:
        phases = {"generate": generate, "reward": reward, "update": update, "weight_sync": 1.0}
        step = sum(phases.values()) + other
        times = {**phases, "other": other, "step": step}
        return {f"time/{name}": seconds for name, seconds in times.items()} | {
            "throughput/tokens_per_second": 100.0 / step,
            "throughput/generated_tokens_per_second": 50.0 / generate,
            "rollout/response_length_mean": 512.0,
            "routing/coverage": 1.0,
        }

    result = report([row(5.0, 0.5, 3.0, 0.5)] * 3, {"layers": 4})
    assert result.ratios["phases_over_step"]["value"] == pytest.approx(0.95)
    assert result.ratios["compute_and_transfer_over_step"]["value"] == pytest.approx(0.9)
    assert result.ratios["compute_over_step"]["value"] == pytest.approx(0.8)
    assert result.measured["generate_seconds"] == {"value": 5.0, "low": 5.0, "high": 5.0}
    result.write(tmp_path / "old.json")
    report([row(9.0, 0.5, 3.0, 0.5)] * 3, {"layers": 4}).write(tmp_path / "new.json")
    capsys.readouterr()
    assert main(["bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")]) == 1
    found = capsys.readouterr().out.splitlines()
    worse = {line.split()[0] for line in found if line.endswith("WORSE")}
    assert worse == {
        *("generate_seconds", "step_seconds"),
        *("tokens_per_second", "generated_tokens_per_second"),
    }


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("sync_s", -1),
        ("sync_gb_per_s", 1),
        ("gpu_bound/r3_gpu_busy_fraction", 1),
        ("gpu_bound/r3_tokens_per_second", 1),
        ("update_seconds", -1),
        ("gpu_bound/r3_kernels", 0),
    ],
)
def test_units_tell_which_way_is_worse(name: str, sign: int) -> None:
    assert _sign(name) == sign
