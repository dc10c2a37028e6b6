"""A step whose numbers are not finite: what stays of it, and whether the run goes on.

The models are stand-ins; tests/distributed/test_nonfinite.py has ranks and
tests/integration/test_nonfinite_runs.py whole runs.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from rltrain.algorithms.sequences import require_finite
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.config.trainer import TrackingConfig
from rltrain.controller.checkpoint_storage import local_storage
from rltrain.controller.cluster.worker_group import Unmade, UpdateNotFinite
from rltrain.controller.kept_steps import FOLDER, KEPT, KeptStep, keep, read
from rltrain.controller.nonfinite import InHand
from rltrain.controller.run_checkpoint import checkpoints, read_state, step_of
from rltrain.controller.run_loop import Loop, Start, Step
from rltrain.policy.types import NonFinite
from rltrain.tracking.jsonl import read_jsonl
from rltrain.tracking.timers import StepTimer
from rltrain.tracking.tracker import Tracker
from tests.unit.controller.test_crashes import MODEL, NoSpeed
from tests.unit.controller.test_run_checkpoint import Group

BATCH = Batch(
    tokens=torch.arange(5),
    seq_lens=torch.tensor([2, 3]),
    response_mask=torch.tensor([False, True, False, True, True]),
    rollout_expert_indices=torch.arange(10, dtype=torch.uint8).view(5, 2, 1),
    route_mask=torch.tensor([True, False, True, True, False]),
    advantages=torch.tensor([0.0, 1.0, 0.0, torch.inf, torch.nan]),
)
UNMADE = Unmade("policy", 1, NonFinite("loss", float("nan"), (3,)))


class NoEvaluation:
    def is_due(self, step: int) -> bool:
        return False


class Run(Loop):
    """Of whose steps some have an update that is not made, some a log-probability of NaN, and some
    leave a broken model."""

    unmade_in: Collection[int] = ()
    bad_logprob_in: Collection[int] = ()
    broken_by: int = 0

    def take(self, step: int, timer: StepTimer, *, is_first: bool) -> Step:
        self.in_hand = InHand(BATCH, {"reward/mean": 0.5}, 0.25)
        group: Any = self.policy
        group.unmade = []
        if step in self.bad_logprob_in:
            logprobs = torch.tensor([0.0, 0.0, 0.0, 0.0, torch.nan])
            require_finite("old_logprobs", logprobs, BATCH.response_mask, BATCH.seq_lens)
        if step in self.unmade_in:
            if self.config.trainer.on_nonfinite == "stop":
                raise UpdateNotFinite(UNMADE)
            group.unmade = [UNMADE]
        if step == self.broken_by:
            group.nonfinite_state = lambda: {1: ["a.weight", "the optimizer's state"]}
        return Step(BATCH, {"reward/mean": 0.5}, [])

    def first_checks(self, taken: Step) -> list[Any]:
        return []

    def check_invariants(self, step: int, checks: Any) -> None:
        """There are none."""

    def state(self) -> dict[str, Any]:
        return {}


def train(folder: Path, after: int = 0, **planted: Any) -> None:
    settings = {"on_nonfinite": planted.pop("on", "stop"), "max_skipped_steps": 2}
    config = Config.model_validate(
        {
            "trainer": {"output_dir": str(folder), "steps": 6, **settings},
            "checkpoint": {"every": 1, "keep": 10, "last": False},
        }
    )
    folder.mkdir(exist_ok=True)
    first = after + 1 if after else 0
    tracker = Tracker(folder, TrackingConfig(backends=[]), {}, {}, num_steps=6, first_step=first)
    state = read_state(checkpoints(folder)[-1]) if after else {}
    start = Start(MODEL, local_storage(folder, config.checkpoint), after, state)
    given: Any = (config, None, Group(), None, NoSpeed(), NoEvaluation(), tracker, start)
    run = Run(*given)
    vars(run).update(planted)
    run.train()


def saved(folder: Path) -> list[int]:
    return [step_of(path) for path in checkpoints(folder)]


def test_the_run_stops_and_names_what_it_found_and_where_the_batch_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        train(tmp_path, unmade_in=[3])
    kept = tmp_path / FOLDER / "step-000003"
    said = str(raised.value)
    assert said.startswith("step 3: policy, mini-batch 1: the loss is nan on rank 3. That update")
    assert f"`rltrain step replay {kept}`" in said and said.endswith("[RL5005]")
    assert saved(tmp_path) == [1, 2]
    about, batch, run = read(kept)
    assert run == tmp_path and (about.step, about.kl_coef, about.saved) == (3, 0.25, 2)
    for name in ("tokens", "seq_lens", "response_mask", "rollout_expert_indices", "route_mask"):
        assert torch.equal(getattr(batch, name), getattr(BATCH, name))
    assert batch.advantages is not None and batch.advantages[3:].isfinite().sum() == 0
    assert batch.loss_weights is None


def test_a_log_probability_leaves_out_all_updates_of_its_step(tmp_path: Path) -> None:
    train(tmp_path, on="skip", bad_logprob_in=[2], unmade_in=[4])
    rows = {row["step"]: row for row in read_jsonl(tmp_path / "metrics.jsonl")}
    counts = {step: row["policy/nonfinite_updates"] for step, row in rows.items()}
    assert counts == {1: 0, 2: 1, 3: 0, 4: 1, 5: 0, 6: 0}
    assert rows[2]["reward/mean"] == 0.5 and saved(tmp_path) == [1, 2, 3, 4, 5, 6]
    [cause] = read(tmp_path / FOLDER / "step-000002")[0].causes
    assert cause.startswith("old_logprobs: token 2 of sequence 1 has nan")


def test_steps_in_a_row_are_bounded_also_across_a_resume(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"step 4: .*3 in a row .*max_skipped_steps=2"):
        train(tmp_path / "straight", on="skip", unmade_in=[2, 3, 4])
    assert saved(tmp_path / "straight") == [1, 2, 3]
    train(tmp_path / "apart", on="skip", unmade_in=[2, 3, 5, 6])
    with pytest.raises(RuntimeError, match=r"step 4: .*3 in a row"):
        train(tmp_path / "straight", after=3, on="skip", unmade_in=[4])


@pytest.mark.parametrize("on", ["stop", "skip"])
def test_a_broken_model_is_not_saved(on: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        train(tmp_path, on=on, broken_by=3)
    said = (
        "step 3: policy, rank 1: after the update, a.weight, the optimizer's state are not finite"
    )
    assert str(raised.value).startswith(said)
    assert saved(tmp_path) == [1, 2] and (tmp_path / FOLDER / "step-000003").is_dir()


def test_other_errors_are_not_swallowed(tmp_path: Path) -> None:
    class Other(Run):
        def take(self, step: int, timer: StepTimer, *, is_first: bool) -> Step:
            self.in_hand = InHand(BATCH, {})
            raise ValueError("no number at all [RL5006]")

    config = Config.model_validate(
        {"trainer": {"output_dir": str(tmp_path), "on_nonfinite": "skip"}}
    )
    tracker = Tracker(tmp_path, TrackingConfig(backends=[]), {}, {}, num_steps=1, first_step=0)
    start = Start(MODEL, local_storage(tmp_path, config.checkpoint))
    given: Any = (config, None, Group(), None, NoSpeed(), NoEvaluation(), tracker, start)
    with pytest.raises(ValueError, match="no number at all"):
        Other(*given).train()
    assert not (tmp_path / FOLDER).exists()


def test_the_last_few_batches_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        keep(tmp_path, KeptStep(step, ["x"], 0.0, 0, []), BATCH)
    keep(tmp_path, KeptStep(5, ["again"], 0.0, 0, []), BATCH)
    names = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert names == [f"step-{step:06d}" for step in range(6 - KEPT, 6)]
    assert read(tmp_path / FOLDER / "step-000005" / "step.json")[0].causes == ["again"]


@pytest.mark.parametrize("damage", ["nothing", "torn", "other", "pickle"])
def test_what_is_no_kept_step_is_refused(damage: str, tmp_path: Path) -> None:
    folder = tmp_path
    if damage != "nothing":
        folder = keep(tmp_path, KeptStep(1, [], 0.0, 0, []), BATCH)
    if damage == "torn":
        (folder / "step.json").write_text('{"step": 1')
    if damage == "other":
        (folder / "step.json").write_text(json.dumps({"step": 1}))
    if damage == "pickle":
        torch.save({"tokens": BATCH.tokens}, folder / "batch.safetensors")
    with pytest.raises(ValueError, match=r"expected a step that a run has kept.*\[RL7004\]"):
        read(folder)
