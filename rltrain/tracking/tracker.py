"""Where a run's numbers go: one call per step writes them to every place.

The files come first, and their errors end the run. Other trackers get copies.

The run folder gets versions.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, links.jsonl,
schedule.jsonl, alerts.jsonl, timeline.json, outcome.json, report.html and, on GPUs, gpus.csv. The
report is written from the others, but for the timeline, and config.yaml, also when the run failed.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rltrain.actors.call_limits import LIMITS
from rltrain.actors.interrupts import signal_name
from rltrain.actors.outcome import OUTCOME, record
from rltrain.config.durable import write_durably
from rltrain.config.redact import Redactor, redacted, redacted_text
from rltrain.config.trainer import TrackingConfig
from rltrain.planning.roofline import describe_bottleneck
from rltrain.tracking.alerts import Alert, Watch
from rltrain.tracking.backends import Rows, State, start_copies
from rltrain.tracking.gpus import Listen, NodeGpuLog, read_gpus, start_gpu_log
from rltrain.tracking.jsonl import JsonlWriter, read_jsonl
from rltrain.tracking.metrics import check_metrics
from rltrain.tracking.progress import ProgressLines, RunProgress
from rltrain.tracking.report import write_report
from rltrain.tracking.timeline import Timeline

logger = logging.getLogger(__name__)

PER_TOKEN = frozenset(
    {"tokens", "rollout_logprobs", "old_logprobs", "ratio", "flipped", "loss_mask"}
)
"""The keys of a line of rollouts.jsonl that hold a list."""
SAMPLE_COLUMNS = ("prompt", "response", "answer", "reward", "finish_reason")


class Tracker:
    """Composes the files, the other trackers, the progress line and the report of one run.

        with Tracker(run_dir, config.tracking, config.model_dump(mode="json"), versions,
                     num_steps=60) as tracker:
            tracker.log(step, {"reward/mean": 0.4})
            tracker.samples(step, rows)

    Args:
        run_dir: exists and is writable.
        config: the resolved configuration as plain data, for other trackers; secrets are redacted.
        versions: what ran and on what, name to text, for versions.json and the report's header.
        num_steps: steps of the whole run, for the ETA. Steps count from 1; what is measured before
            the first is logged as step 0.
        first_step: 0 starts afresh; k + 1 resumes a run whose checkpoint is of step k, and lines
            of the .jsonl files at or past it are dropped; gpus.csv begins anew.
        progress: shows the steps, and is closed with the rest; log lines where it is None.
        gpus: those of the run, by NVML index or UUID; none are sampled where it is empty.
        node_gpus: how to hear of those on the nodes of a cluster, see `NodeGpuLog`; None: they are
            sampled here.

    Raises:
        OSError: when the run folder cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        tracking: TrackingConfig,
        config: Mapping[str, Any],
        versions: Mapping[str, str],
        *,
        num_steps: int,
        first_step: int = 0,
        gpus: Sequence[str] = (),
        node_gpus: Listen | None = None,
        progress: RunProgress | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._num_samples = tracking.num_samples
        (run_dir / OUTCOME).unlink(missing_ok=True)
        tracking = TrackingConfig.model_validate(redacted(tracking.model_dump()))
        self._redactor = Redactor()
        _write_versions(run_dir / "versions.json", redacted(versions), first_step)
        self._metrics = JsonlWriter(run_dir / "metrics.jsonl", first_step)
        self._rollouts = JsonlWriter(run_dir / "rollouts.jsonl", first_step)
        self._links = JsonlWriter(run_dir / "links.jsonl", first_step)
        self._schedule = JsonlWriter(run_dir / "schedule.jsonl", first_step)
        self._alerts = JsonlWriter(run_dir / "alerts.jsonl", first_step)
        rows, raised = (read_jsonl(run_dir / f"{name}.jsonl") for name in ("metrics", "alerts"))
        self.lacks_row = first_step > 0 and all(row["step"] != first_step - 1 for row in rows)
        """Whether a killed run left the step before ``first_step`` without metrics."""
        # They are of the evaluation, which precedes the row and is repeated.
        samples_from = first_step - 1 if self.lacks_row else first_step
        self._samples = JsonlWriter(run_dir / "samples.jsonl", samples_from)
        # The metrics last: their row says that a step has all its lines.
        others = [self._rollouts, self._links, self._schedule, self._alerts, self._samples]
        self._writers = [*others, self._metrics]
        self.timeline = Timeline(run_dir / "timeline.json", first_step)
        self._watch = Watch(tracking.alerts, rows, raised)
        self._copies = start_copies(run_dir, tracking, redacted(config), first_step)
        self._progress = progress or ProgressLines(num_steps)
        if first_step > 0:
            self._progress.begin_after(first_step - 1)
        file = run_dir / "gpus.csv"
        self._gpus = NodeGpuLog(file, node_gpus) if node_gpus else start_gpu_log(file, gpus)
        self._finished = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log all numbers of one step. Call it once per step.

        Raises:
            ValueError: a name that is not in the catalogue, or a value that is not a number.
        """
        if self._gpus is not None:
            metrics = {**metrics, **self._gpus.metrics()}
        check_metrics(metrics)
        self._metrics.write(step, metrics)
        self.timeline.end_step()
        for copy in self._copies:
            copy.log(step, metrics)
        self._progress.step(step, metrics)
        for alert in self._watch.take(step, metrics):
            self._alert(alert)

    def _alert(self, alert: Alert) -> None:
        self._alerts.write(alert.step, alert.row())
        logger.warning("%s since step %d: %s", alert.title, alert.since, alert.text)
        for copy in self._copies:
            copy.alert(alert.step, alert.kind, f"Since step {alert.since}: {alert.text}")

    def sync(self) -> None:
        """What was logged survives a power cut from here on."""
        for writer in self._writers:
            writer.sync()

    def phase(self, name: str | None) -> None:
        """What the run does from now on, for whoever watches and waits."""
        LIMITS.phase = name
        self.timeline.phase(name)
        self._progress.phase(name)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the first ``tracking.num_samples`` rollouts, each with all of ``SAMPLE_COLUMNS``."""
        kept = [self._redactor.known(_sample(row)) for row in rows[: self._num_samples]]
        for row in kept:
            self._samples.write(step, row)
        self._copy_table(step, "samples", kept)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep training rollouts, token by token (docs/tracking.md). Call it before `log`."""
        rows = [self._redactor.known(row) for row in rows]
        for row in rows:
            self._rollouts.write(step, row)
        self._copy_table(step, "rollouts", [_without_tokens(row) for row in rows])

    def links(self, step: int, what: str, by_link: Mapping[tuple[str, str], int]) -> None:
        """Keep the bytes that went from one node to another, by (from, to).

        Args:
            what: was sent, e.g. ``routes``
        """
        for (source, to), size in by_link.items():
            self._links.write(step, {"what": what, "from": source, "to": to, "bytes": size})

    def schedule(self, step: int, event: Mapping[str, Any]) -> None:
        """Keep when the batch of a step was started, or that it was trained on."""
        self._schedule.write(step, event)

    def _copy_table(self, step: int, table: str, rows: Rows) -> None:
        if rows:
            for copy in self._copies:
                copy.samples(step, table, rows)

    def invariants(self, step: int, checks: Sequence[Mapping[str, str]]) -> None:
        """Keep the checks of the first step for the report."""
        text = json.dumps({"step": step, "checks": list(checks)}, indent=2)
        _write(self.run_dir / "invariants.json", text)

    def finish(self, error: BaseException | None = None) -> None:
        """Close everything and write report.html; call it with the error that ended the run.

        Raises:
            OSError: a file that the run needs could not be written; not where an error ended it.
        """
        if self._finished:
            return
        self._finished = True
        try:
            self._close(error)
        except (OSError, ValueError) as failure:
            if error is None:
                raise
            logger.warning("after the error that ended the run: %s", failure)

    def _close(self, error: BaseException | None) -> None:
        # The stack runs each of these, last in first out, whatever the others raise.
        with ExitStack() as stack:
            stack.callback(_spared, "report.html", self._write_report)
            stack.callback(_spared, "the line about time", self._say_where_time_goes)
            stack.callback(self._finish_copies, state_of(error))
            stack.callback(write_outcome, self.run_dir, error)
            for writer in self._writers:
                stack.callback(writer.close)
            stack.callback(self.timeline.close, state_of(error))
            stack.callback(self._progress.close)
            if self._gpus is not None:
                stack.callback(_spared, "gpus.csv", self._gpus.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish(error)

    def _finish_copies(self, state: State) -> None:
        if self._copies:
            rows = read_jsonl(self.run_dir / "metrics.jsonl")
            for copy in self._copies:
                copy.finish(rows, state)

    def _say_where_time_goes(self) -> None:
        names = [sample.name for sample in read_gpus(self.run_dir / "gpus.csv")]
        line = describe_bottleneck(
            read_jsonl(self.run_dir / "metrics.jsonl"), names[0] if names else None
        )
        if line:
            logger.info("%s", line)

    def _write_report(self) -> None:
        logger.info("report: %s", write_report(self.run_dir))


def _spared(what: str, act: Callable[[], None]) -> None:
    """Do what the run can do without."""
    try:
        act()
    except (OSError, ValueError) as error:
        logger.warning("no %s: %s", what, error)


def _write_versions(path: Path, versions: Mapping[str, str], first_step: int) -> None:
    """``resumed_after_steps`` gathers the steps at which the run was taken up again."""
    facts = {"started": datetime.now(UTC).isoformat(timespec="seconds"), **versions}
    if first_step > 0:
        resumed = str(read_facts(path).get("resumed_after_steps", "")).split(", ")
        earlier = [step for step in resumed if step.isdigit() and int(step) < first_step - 1]
        facts["resumed_after_steps"] = ", ".join([*earlier, str(first_step - 1)])
    _write(path, json.dumps(facts, indent=2))


def read_facts(path: Path) -> Mapping[str, Any]:
    """A JSON object of the run's folder; empty where there is none, or only a part of one."""
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, Mapping) else {}


