"""A run of one parallel layout goes on in another, as it would have in its own.

The weights of the checkpoint are the same numbers in every layout, so the first rollout after it is
the same bit by bit; what is computed from it differs by the order of sums.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rltrain.cli.app import main as rltrain
from rltrain.tracking.jsonl import read_jsonl
from rltrain.verification.pass_file import relative_error
from tests.reliability.cases import LAYOUTS, overrides_of_layout, write_reward
from tests.reliability.whole_run import WholeRun, cut

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(3600)]
AFTER, LAST = 2, 4
BOUND = 1e-3
"""Of relative errors, as those of two updates: each layout is within 1e-4 of one rank in one."""
SAME = ("prompt", "tokens", "reward", "rollout_logprobs")
CLOSE = ("policy/loss", "policy/grad_norm", "policy/entropy", "policy/ref_kl", "mismatch/k3")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., WholeRun]]:
    work = tmp_path_factory.mktemp("layouts")
    write_reward(work)
    runs = []

    def start_run(name: str, *overrides: str) -> WholeRun:
        runs.append(WholeRun(work, work / name, overrides))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()


@pytest.fixture(scope="module")
def straight(start: Any) -> Path:
    folder: Path = start("straight", *overrides_of_layout("policy=tp2")).wait().folder
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_in_another_layout(layout: str, start: Any, straight: Path) -> None:
    name = layout.replace(" ", "-")
    folder = straight.with_name(name)
    shutil.copytree(straight, folder, symlinks=True)
    cut(folder, AFTER, rows_to=AFTER)
    resumed = start(name, *overrides_of_layout(*LAYOUTS[layout]), "trainer.resume=auto").wait()
    assert f"resumed after step {AFTER}" in resumed.output
    assert "policy.parallel." in resumed.output  # the change is shown, and needs no consent
    one, two = (read_jsonl(of / "rollouts.jsonl") for of in (straight, folder))
    for mine, theirs in zip(one, two, strict=True):
        if mine["step"] == AFTER + 1:
            assert {key: mine[key] for key in SAME} == {key: theirs[key] for key in SAME}
    rows, others = (read_jsonl(of / "metrics.jsonl") for of in (straight, folder))
    assert [row["step"] for row in others] == [row["step"] for row in rows]
    for row, other in zip(rows[AFTER + 1 :], others[AFTER + 1 :], strict=True):
        for key in CLOSE:
            assert other[key] == pytest.approx(row[key], rel=BOUND, abs=1e-7), (row["step"], key)
        assert (other["policy/lr"], other["policy/kl_coef"]) == (
            row["policy/lr"],
            row["policy/kl_coef"],
        )
    before, mine, theirs = (
        exported(*at) for at in ((straight, AFTER), (straight, LAST), (folder, LAST))
    )
    assert before.keys() == mine.keys() == theirs.keys()
    errors = {key: relative_error(theirs[key], mine[key]) for key in mine}
    assert not {key: error for key, error in errors.items() if not error < BOUND}
    # There was something to learn: else a run that did nothing would pass.
    assert max(relative_error(before[key], mine[key]) for key in mine) > 10 * BOUND


def exported(folder: Path, step: int) -> dict[str, Any]:
    out = folder.with_name(f"{folder.name}-model-{step}")
    if not out.exists():
        assert rltrain(["export", str(folder), str(out), "--step", str(step)]) == 0
    return load_file(out / "model.safetensors")
