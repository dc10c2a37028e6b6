"""Runs whose engines generate ahead of the policy (`trainer.max_staleness`), on real engines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rltrain.tracking.jsonl import read_jsonl
from tests.reliability.cases import write_reward
from tests.reliability.same_run import TIMED, row_differences
from tests.timeline_file import covered, overlap, read_timeline

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
STEPS = 5
SET = (
    "rollout=deterministic",
    "algorithm=grpo_async",
    "optimizer.lr=1e-3",
    "optimizer.warmup_steps=0",
    "data.eval_size=4",
    "routing_replay.sample_every=1",
    "trainer.prompts_per_step=4",
    "trainer.mini_batches=2",
    "trainer.eval_every=2",
    f"trainer.steps={STEPS}",
    "checkpoint.every=1",
    f"checkpoint.keep={STEPS}",
)


def reward_by_letters(folder: Path) -> str:
    write_reward(folder)
    return "data.reward.function=by_letters.score"


def started(folder: Path) -> list[tuple[int, int]]:
    """Step and age of every batch that was started."""
    rows = read_jsonl(folder / "schedule.jsonl")
    return [(row["step"], row["age"]) for row in rows if row["event"] == "started"]


def tokens_by_age(folder: Path) -> dict[int, dict[str, int]]:
    rows = read_jsonl(folder / "schedule.jsonl")
    return {row["step"]: row["tokens_by_age"] for row in rows if row["event"] == "trained"}


def check_ages(folder: Path, rows: dict[int, dict[str, Any]], ages: Sequence[int]) -> None:
    """All tokens of a step have its age, and all their routes are there and are those of its
    weights."""
    assert started(folder) == list(enumerate(ages, 1))
    for step, age in enumerate(ages, 1):
        row = rows[step]
        assert row["rollout/staleness"] == row["rollout/staleness_max"] == age
        assert tokens_by_age(folder)[step] == {str(age): row["rollout/num_response_tokens"]}
        assert row["routing/coverage"] == 1.0
        assert row["rollout/weight_version"] == step - age
        assert row[f"mismatch/k3/age_{age}"] == pytest.approx(row["mismatch/k3"])
        # The engine that sampled it had other weights, unless its age is 0.
        assert (row["mismatch/k3"] > 1e-5) == (age > 0), (step, row["mismatch/k3"])


def check_timeline(folder: Path) -> None:
    """Steps are almost all phases. The engine works while the policy does, and both take part in
    every weight sync."""
    trace = read_timeline(folder / "timeline.json")
    run, policy, engine = (
        trace.tracks[name] for name in ("steps and phases", "policy rank 0", "engine 0")
    )
    assert trace.steps == [f"step {step}" for step in range(1, STEPS + 1)]
    assert all(covered(s, run) > 0.7 for s in run if s["name"] in trace.steps)
    generated = [s for s in engine if s["name"] == "generate"]
    updates = [s for s in policy if s["name"] == "update"]
    assert len(updates) == 2 * STEPS and any(overlap(g, u) for g in generated for u in updates)
    syncs = [[s["name"] for s in track].count("weight_sync") for track in (run, policy, engine)]
    assert syncs == [STEPS + 1] * 3
    assert max(trace.counts(0)) > 0 and trace.counts(0)[-1] == 0


def test_engines_generate_the_next_batch_while_the_policy_trains(
    start: Any, tmp_path: Path
) -> None:
    run = start("ahead", *SET, reward_by_letters(tmp_path), "trainer.max_staleness=1").wait()
    check_ages(run.folder, run.metrics, [0, 1, 1, 1, 1])
    hidden = [run.metrics[step] for step in range(3, STEPS + 1)]
    assert all(row["rollout/generate_seconds"] > 0 for row in hidden)
    # Some of the generation was beside the training: it was not waited for.
    waited = [row["time/generate"] + row["time/reward"] + row["time/drain"] for row in hidden]
    assert sum(waited) < sum(row["rollout/generate_seconds"] for row in hidden)
    check_timeline(run.folder)


def prompts_by_step(folder: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for row in read_jsonl(folder / "rollouts.jsonl"):
        found.setdefault(row["step"], set()).add(row["prompt"])
    return found


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_prompts_behind_its_step(start: Any, tmp_path: Path) -> None:
    """Not behind those that were generated ahead; and every step trains on four prompts once."""
    of_run = [*SET, reward_by_letters(tmp_path), "trainer.max_staleness=2"]
    of_run += ["tracking.rollouts_every=1", "tracking.num_samples=16"]
    run = start("ahead", *of_run).wait()
    straight = prompts_by_step(run.folder)
    resumed = start("ahead", *of_run, "trainer.resume=step:2").wait()
    assert prompts_by_step(resumed.folder) == straight
    assert all(len(prompts) == 4 for prompts in straight.values())
    # The two batches that were lost are generated again, with newer weights.
    assert started(resumed.folder)[2:] == [(3, 0), (4, 1), (5, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1, 4])
def test_a_recorded_schedule_replays_bitwise(bound: int, start: Any, tmp_path: Path) -> None:
    of_run = [*SET, reward_by_letters(tmp_path), f"trainer.max_staleness={bound}"]
    first = start("first", *of_run).wait()
    check_ages(first.folder, first.metrics, [min(step - 1, bound) for step in range(1, STEPS + 1)])
    file = first.folder / "schedule.jsonl"
    again = start("again", *of_run, f"trainer.schedule={file}").wait()
    assert not list(row_differences(first.folder, again.folder, TIMED))
    # A schedule of other ages is followed, too.
    rows = [{"step": step, "event": "started", "after": step - 1} for step in range(1, STEPS + 1)]
    fresh = tmp_path / "fresh.jsonl"
    fresh.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    on_policy = start("fresh", *of_run, f"trainer.schedule={fresh}").wait()
    check_ages(on_policy.folder, on_policy.metrics, [0] * STEPS)
    # That is what a run without any staleness does.
    plain = start("plain", *of_run[:-1]).wait()
    assert not list(row_differences(plain.folder, on_policy.folder, TIMED))