def state_of(error: BaseException | None) -> State:
    """How a run ended that this error ended."""
    if error is None:
        return "finished"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def write_outcome(run_dir: Path, error: BaseException | None) -> None:
    """Write outcome.json: how a run ended, after which step, and by which error."""
    said = None if error is None else redacted_text(_named(error), os.environ)
    record(run_dir, state_of(error), last_step(run_dir), said)


def last_step(run_dir: Path) -> int | None:
    """The last step in metrics.jsonl, 0 for what is measured before the first; None without one."""
    path = run_dir / "metrics.jsonl"
    rows = read_jsonl(path) if path.is_file() else []
    return int(rows[-1]["step"]) if rows else None


def _named(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, KeyboardInterrupt):
        return text or signal_name()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    if set(row) != set(SAMPLE_COLUMNS):
        raise ValueError(f"a sample needs {', '.join(SAMPLE_COLUMNS)}; found {', '.join(row)}")
    texts = {name: str(row[name]) for name in SAMPLE_COLUMNS if name != "reward"}
    reward = None if row["reward"] is None else float(row["reward"])
    return {name: reward if name == "reward" else texts[name] for name in SAMPLE_COLUMNS}


def _without_tokens(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of rollouts.jsonl as a row of a table: trackers have no view of single tokens."""
    texts = {"answer": str(row["answer"]), "reward_parts": json.dumps(row["reward_parts"])}
    return {name: value for name, value in row.items() if name not in PER_TOKEN} | texts


def _write(path: Path, text: str) -> None:
    write_durably(path, text + "\n")
