"""MLflow: metrics, the configuration as parameters, tables as artifacts.

Runs go to the server or folder of ``MLFLOW_TRACKING_URI``, else to ``<run_dir>/mlflow``. The run's
id is kept in ``<run_dir>/mlflow_run_id``, so that a resumed run goes on with it. Steps that a
resumed run repeats appear twice: MLflow cannot delete single values.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from rltrain.config.durable import write_durably
from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.backends import Rows, State
from rltrain.tracking.metrics import document

logger = logging.getLogger(__name__)

FOLDER, RUN_ID = "mlflow", "mlflow_run_id"
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000
"""Limits of one request, and of a parameter's text."""
STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


def start(
    run_dir: Path, tracking: TrackingConfig, config: Mapping[str, Any], first_step: int
) -> "MlflowRun":
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        # A database needs the full package. A folder needs nothing, and MLflow's consent.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = (run_dir / FOLDER).absolute().as_uri()
    # By default a server that is down would stop a step for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    client = MlflowClient(uri)
    run_id = _resumed(client, run_dir, first_step - 1) if first_step else None
    if run_id is None:
        run_id = _created(client, tracking, config)
        write_durably(run_dir / RUN_ID, run_id)
    logger.info("mlflow run %s at %s", run_id, uri)
    return MlflowRun(client, run_id)


def _resumed(client: MlflowClient, run_dir: Path, after: int) -> str | None:
    file = run_dir / RUN_ID
    run_id = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    if not run_id:
        return None
    try:
        client.update_run(run_id, status="RUNNING")
        client.set_tag(run_id, "rltrain.resumed_after_step", str(after))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        logger.warning("MLflow has no run %s any more: this run goes on as a new one", run_id)
        return None
    return run_id


def _created(client: MlflowClient, tracking: TrackingConfig, config: Mapping[str, Any]) -> str:
    experiment = client.get_experiment_by_name(tracking.project)
    experiment_id = (
        client.create_experiment(tracking.project)
        if experiment is None
        else experiment.experiment_id
    )
    run_id = str(client.create_run(experiment_id, run_name=tracking.name).info.run_id)
    params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in flat(config)]
    for n in range(0, len(params), MOST_PARAMS):
        client.log_batch(run_id, params=params[n : n + MOST_PARAMS])
    client.log_text(run_id, document(), "metrics.md")
    return run_id


def key(name: str) -> str:
    """A metric's name in MLflow: ``routing/overlap.layer_3``. In its folders ``routing/overlap`` is
    a file, so nothing can be below it."""
    area, _, rest = name.partition("/")
    return f"{area}/{rest.replace('/', '.')}"


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """``trainer.steps`` and its value, as on the command line; an empty section is one value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class MlflowRun:
    """See `rltrain.tracking.backends.Backend`."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [Metric(key(name), value, now, step) for name, value in metrics.items()]
        for n in range(0, len(values), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=values[n : n + MOST_METRICS])

    def samples(self, step: int, table: str, rows: Rows) -> None:
        # The form in which MLflow's page shows tables.
        columns = list(rows[0])
        data = {"columns": columns, "data": [[row[name] for name in columns] for row in rows]}
        self._client.log_dict(self._run_id, data, f"{table}/step_{step:06}.json")

    def alert(self, step: int, kind: str, text: str) -> None:
        self._client.log_text(self._run_id, f"{text}\n", f"alerts/step_{step:06}_{kind}.txt")

    def finish(self, rows: Rows, state: State) -> None:
        self._client.set_terminated(self._run_id, status=STATUS[state])
