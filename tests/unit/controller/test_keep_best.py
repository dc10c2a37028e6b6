"""Checkpoints that are the best by a metric stay, however old they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config import Config
from rltrain.config.errors import ConfigError, validate
from rltrain.config.trainer import CheckpointConfig
from rltrain.controller.keep_best import Ranking, best_steps, check_best, mode_of, staying
from rltrain.controller.run_checkpoint import checkpoints, step_of
from rltrain.controller.save_checkpoint import save
from tests.unit.controller.test_run_checkpoint import STATE, Group, storage

numbers = st.one_of(st.floats(), st.sampled_from([0.0, 0.5, float("nan"), float("inf")]))


@given(
    values=st.dictionaries(st.integers(1, 8), numbers),
    saved=st.sets(st.integers(1, 8)),
    keep=st.integers(1, 4),
    best=st.integers(0, 4),
    mode=st.sampled_from(["max", "min"]),
)
def test_the_newest_and_the_best_stay(
    values: dict[int, float], saved: set[int], keep: int, best: int, mode: Any
) -> None:
    config = CheckpointConfig(every=1, keep=keep, keep_best=best, best_mode=mode)
    stay = set(staying(list(saved), values, config))
    assert stay <= saved and set(sorted(saved)[-keep:]) <= stay
    sign = 1 if mode == "max" else -1
    finite = {s: sign * v for s, v in values.items() if s in saved and abs(v) < float("inf")}
    better = {
        step: sum(v > finite[step] or (v == finite[step] and s < step) for s, v in finite.items())
        for step in finite
    }
    chosen = {step for step, above in better.items() if above < best}
    assert len(chosen) == min(best, len(finite))
    assert stay == chosen | set(sorted(saved)[-keep:])


def test_of_equal_ones_the_earlier_is_better() -> None:
    assert best_steps({3: 0.5, 1: 0.5, 2: 0.4}, 2, "max") == [1, 3]
    assert best_steps({3: 0.5, 1: 0.5, 2: 0.5}, 1, "min") == [1]


def run_config(folder: Path, **checkpoint: Any) -> Config:
    settings = {"every": 1, "keep": 1, "keep_best": 1, **checkpoint}
    trainer = {"output_dir": str(folder), "eval_every": 1}
    return Config.model_validate({"trainer": trainer, "checkpoint": settings})


def test_a_run_and_its_resumption_keep_the_best(tmp_path: Path) -> None:
    """Each step is evaluated after its checkpoint is there."""
    config, accuracy = run_config(tmp_path), [0.0, 0.2, 0.6, 0.6, 0.1, 0.7, 0.3]
    at = storage(tmp_path, **config.checkpoint.model_dump())
    ranking, seen = Ranking.of_run(config, 0), []
    for step in range(1, 7):
        if step in (3, 5):  # a process of its own goes on
            ranking = Ranking.of_run(config, step - 1)
        save(at, step, [Group(step)], STATE, values=ranking.values)  # type: ignore[list-item]
        row = {"step": step, "eval/accuracy": accuracy[step]}
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        saved = [step_of(path) for path in checkpoints(tmp_path)]
        ranking.add(step, row, saved=saved)
        seen.append(saved)
    # The best stays for good, of two equal ones the earlier; step 5 overtakes it at step 6.
    assert seen == [[1], [1, 2], [2, 3], [2, 4], [2, 5], [5, 6]]


def test_going_on_from_an_older_step_forgets_the_steps_after_it(tmp_path: Path) -> None:
    rows = [{"step": step, "eval/accuracy": step / 10} for step in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Ranking.of_run(run_config(tmp_path), 2).values == {1: 0.1, 2: 0.2}
    assert Ranking.of_run(run_config(tmp_path, keep_best=0), 2).values == {}


def test_a_metric_that_is_not_measured_ends_the_run_at_once(tmp_path: Path) -> None:
    ranking = Ranking.of_run(run_config(tmp_path), 0)
    with pytest.raises(RuntimeError, match=r"step 0: expected .*eval/accuracy.*found eval/reward"):
        ranking.add(0, {"eval/reward_mean": 1.0, "reward/mean": 2.0}, saved=[])
    with pytest.raises(RuntimeError, match="found nothing of eval/"):
        ranking.add(4, {"reward/mean": 2.0}, saved=[4])
    ranking.add(5, {}, saved=[4])  # which has no checkpoint
    Ranking.of_run(run_config(tmp_path, keep_best=0), 0).add(4, {}, saved=[4])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"best_metric": "eval/acuracy"}, r"not a known metric; the nearest is 'eval/accuracy'"),
        ({"best_metric": "rollout/staleness", "best_mode": None}, r"set checkpoint\.best_mode"),
        ({"every": 3}, r"checkpoint\.every=3 and trainer\.eval_every=2"),
        ({"best_metric": "eval/loss"}, r"type=rl measures no eval/loss"),
    ],
)
def test_what_no_checkpoint_would_have_is_refused(settings: dict[str, Any], message: str) -> None:
    checkpoint = {"every": 2, "keep_best": 1, **settings}
    config = Config.model_validate({"checkpoint": checkpoint, "trainer": {"eval_every": 2}})
    with pytest.raises(ValueError, match=message):
        check_best(config)


def test_best_without_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="every=0 saves none"):
        validate({"checkpoint": {"keep_best": 1}})


def test_the_mode_is_that_of_the_metric_unless_it_is_set() -> None:
    assert mode_of(CheckpointConfig()) == "max"
    assert mode_of(CheckpointConfig(best_metric="eval/loss")) == "min"
    assert mode_of(CheckpointConfig(best_mode="min")) == "min"
    check_best(Config.model_validate({"checkpoint": {"every": 2}, "trainer": {"eval_every": 3}}))
    check_best(
        Config.model_validate(
            {
                "checkpoint": {"every": 3, "keep_best": 1, "best_metric": "reward/mean"},
                "trainer": {"eval_every": 2},
            }
        )
    )
