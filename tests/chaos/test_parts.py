"""What the page about reliability says of a run is what the run said."""

from pathlib import Path

import pytest

from tests.chaos.chain import Chain, Row
from tests.chaos.faults import DAMAGES, PHASES, PROCESSES, Fault, damage
from tests.chaos.outcome import what_was_said
from tests.chaos.plan import STEPS, whole
from tests.chaos.results import BEGIN, END, keep, write_table

OUTPUT = """2026-11-30 15:26:51,525 INFO step 1  reward 0.0
2026-11-30 15:26:52,525 ERROR policy.update: policy worker 0 (process 77) died. [RL4007]
  All parts start again from the checkpoint of step 1 (restart 1; at most trainer.max_restarts=3).
2026-11-30 15:26:59,525 WARNING another
2026-11-30 15:27:00,525 INFO resumed after step 1
"""


def test_what_was_said_is_the_first_error_and_where_it_went_on() -> None:
    died = "policy.update: policy worker 0 (process 77) died. [RL4007]"
    assert what_was_said(OUTPUT) == f"{died}; resumed after step 1"
    assert what_was_said("rltrain: interrupted at step 3\n") == "interrupted at step 3"
    assert what_was_said("2026-11-30 15:26:51,525 INFO step 1\n") == ""


def test_every_role_is_killed_and_stopped_in_every_phase() -> None:
    faults = [fault for planned in whole() for fault in planned.faults]
    for what in ("SIGKILL", "SIGSTOP"):
        for who in ("driver", *PROCESSES):
            met = [f.phase for f in faults if (f.who, f.what) == (who, what)]
            assert met == list(PHASES), (who, what)
    for what in ("SIGTERM", "SIGINT"):
        assert {f.phase for f in faults if f.what == what} > {*PHASES, "start_engines"}
    assert {f.what for f in faults} > {*DAMAGES, "disk full"}
    # Each has a step of its own, and one is left after the last.
    assert all(fault.step < STEPS or fault.what.startswith("SIG") for fault in faults)


@pytest.mark.parametrize("what", DAMAGES)
def test_the_newest_checkpoint_is_damaged(what: str, tmp_path: Path) -> None:
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step_00000{step}" / "policy"
        folder.mkdir(parents=True)
        (folder / "large").write_bytes(bytes(100))
        (folder.parent / "manifest.json").write_text("{}")
    old, new = sorted((tmp_path / "checkpoints").iterdir())
    damage(what, tmp_path)
    assert (old / "policy" / "large").read_bytes() == bytes(100)
    assert (old / "manifest.json").exists()
    is_whole = (new / "manifest.json").exists() and (new / "policy" / "large").exists()
    assert not is_whole or (new / "policy" / "large").read_bytes() != bytes(100)


def test_the_page_is_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# before\n{BEGIN}\nold\n{END}\nafter\n")
    row = Row("GCS: SIGKILL", "eval", 8, "Ray's | (process 12) died", "", 3.2, 0, [], True)
    chain = Chain((), (), tmp_path)
    chain.rows.append(row)
    chain.log.write_text("what it printed\n")
    keep(tmp_path / "results", "GCS: SIGKILL", chain)
    write_table(page, tmp_path / "results")
    text = page.read_text()
    assert text.startswith("# before\n") and text.endswith("after\n") and "old" not in text
    said = "Ray's \\| (process N) died"
    assert f"| GCS: SIGKILL | eval | {said} | 3 | 0 | nothing | yes |" in text
    with pytest.raises(ValueError, match="expected"):
        write_table(tmp_path / "results" / "gcs-sigkill.json", tmp_path / "results")


def test_a_run_that_meets_no_fault_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chain, "_attempt", lambda self, resume: 0)
    chain = Chain([Fault("driver", "SIGTERM", "update", 2)], [], tmp_path)
    with pytest.raises(RuntimeError, match="before it met these faults: driver: SIGTERM in update"):
        chain.execute()


def test_faults_of_the_start_are_due_at_the_start() -> None:
    faults = [fault for planned in whole() for fault in planned.faults if fault.who != "disk"]
    assert {fault.phase for fault in faults} == {"start_ray", "start_engines", *PHASES}
    assert all((fault.step == 0) == fault.phase.startswith("start_") for fault in faults)
