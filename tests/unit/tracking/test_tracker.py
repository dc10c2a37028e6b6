"""The tracker: every place gets every number, and a failing run still leaves its report."""

import io
import json

import pytest
from rich.console import Console

from rltrain.config.redact import REDACTED, redacted
from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.environment import describe_environment
from rltrain.tracking.jsonl import read_jsonl
from rltrain.tracking.progress import TransferBar, key_numbers
from rltrain.tracking.tracker import SAMPLE_COLUMNS, Tracker
from tests.unit.tracking.conftest import KNOWN
from tests.unit.tracking.conftest import SECRET as PLANTED

TRACKING = TrackingConfig(backends=[], num_samples=2)
SAMPLE = dict.fromkeys(SAMPLE_COLUMNS, "x") | {"reward": 1}
ROLLOUT = {"group": 0, "answer": 7, "reward_parts": {"a": 0.5}, "tokens": ["a"], "ratio": None}


def _tracker(folder, **options):
    return Tracker(folder, TRACKING, {"a": 1}, {"torch": "2"}, num_steps=4, **options)


def test_a_run_leaves_its_files(tmp_path):
    with _tracker(tmp_path) as tracker:
        tracker.log(0, {"reward/mean": 0.5})
        tracker.samples(0, [SAMPLE] * 5)
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 0, "reward/mean": 0.5}]
    assert [row["reward"] for row in read_jsonl(tmp_path / "samples.jsonl")] == [1.0, 1.0]
    assert json.loads((tmp_path / "versions.json").read_text())["torch"] == "2"
    assert json.loads((tmp_path / "outcome.json").read_text())["state"] == "finished"
    assert (tmp_path / "report.html").exists()


def test_an_error_ends_the_run_with_a_report_and_is_not_swallowed(tmp_path):
    with pytest.raises(RuntimeError, match="engine died"), _tracker(tmp_path) as tracker:
        tracker.log(0, {"reward/mean": 0.5})
        raise RuntimeError("engine died")
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["state"], outcome["error"]) == ("failed", "RuntimeError: engine died")
    assert "engine died" in (tmp_path / "report.html").read_text()


def test_a_step_with_an_unknown_name_is_not_logged_at_all(tmp_path):
    with _tracker(tmp_path) as tracker:
        with pytest.raises(ValueError, match="nearest is 'reward/mean'"):
            tracker.log(0, {"reward/std": 0.1, "reward/men": 0.5})
        assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_a_sample_without_all_columns_is_refused(tmp_path):
    with _tracker(tmp_path) as tracker, pytest.raises(ValueError, match="needs prompt, response"):
        tracker.samples(0, [{"prompt": "x"}])


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path):
    with _tracker(tmp_path) as tracker:
        for step in range(3):
            tracker.log(step, {"reward/mean": 0.1})
            tracker.samples(step, [SAMPLE])
            tracker.rollouts(step, [ROLLOUT])
            tracker.links(step, "routes", {("10.0.0.2", "10.0.0.3"): 4096})
    with _tracker(tmp_path, first_step=1) as tracker:
        assert not (tmp_path / "outcome.json").exists()
        tracker.log(1, {"reward/mean": 0.9})
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(0, 0.1), (1, 0.9)]
    assert [row["step"] for row in read_jsonl(tmp_path / "samples.jsonl")] == [0]
    assert read_jsonl(tmp_path / "rollouts.jsonl") == [{"step": 0, **ROLLOUT}]
    link = {"step": 0, "what": "routes", "from": "10.0.0.2", "to": "10.0.0.3", "bytes": 4096}
    assert read_jsonl(tmp_path / "links.jsonl") == [link]


@pytest.mark.parametrize("last", [1, 2])
def test_a_step_whose_row_is_missing_is_known_and_its_samples_go(tmp_path, last):
    with _tracker(tmp_path) as tracker:
        for step in range(last):
            tracker.log(step, {"reward/mean": 0.1})
        tracker.samples(1, [SAMPLE])
        tracker.rollouts(1, [ROLLOUT])
    (tmp_path / "versions.json").write_text('{"resumed_aft')
    with _tracker(tmp_path, first_step=2) as tracker:
        assert tracker.lacks_row == (last == 1)
    assert len(read_jsonl(tmp_path / "samples.jsonl")) == last - 1
    assert len(read_jsonl(tmp_path / "rollouts.jsonl")) == 1
    assert json.loads((tmp_path / "versions.json").read_text())["resumed_after_steps"] == "1"


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, "finished"), (KeyboardInterrupt(), "interrupted"), (RuntimeError(), "failed")],
)
def test_how_a_run_ended(tmp_path, error, state):
    _tracker(tmp_path).finish(error)
    assert json.loads((tmp_path / "outcome.json").read_text())["state"] == state


