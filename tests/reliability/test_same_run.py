"""The comparison of two runs sees every part of a run that may differ."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rltrain.tracking.jsonl import read_jsonl
from rltrain.weights.huggingface.manifest import write_manifest
from tests.reliability.same_run import differences
from tests.reliability.whole_run import cut

LAST = 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for step in range(1, LAST + 1):
        saved = folder / "checkpoints" / f"step_{step:06d}"
        (saved / "policy").mkdir(parents=True)
        (saved / "policy" / "__0_0.distcp").write_bytes(bytes([step]))
        state = {"step": step, "config": {"a": str(folder)}, "kl_coef": 0.1 * step}
        metrics = {"policy/loss": 0.1, "time/update": 3.0}
        (saved / "state.json").write_text(json.dumps(state | {"metrics": metrics}))
        write_manifest(saved)
    (folder / "checkpoints" / "last").symlink_to("step_000003")
    (folder / "outcome.json").touch()
    for name in ("metrics", "rollouts", "samples"):
        rows = [{"step": n, "policy/loss": n / 7, "time/step": 1.0} for n in range(LAST + 1)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def in_file(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def other_tensor(folder: Path) -> None:
    (folder / "checkpoints/step_000002/policy/__0_0.distcp").write_bytes(b"x")
    (folder / "checkpoints/step_000002/manifest.json").unlink()
    write_manifest(folder / "checkpoints/step_000002")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a metric": (in_file("metrics.jsonl", "0.14285714285714285", "0.14285714285714288"), "step 1:"),
    "a row less": (in_file("metrics.jsonl", '"step": 3', '"step": 4'), "rows of steps"),
    "a rollout": (in_file("rollouts.jsonl", "0.14285714285714285", "0.15"), "rollouts.jsonl:2"),
    "a sample less": (lambda f: (f / "samples.jsonl").write_text(""), "4 and 0 lines"),  # type: ignore[dict-item]
    "a tensor": (other_tensor, "step 2: policy/__0_0.distcp differs"),
    "a coefficient": (
        in_file("checkpoints/step_000001/state.json", '"kl_coef": 0.1', '"kl_coef": 0.10000001'),
        "step 1: state.json: kl_coef",
    ),
    "no checkpoint": (lambda f: shutil.rmtree(f / "checkpoints/step_000001"), "no ["),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_difference_is_named(what: str, run: Path) -> None:
    other = run.with_name("other")
    shutil.copytree(run, other, symlinks=True)
    change, message = CHANGES[what]
    change(other)
    assert any(message in line for line in differences(run, other, LAST))


def test_what_is_measured_and_where_a_run_is_are_no_differences(run: Path) -> None:
    other = run.with_name("other")
    shutil.copytree(run, other, symlinks=True)
    in_file("metrics.jsonl", '"time/step": 1.0', '"time/step": 2.0')(other)
    in_file("checkpoints/step_000001/state.json", str(run), str(other))(other)
    in_file("checkpoints/step_000001/state.json", "3.0", "4.0")(other)
    assert differences(run, other, LAST) == []


def test_a_cut_run_has_what_was_there_then(run: Path) -> None:
    cut(run, 2, rows_to=1)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step_000001",
        "step_000002",
    ]
    steps = {
        name: [row["step"] for row in read_jsonl(run / f"{name}.jsonl")]
        for name in ("metrics", "rollouts", "samples")
    }
    assert steps == {"metrics": [0, 1], "rollouts": [0, 1, 2], "samples": [0, 1, 2]}
    assert not (run / "outcome.json").exists()
