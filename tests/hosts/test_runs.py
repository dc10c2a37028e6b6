"""R3 over three hosts: it does what it does on one, and moves what it must move.

Driver and Ray's head on A, which has no rank; stage 0 of the policy and an engine on B, stage 1 and
another engine on C.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from rltrain.tracking.jsonl import read_jsonl
from tests.hosts.expected_bytes import Model, Term, expected, length, sum_of, table
from tests.hosts.runs import WIDE, arguments, check_ended, check_same, seconds_of
from tests.hosts.stage import Run, Stage
from tests.hosts.traffic import between, idle_rates, read_all

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]
TOLERANCE = 0.10
COUNTED = (2, 3)
"""Steps between whose ends bytes are counted. The last step also writes the weights."""
CONTROL = 2.0
"""On the cable of the driver, which has no routes, weights or collectives, calls count as much."""


SHORT = ("policy.parallel.pp=2", "cluster.cpus_per_rank=2", "trainer.steps=2")
SHORT += ("trainer.mini_batches=1", "routing_replay.sample_every=1", "checkpoint.last=false")


def test_r3_over_three_hosts(three: Stage, shown: Callable[[str], None]) -> None:
    """The short form, with one engine, on B: stage 1 on C replays what it captured, and gives its
    weights to it. Routes are traced to every router."""
    shown(f"three hosts: {three.describe()}")
    folder = three.shared / "short"
    chosen = arguments(three, layout=SHORT)
    run = three.start(*chosen, folder=folder, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    run.wait_for_step(1)
    if three.cables:
        kinds = [
            {re.sub(r"^ray::(\w+).*", r"\1", line) for line in machine.processes().values()}
            for machine in three.hosts
        ]
        assert "ModelActor" not in kinds[0] and "RolloutEngine" not in kinds[0] | kinds[2]
        assert kinds[1] >= {"ModelActor", "RolloutEngine"} and "ModelActor" in kinds[2], kinds
    run.wait()
    assert sorted(run.metrics) == [1, 2]
    for row in run.metrics.values():
        assert row["routing/coverage"] == 1.0
        assert row["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert row["routing/wide_flip_fraction"] < 5e-4
        if three.cables:
            assert min(row[f"{name}/bytes_between_nodes"] for name in ("routing", "weights")) > 0
    assert json.loads((run.folder / "outcome.json").read_text())["state"] == "finished"
    check_ended(three)


@pytest.mark.slow
def test_it_equals_the_run_on_one_host_and_moves_what_it_must(
    three: Stage, wide_on_one_host: Run, shown: Callable[[str], None]
) -> None:
    idle = idle_rates(three.cables, 20.0) if three.cables else {}
    run = three.start(*arguments(three, *WIDE), folder=three.shared / "wide")
    run.wait_for_step(COUNTED[0] - 1)
    began, before = time.monotonic(), read_all(three.cables)
    run.wait_for_step(COUNTED[-1])
    seconds, after = time.monotonic() - began, read_all(three.cables)
    run.wait()
    check_same(run, wide_on_one_host)
    alone = seconds_of(wide_on_one_host, COUNTED)
    shown(f"steps {COUNTED}: {seconds_of(run, COUNTED):.1f} s over hosts, {alone:.1f} s on one")
    if not three.cables:
        pytest.skip(f"bytes are counted on cables, and there are none: {three.why_not}")
    terms = expected(model_of(three), steps_of(run, COUNTED), dtype=2)
    quiet = {key: rate * seconds for key, rate in idle.items()}
    found = between(before, after)
    for line in table(terms, found, quiet):
        shown(line)
    check_counted(run, terms)
    for host, way in found:
        due = sum_of(terms, host, way) + quiet[host, way]
        if host == "A":
            assert due <= found[host, way] < due * (1 + CONTROL), f"{host} {way}"
        else:
            assert found[host, way] == pytest.approx(due, rel=TOLERANCE), f"{host} {way}"


def check_counted(run: Run, terms: Sequence[Term]) -> None:
    """The run's own metrics of what routes and weights cost the links say the same."""
    for name, what in (("routing", "routes"), ("weights", "weights")):
        due = sum(term.bytes for term in terms if term.what.startswith(what))
        counted = sum(run.metrics[n][f"{name}/bytes_between_nodes"] for n in COUNTED)
        assert counted == pytest.approx(due, rel=0.02), what


def model_of(made: Stage) -> Model:
    folder = next((made.shared / "models").glob("tiny-warm-*/**/config.json")).parent
    return Model.of(folder, json.loads((folder / "config.json").read_text()))


def steps_of(run: Run, steps: Iterable[int]) -> list[list[dict[str, Any]]]:
    """The rows of rollouts.jsonl, which has all rollouts, by step."""
    rows = read_jsonl(run.folder / "rollouts.jsonl")
    found = [[row for row in rows if row["step"] == step] for step in steps]
    for step, of_step in zip(steps, found, strict=True):
        assert sum(map(length, of_step)) == run.metrics[step]["rollout/num_tokens"]
    return found