def test_an_alert_is_a_warning_and_a_line_and_not_said_again_after_a_resume(tmp_path, caplog):
    for first_step in (0, 3):
        with _tracker(tmp_path, first_step=first_step) as tracker:
            for step in range(first_step, first_step + 3):
                tracker.log(step, {"routing/coverage": 0.5 if step else 1.0})
    (line,) = read_jsonl(tmp_path / "alerts.jsonl")
    assert (line["step"], line["since"], line["kind"]) == (1, 1, "missing_routes")
    assert (line["metric"], line["value"], line["expected"]) == ("routing/coverage", 0.5, 1.0)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("missing routes since step 1: routing/coverage is 0.5: ")


METRICS = {"reward/mean": 0.4127, "eval/accuracy": 0.482, "mismatch/k3": 3.1e-5, "time/step": 5.21}


def test_without_a_terminal_each_step_is_a_log_line(tmp_path, caplog):
    caplog.set_level("INFO", logger="rltrain.tracking.progress")
    with _tracker(tmp_path) as tracker:
        tracker.log(0, METRICS)
        tracker.log(1, METRICS)
    line, later = (r.getMessage() for r in caplog.records if r.name == "rltrain.tracking.progress")
    assert later.endswith("(of 4, 0s left)")
    assert line.startswith("step 0  reward 0.413  accuracy 48.2%  k3 3.1e-05  5.2 s/step  (of 4)")


def test_key_numbers_leave_out_what_was_not_measured():
    assert key_numbers({"routing/coverage": 1.0}) == "coverage 1"
    assert key_numbers({}) == ""


SECRET = "s3cr3t-value"


def test_secrets_are_taken_out_wherever_they_hide():
    config = {
        "wandb_api_key": SECRET,
        "hub": {"HF_TOKEN": SECRET, "list": [{"password": SECRET}]},
        "tokens": {"auth-token": [SECRET]},
        "path": f"https://user:{SECRET}@host/data",
    }
    clean = redacted(config)
    assert SECRET not in str(clean)
    assert clean["path"] == f"https://{REDACTED}@host/data"
    assert SECRET in str(config)


def test_what_only_sounds_secret_stays():
    config = {
        "max_response_tokens": 48,
        "tokenizer": "path",
        "aggregation": "token_mean",
        "pad_token": "<pad>",
        "max_tokens_per_micro_batch": 4096,
        "key": "prompt",
    }
    assert redacted(config) == config


def test_no_file_of_a_run_holds_a_secret(copied_run):
    """The command line, the configuration, a sample, a version and an error had it."""
    files = [file for file in copied_run.rglob("*") if file.is_file()]
    assert {"report.html", "samples.jsonl", "rollouts.jsonl", "outcome.json", "versions.json"} <= {
        file.name for file in files
    }
    assert any(file.suffix == ".wandb" for file in files)
    for file in files:
        content = file.read_bytes()
        assert PLANTED.encode() not in content and KNOWN.encode() not in content, file


def test_the_environment_names_what_computes():
    found = describe_environment()
    assert {"python", "torch", "machine"} <= set(found)
    assert "GiB" in found["machine"]


def test_the_transfer_bar_tells_speed_and_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 10.0, 11.0, 20.0, 20.0])
    monkeypatch.setattr("rltrain.tracking.progress.time.monotonic", lambda: next(times))
    output = io.StringIO()
    with TransferBar("import", 1000, Console(file=output, force_terminal=False)) as bar:
        bar.advance(200, 2 * 10**9)
        bar.advance(200, 2 * 10**9)  # too soon for another line
        bar.advance(600, 6 * 10**9)
    # 10 s for 200 elements; 800 are left.
    assert output.getvalue().splitlines() == [
        "import 20%  2.00 GB  200 MB/s  40s left",
        "import 100%  10.00 GB  500 MB/s",
        "import  10.00 GB  500 MB/s  20s",
    ]
