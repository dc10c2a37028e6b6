"""A tracker that fails costs its copy and nothing else."""

import sys
import threading
import tomllib
from pathlib import Path

import pytest

from rltrain.config.trainer import TrackingConfig
from rltrain.tracking import backends
from rltrain.tracking.backends import Copy, check_packages
from rltrain.tracking.jsonl import read_jsonl
from rltrain.tracking.tracker import Tracker

ROOT = Path(__file__).parents[3]


class Server:
    """A backend that is down when it is told so."""

    def __init__(self):
        self.down = set()
        self.calls = []

    def start(self):
        self._take("start")
        return self

    def log(self, step, metrics):
        self._take("log", step)

    def samples(self, step, table, rows):
        self._take("samples", step)

    def alert(self, step, kind, text):
        self._take("alert", step)

    def finish(self, rows, state):
        self._take("finish", state)

    def _take(self, call, *rest):
        self.calls.append((call, *rest))
        if call in self.down:
            raise ConnectionError(f"no route to {call}")


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("rltrain.tracking.backends.time.monotonic", lambda: now[0])
    return now


def test_a_server_that_is_down_for_a_while_is_one_warning(clock, caplog):
    server = Server()
    copy = Copy("mlflow", server.start)
    copy.log(1, {})
    server.down = {"log"}
    for step in range(2, 8):
        copy.log(step, {})
        copy.samples(step, "samples", [])
    assert len(caplog.records) == 1
    assert "mlflow failed (log: ConnectionError: no route to log). The run goes on" in caplog.text
    assert [call for call in server.calls if call[0] == "log"] == [("log", 1), ("log", 2)]
    assert sum(call[0] == "samples" for call in server.calls) == 6  # what works goes on
    clock[0] += 61
    server.down = set()
    copy.log(9, {})
    copy.finish([], "finished")
    assert server.calls[-2:] == [("log", 9), ("finish", "finished")]
    assert "mlflow missed 6 calls" in caplog.text


def test_a_server_that_is_down_at_the_start_is_tried_again(clock, caplog):
    server = Server()
    server.down = {"start"}
    copy = Copy("mlflow", server.start)
    copy.log(1, {})
    clock[0] += 61
    server.down = set()
    copy.log(2, {})
    copy.finish([], "failed")
    assert server.calls == [("start",), ("start",), ("log", 2), ("finish", "failed")]
    assert "mlflow missed 1 calls" in caplog.text


def test_a_server_that_never_starts_is_not_finished(caplog):
    server = Server()
    server.down = {"start"}
    copy = Copy("mlflow", server.start)
    for step in range(3):
        copy.log(step, {})
    copy.finish([], "finished")
    assert server.calls == [("start",)]
    assert "mlflow missed 3 calls" in caplog.text


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_a_server_that_never_answers_is_called_once(call, monkeypatch, caplog):
    server, answer = Server(), threading.Event()
    monkeypatch.setitem(backends.LIMITS_S, call, 0.2)
    monkeypatch.setattr(server, call, lambda *given: answer.wait(5.0))
    copy = Copy("mlflow", server.start)
    copy.log(1, {})
    copy.log(2, {})
    copy.finish([], "finished")
    answer.set()
    assert "mlflow is not called any more after 0 s without an answer" in caplog.text
    assert len([name for name, *_ in server.calls if name == "log"]) == 2 * (call == "finish")
    missed = {"start": 2, "log": 3, "finish": 1}[call]  # with the one that was waited for
    assert f"mlflow missed {missed} calls" in caplog.text


def test_the_run_and_its_files_go_on_without_the_tracker(tmp_path, monkeypatch, caplog):
    """A real backend whose server does not answer."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracking = TrackingConfig(backends=["mlflow"])
    with Tracker(tmp_path, tracking, {"a": 1}, {}, num_steps=4) as tracker:
        for step in range(3):
            tracker.log(step, {"reward/mean": 0.5})
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3
    assert [r for r in caplog.messages if r.startswith("mlflow failed (start")]
    assert "mlflow missed 3 calls" in caplog.text


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_library_is_named_with_its_extra(name, monkeypatch):
    check_packages(TrackingConfig(backends=[name]))
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"has {name}, .* pip install 'rltrain\[{name}\]'"):
        check_packages(TrackingConfig(backends=[name]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert name in project["optional-dependencies"]
    check_packages(TrackingConfig(backends=[]))


def test_a_folder_of_that_name_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "mlflow").mkdir()  # what a run leaves
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'rltrain\[mlflow\]'"):
        check_packages(TrackingConfig(backends=["mlflow"]))
