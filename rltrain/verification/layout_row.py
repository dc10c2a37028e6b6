"""One row of the table of `rltrain verify`, and its file."""

import json
from dataclasses import dataclass
from pathlib import Path

from rltrain.verification.layout_case import LayoutCase

NATIVE, RECORDED, PERTURBED = "native", "recorded", "perturbed"


@dataclass(frozen=True)
class Row:
    """Largest error relative to the largest entry of what one rank computes."""

    native: dict[str, float]  # of logits, loss, and the worst gradient
    recorded: dict[str, float]
    perturbed: dict[str, float]
    worst_gradient: str
    wrong_records: int  # entries of the recorded routes that differ from one rank's
    num_forwards: int  # of routers over all micro-batches of a pass, each seen to happen
    num_reruns: int
    seconds: float


def result_file(folder: Path, case: LayoutCase) -> Path:
    return folder / f"{case.name}.json"


def read_row(file: Path) -> Row:
    return Row(**json.loads(file.read_text()))
