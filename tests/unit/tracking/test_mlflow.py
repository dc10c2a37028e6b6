"""What MLflow's own client finds of a run that failed and was resumed."""

import json
import math
import os

import pytest
from mlflow import MlflowClient

from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.mlflow import flat, start


@pytest.fixture(scope="module")
def client(copied_run):
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # as `start` sets it
    return MlflowClient((copied_run / "mlflow").as_uri())


@pytest.fixture(scope="module")
def run(client, copied_run):
    """The only one: the resumed run is the same."""
    experiment = client.get_experiment_by_name("p")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (copied_run / "mlflow_run_id").read_text()
    return run


def artifact(client, run, path, folder):
    return open(client.download_artifacts(run.info.run_id, path, str(folder))).read()


def test_metrics_lie_on_the_steps(client, run):
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(0, 0.0), (1, 0.25), (1, 1.25), (2, 1.5)]
    assert run.data.metrics["routing/overlap"] == 0.95
    assert run.data.metrics["routing/overlap.layer_2"] == 0.9
    assert math.isnan(run.data.metrics["policy/grad_norm"])


def test_the_run_has_its_name_its_state_and_its_configuration_without_secrets(run):
    assert (run.info.run_name, run.info.status) == ("two-steps", "FINISHED")
    assert run.data.params["trainer.seed"] == "7"
    assert run.data.params["empty"] == "{}"
    assert "hf_do_not_show" not in str(run.to_dictionary())
    assert run.data.tags["rltrain.resumed_after_step"] == "0"


def test_tables_and_the_catalogue_are_artifacts(client, run, tmp_path):
    table = json.loads(artifact(client, run, "samples/step_000001.json", tmp_path))
    assert len(table["data"]) == 2
    row = dict(zip(table["columns"], table["data"][0], strict=True))
    assert row["response"] == "2 | `**`\n```<b>"
    assert "coverage is 0.5" in artifact(
        client, run, "alerts/step_000000_missing_routes.txt", tmp_path
    )
    rollouts = client.list_artifacts(run.info.run_id, "rollouts")
    assert [info.path[-6:] for info in rollouts] == ["0.json", "1.json", "2.json"]
    assert "| `mismatch/k3` |" in artifact(client, run, "metrics.md", tmp_path)


def test_a_run_that_is_gone_there_goes_on_as_a_new_one(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow_run_id").write_text("0" * 32)
    start(tmp_path, TrackingConfig(), {"a": 1}, 3).finish([], "interrupted")
    client = MlflowClient((tmp_path / "mlflow").as_uri())
    run = client.get_run((tmp_path / "mlflow_run_id").read_text())
    assert run.info.status == "KILLED"
    assert "MLflow has no run 0000" in caplog.text


def test_the_servers_address_is_that_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    (tmp_path / "run").mkdir()
    start(tmp_path / "run", TrackingConfig(), {"a": 1}, 0)
    assert (tmp_path / "server").is_dir() and not (tmp_path / "run" / "mlflow").exists()


def test_a_configuration_is_flat_as_on_the_command_line():
    config = {"trainer": {"steps": 4, "deep": {"a": [1]}}, "empty": {}}
    assert dict(flat(config)) == {"trainer.steps": 4, "trainer.deep.a": [1], "empty": {}}
