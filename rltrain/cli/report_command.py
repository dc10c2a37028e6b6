"""``rltrain report`` and ``rltrain dashboard``: pages about a finished run.

Jinja and wandb are imported by the command that needs them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path


def report(arguments: Sequence[str]) -> int:
    """Write report.html of the run in RUN_DIR from the files there."""
    from rltrain.tracking.report import write_report

    if len(arguments) != 1:
        raise ValueError(f"usage: rltrain report RUN_DIR; got {len(arguments)} arguments")
    sys.stdout.write(f"{write_report(Path(arguments[0]))}\n")
    return 0


def dashboard(arguments: Sequence[str]) -> int:
    """Save our wandb dashboard as a view of ENTITY/PROJECT."""
    from rltrain.tracking.wandb import save_dashboard

    entity, _, project = arguments[0].partition("/") if len(arguments) == 1 else ("", "", "")
    if not entity or not project or "/" in project:
        raise ValueError(f"usage: rltrain dashboard ENTITY/PROJECT; got {' '.join(arguments)!r}")
    sys.stdout.write(f"{save_dashboard(entity, project)}\n")
    return 0
