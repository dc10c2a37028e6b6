"""TensorBoard: scalars with the catalogue's descriptions, texts, and the dashboard's charts.

Written to ``<run_dir>/tensorboard``. A resumed run writes another file there, and tells TensorBoard
to hide the steps that it repeats.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import scalar

from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.backends import Rows, State
from rltrain.tracking.dashboard import DASHBOARD
from rltrain.tracking.metrics import describe, find_metric

FOLDER = "tensorboard"


def start(
    run_dir: Path, tracking: TrackingConfig, config: Mapping[str, Any], first_step: int
) -> "TensorBoardRun":
    # Always set: readers hide steps at the second such mark, not at the first.
    writer = SummaryWriter(str(run_dir / FOLDER), purge_step=first_step)
    writer.add_custom_scalars(layout())
    text = yaml.safe_dump(dict(config), sort_keys=False)
    writer.add_text("config", _verbatim(text), max(first_step - 1, 0))
    return TensorBoardRun(writer)


class TensorBoardRun:
    """See `rltrain.tracking.backends.Backend`."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer
        self._described: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # In single precision: TensorBoard's data server shows no doubles.
            summary = scalar(name, value)
            if name not in self._described:  # TensorBoard keeps what a tag's first value says
                self._described.add(name)
                metadata = summary.value[0].metadata
                metadata.plugin_data.plugin_name = "scalars"
                metadata.data_class = DATA_CLASS_SCALAR
                metadata.summary_description = describe(find_metric(name))
            self._writer.file_writer.add_summary(summary, step)
        self._writer.flush()

    def samples(self, step: int, table: str, rows: Rows) -> None:
        for number, row in enumerate(rows):
            lines = [f"**{name}**\n\n{_verbatim(value)}" for name, value in row.items()]
            self._writer.add_text(f"{table}/{number}", "\n\n".join(lines), step)
        self._writer.flush()

    def alert(self, step: int, kind: str, text: str) -> None:
        self._writer.add_text(f"alerts/{kind}", _verbatim(text), step)
        self._writer.flush()

    def finish(self, rows: Rows, state: State) -> None:
        self._writer.add_text("outcome", state, rows[-1]["step"] if rows else 0)
        self._writer.close()


def layout() -> dict[str, dict[str, list[Any]]]:
    """The dashboard for the page ``custom scalars``: tags are regular expressions there."""
    return {
        section: {
            panel.title: ["Multiline", [f"^{metric.pattern.pattern}$" for metric in panel.members]]
            for panel in panels
        }
        for section, panels in DASHBOARD.items()
    }


def _verbatim(value: object) -> str:
    """A block of code in Markdown, which no text can end: model output may hold Markdown."""
    return "\n".join(f"    {line}" for line in str(value).split("\n"))
