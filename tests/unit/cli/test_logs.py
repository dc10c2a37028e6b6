"""The logs of a run: listed, printed, followed, and their errors."""

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from rltrain.cli.app import main
from rltrain.cli.logs_command import new_text

ROOT = Path(__file__).parents[3]
TRACEBACK = """=== process 7 starts, 2026-11-30T00:00:00+00:00 ===
loading
Traceback (most recent call last):
  File "/x/site-packages/vllm/v1/core/kv_cache_utils.py", line 879, in _check_enough
    raise ValueError("No available memory")
ValueError: No available memory
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "outputs" / "run" / "logs"
    logs.mkdir(parents=True)
    (logs.parent / "config.yaml").touch()
    (logs / "engine-0.log").write_text(TRACEBACK)
    (logs / "engine-1.log").write_text("ready\n")
    (logs / "policy-0.log").write_bytes(b"\x1b]0;title\x07\x1b[31mred\x1b[0m \x08\xff\n" * 3000)
    return logs.parent


def test_logs_are_listed_with_their_sizes_and_last_lines(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "error.log").write_text("KeyError: 1\n")
    assert main(["logs"]) == 0
    printed = capsys.readouterr().out
    lines = [line.rstrip() for line in printed.splitlines()[1:]]
    rows = {line.split()[0]: line.split(maxsplit=3)[1:] for line in lines}
    assert rows["engine-0"] == [str(len(TRACEBACK)), "B", "ValueError: No available memory"]
    assert rows["engine-1"] == ["6", "B", "ready"]
    assert rows["policy-0"][:2] == ["76", "KiB"] and rows["policy-0"][2].startswith("red ")
    assert rows["error"] == ["12", "B", "KeyError: 1"]
    assert main(["logs", str(run)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("words", [["engine-1"], ["outputs/run", "engine-1.log"]])
def test_one_log_is_printed(
    words: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", *words]) == 0
    assert capsys.readouterr().out == "ready\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rank", "1"], "rank 1\n"),
        (["engine", "--rank", "1"], "ready\n"),
        (["outputs/run", "engine", "--rank", "1"], "ready\n"),
    ],
)
def test_the_log_of_a_rank_is_found(
    words: list[str], said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = "=== process 7 on 10.77.0.3 starts, now ==="
    (run / "logs" / "policy-1.log").write_text(f"{mark}\nrank 1\n")
    (run / "logs" / "policy-10.log").write_text("rank 10\n")
    assert main(["logs", *words]) == 0
    assert capsys.readouterr().out.endswith(said)
    assert main(["logs"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0][:2] == ["log", "node"] and ["policy-1", "10.77.0.3", "50"] in [
        row[:3] for row in rows
    ]
    assert main(["logs", "--rank", "7"]) == 2
    assert "policy-7: expected one of " in capsys.readouterr().err


def test_a_terminal_obeys_no_log(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "policy"]) == 0
    printed = capsys.readouterr().out
    assert printed == "red \\x08\ufffd\n" * 3000


def test_no_log_shows_a_secret(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the run goes on, which masks them in the files later."""
    monkeypatch.setenv("SOME_TOKEN", "correct-horse-battery")
    (run / "logs" / "engine-1.log").write_text("a correct-horse-battery\napi_key=abcdefgh1234\n")
    for words in (["engine-1"], []):
        assert main(["logs", *words]) == 0
        shown = capsys.readouterr().out
        assert "correct-horse" not in shown and "abcdefgh1234" not in shown
        assert "[redacted]" in shown


def test_the_last_error_of_each(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--errors"]) == 0
    shown = capsys.readouterr().out
    assert "engine-0: ValueError: No available memory\n  at vllm/v1/core/kv_cache_u" in shown
    assert "engine-1: no error\n" in shown
    assert main(["logs", "engine", "-e"]) == 0
    assert "policy-0" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["engin-0"], "engin-0: expected one of engine-0, engine-1, policy-0"),
        (["engine"], "expected the name of one log, found engine-0, engine-1"),
        (["a", "b", "c"], "expected RUN and WHO at most, found 3 words"),
        (["outputs/no", "engine-0"], "outputs/no: expected the folder of a run"),
        (["outputs/no"], "outputs/no: expected the folder of a run"),
        (["--errors", "--follow"], "expected one of --follow and --errors, found both"),
    ],
)
def test_what_is_not_there(
    words: list[str], answer: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", *words]) == 2
    assert answer in capsys.readouterr().err


def test_a_run_without_logs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (run / "logs").iterdir():
        file.unlink()
    assert main(["logs"]) == 2
    assert "found none: the run ended before it started a worker" in capsys.readouterr().err


def test_a_log_that_was_cut_is_followed_from_its_last_lines(tmp_path: Path) -> None:
    log, over = tmp_path / "reward-0.log", iter([False, False, True])
    log.write_text("".join(f"{i}\n" for i in range(1000)))
    lines = new_text({"reward-0": log}, lambda: next(over))
    assert next(lines)[1].endswith("998\n999")
    log.write_text("=== cut ===\n1000\n")
    assert next(lines) == ("reward-0", "=== cut ===\n1000")


def test_a_log_is_followed_until_the_run_ends(run: Path) -> None:
    command = [sys.executable, "-m", "rltrain.cli.app", "logs", "engine", "--follow"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=PIPE, text=True, env=environment) as process:
        assert process.stdout
        head = [process.stdout.readline() for _ in range(7)]
        assert head[-1] == "engine-1: ready\n" and head[0].startswith("engine-0: === process 7")
        with (run / "logs" / "engine-1.log").open("a") as log:
            log.write("half a ")
            log.flush()
            log.write("\x1b[2Jline\n")
        assert process.stdout.readline() == "engine-1: half a line\n"
        with (run / "logs" / "engine-0.log").open("a") as log:
            log.write("last words\n")
        (run / "outcome.json").write_text("{}")
        assert process.stdout.read() == "engine-0: last words\n"
        assert process.wait(10) == 0
