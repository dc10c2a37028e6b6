"""``rltrain report`` and ``rltrain dashboard``: pages about a finished run.

Jinja and wandb are imported by the command that needs them.
"""

import sys
from pathlib import Path


def report(run: Path) -> int:
    """Write report.html of ``run`` from the files there."""
    from rltrain.tracking.report import write_report

    sys.stdout.write(f"{write_report(run)}\n")
    return 0


def dashboard(name: str) -> int:
    """Save our wandb dashboard as a view of ENTITY/PROJECT."""
    from rltrain.tracking.wandb import save_dashboard

    entity, _, project = name.partition("/")
    if not entity or not project or "/" in project:
        raise ValueError(f"expected ENTITY/PROJECT of wandb, found {name!r}")
    sys.stdout.write(f"{save_dashboard(entity, project)}\n")
    return 0
