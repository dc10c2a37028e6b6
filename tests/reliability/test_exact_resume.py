"""N steps are the same N steps with the driver's end after each of them: bitwise.

One run is started six times. After every step its driver is killed by SIGKILL, and the folder is
left as it is then, or as a cut of the power would have left it before the step's row of metrics was
written. After step 3 the newer checkpoint, that of step 4, is passed over by name. `-k ppo-2ranks`
runs one algorithm; each takes some minutes.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rltrain.tracking.jsonl import read_jsonl
from tests.reliability.cases import ALGORITHMS, RANKS, STEPS, overrides_of, write_reward
from tests.reliability.same_run import differences
from tests.reliability.whole_run import WholeRun, cut

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(3600)]
WITHOUT_ROW = (2, 5)
"""Steps whose row of metrics is lost, and is made again of the checkpoint."""
BY_NAME = 3
"""Step that is gone on from although a newer checkpoint is there."""
KEPT = "RLTRAIN_EXACT_DIR"
"""This variable names a folder to keep the straight runs in, so that they can be looked at."""
Started = Callable[..., WholeRun]
CASES = [(algorithm, ranks) for algorithm in ALGORITHMS for ranks in RANKS]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get(KEPT)
    folder = tmp_path_factory.mktemp("exact") if kept is None else Path(kept)
    folder.mkdir(parents=True, exist_ok=True)
    write_reward(folder)
    return folder


@pytest.fixture(scope="module")
def start(work: Path) -> Iterator[Started]:
    """Start a run of a case in the folder of this name."""
    runs = []

    def start_run(case: tuple[str, int], name: str, *more: str) -> WholeRun:
        runs.append(WholeRun(work, work / name, [*overrides_of(*case), *more]))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()


@pytest.fixture(scope="module")
def straight(work: Path, start: Started) -> Callable[[tuple[str, int]], Path]:
    """The folder of a case's run from the first step to the last, made once."""
    made: dict[tuple[str, int], Path] = {}

    def folder_of(case: tuple[str, int]) -> Path:
        if case not in made:
            folder = work / f"{case[0]}-{case[1]}-straight"
            if not (folder / "outcome.json").exists():
                start(case, folder.name).wait()
            check_all_state_moves(folder, case[0])
            made[case] = folder
        return made[case]

    return folder_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}ranks")
def test_a_run_whose_driver_dies_after_every_step_is_the_straight_one(
    case: tuple[str, int], work: Path, start: Started, straight: Any
) -> None:
    whole = straight(case)
    name = f"{case[0]}-{case[1]}-killed"
    run = start(case, name)
    identity = ""
    for step in range(1, STEPS):
        # With the newer checkpoint to pass over, it is killed a step later.
        run.kill_in_step(step + 2 if step == BY_NAME else step + 1)
        if step in WITHOUT_ROW:
            cut(run.folder, step, rows_to=step - 1)
        identity = identity or (run.folder / "wandb_id").read_text()
        resume = f"step:{step}" if step == BY_NAME else "auto"
        run = start(case, name, f"trainer.resume={resume}")
        run.wait_for(f"resumed after step {step}")
    run.wait()
    assert not differences(whole, run.folder, STEPS)
    assert (run.folder / "wandb_id").read_text() == identity


def check_all_state_moves(folder: Path, algorithm: str) -> None:
    """Each part of the state that a checkpoint keeps has changed, or nothing would be compared."""
    rows = read_jsonl(folder / "metrics.jsonl")[1:]
    rates = [row["policy/lr"] for row in rows if "policy/lr" in row]
    assert len(set(rates)) == len(rates) >= STEPS - 1
    assert all(row["policy/grad_norm"] > 0 for row in rows if "policy/grad_norm" in row)
    states = [
        json.loads((folder / "checkpoints" / f"step_{step:06d}" / "state.json").read_text())
        for step in range(1, STEPS + 1)
    ]
    places = {json.dumps(state["prompts"]) for state in states}
    assert len(places) == STEPS
    if algorithm == "dapo":
        assert any(row["group/rounds"] > 1 for row in rows)
        # Of the last round of a step some groups teach, and are left over.
        drawn = sum(4 * row["group/rounds"] for row in rows)
        teaching = sum(
            4 * row["group/rounds"] * (1 - row["group/zero_std_fraction"]) for row in rows
        )
        assert drawn > teaching > 4 * STEPS
        return
    coefs = [state["kl_coef"] for state in states]
    assert len(set(coefs)) == STEPS
    references = [
        json.loads((folder / "checkpoints" / f"step_{step:06d}" / "manifest.json").read_text())
        for step in range(1, STEPS + 1)
    ]
    tensors = [
        tuple(e["sha256"] for name, e in of.items() if name.startswith("reference/__"))
        for of in references
    ]
    assert all(tensors) and len(set(tensors)) > 1
    if algorithm == "ppo":
        assert all(row["value/grad_norm"] > 0 for row in rows)
