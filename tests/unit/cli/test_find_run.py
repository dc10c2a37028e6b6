"""The run that a command is about: named, or the newest."""

import os
from pathlib import Path

import pytest

from rltrain.cli.app import main
from rltrain.cli.find_run import find_run, newest_runs


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_at(folder: str, started: int) -> Path:
    path = Path(folder)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("model: {}\n")
    (path / "metrics.jsonl").write_text("")
    os.utime(path / "config.yaml", (started, started))
    return path


def test_the_newest_start_counts_and_not_the_last_write() -> None:
    first, second = run_at("outputs/b", 100), run_at("outputs/sweep/a", 200)
    third = run_at("outputs/c", 50)
    (third / "metrics.jsonl").write_text("later\n")
    (Path("outputs") / "notes").mkdir()
    assert find_run(None) == second
    assert newest_runs(2) == [first, second]
    with pytest.raises(ValueError, match=r"expected 4 runs below .*outputs, found 3"):
        newest_runs(4)
    assert find_run(Path("outputs/b")) == first


def test_what_is_no_run_is_refused_with_what_was_found(here: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a run below .*outputs, found none"):
        find_run(None)
    run = run_at("outputs/a", 100)
    (run / "checkpoints" / "step_000001").mkdir(parents=True)
    for named, found in (
        ("nowhere", "found no such folder"),
        ("outputs/a/config.yaml", "found a file"),
        ("outputs", "found runs below it: outputs/a"),
        ("outputs/a/checkpoints", f"The run's folder is {here}/outputs/a"),
    ):
        with pytest.raises(ValueError, match=found) as refused:
            find_run(Path(named))
        expected = f"{named}: expected the folder of a run, with config.yaml or metrics.jsonl in it"
        assert expected in str(refused.value)


@pytest.mark.parametrize(
    "command",
    ["report", "logs", "compare", "compare outputs/a", "export new", "export outputs new"],
)
def test_commands_refuse_where_there_is_no_run(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert "expected" in (shown := capsys.readouterr().err) and "found" in shown


def test_a_report_of_the_newest_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("outputs/a")
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert main(["report"]) == 0
    assert (run / "report.html").exists()
    assert "outputs/a/report.html" in capsys.readouterr().out
