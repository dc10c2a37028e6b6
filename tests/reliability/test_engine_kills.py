"""A long run that generates ahead, and whose engine is killed again and again."""

import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from rltrain.tracking.jsonl import read_jsonl
from tests.chaos.faults import find
from tests.reliability.cases import write_reward
from tests.reliability.whole_run import LIMIT_S, WholeRun
from tests.tiny_run import SIZES, WARM_START

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS = 200
KILLED = range(20, STEPS, 20)
BOUND = 4
PROMPTS, GROUP = 4, 2
SET = (
    "+recipe=grpo_moe_r3_async",
    *SIZES,
    *WARM_START,
    "data.size=40",
    "data.eval_size=4",
    "data.reward.function=by_letters.score",
    f"algorithm.group_size={GROUP}",
    "rollout.num_engines=2",
    "rollout.max_response_tokens=12",
    f"trainer.steps={STEPS}",
    f"trainer.max_staleness={BOUND}",
    f"trainer.prompts_per_step={PROMPTS}",
    "trainer.mini_batches=2",
    "trainer.eval_every=0",
    f"trainer.max_restarts={2 * len(KILLED)}",
    "checkpoint.every=10",
    "tracking.backends=[]",
    "tracking.rollouts_every=1",
    f"tracking.num_samples={PROMPTS * GROUP}",
)


def test_no_sample_is_lost_or_trained_on_twice(tmp_path: Path) -> None:
    write_reward(tmp_path)
    run = WholeRun(tmp_path, tmp_path / "run", SET)
    try:
        for step in KILLED:
            kill_engine(run, after=step)
        run.wait()
    finally:
        run.end()
    rows = read_jsonl(run.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if row["step"]] == list(range(1, STEPS + 1))
    taught = [row for row in rows if row["step"]]
    assert all(row["rollout/staleness_max"] <= BOUND for row in taught)
    assert taught[-1]["rollout/engine_restarts"] > 0
    seen = Counter(
        (row["step"], row["prompt"]) for row in read_jsonl(run.folder / "rollouts.jsonl")
    )
    assert set(seen.values()) == {GROUP}
    by_prompt = Counter(prompt for _, prompt in seen)
    assert sum(by_prompt.values()) == STEPS * PROMPTS
    assert len(set(by_prompt.values())) == 1, "every epoch has each prompt once"


def kill_engine(run: WholeRun, *, after: int) -> None:
    """SIGKILL of engine 0, once the row of this step is there."""
    until = time.monotonic() + LIMIT_S
    while not (run.folder / "metrics.jsonl").exists() or after not in run.steps:
        assert run.process.poll() is None, run.output
        assert time.monotonic() < until, f"no step {after}:\n{run.output}"
        time.sleep(0.05)
    engine = find("engine", run.process.pid)
    assert engine, f"no engine after step {after}"
    engine[0].send_signal(signal.SIGKILL)
