"""``rltrain report`` and ``rltrain dashboard``: pages about a finished run.

Jinja and wandb are imported by the command that needs them.
"""

import sys
from pathlib import Path

OF_A_RUN = ("config.yaml", "metrics.jsonl", "outcome.json")


def report(run: Path) -> int:
    """Write report.html of ``run`` from the files there.

    Raises:
        ValueError: nothing in the folder is of a run; a page about nothing is not written.
    """
    from rltrain.tracking.report import write_report

    if not any((run / name).is_file() for name in OF_A_RUN):
        runs = sorted(path.parent for path in run.glob("*/config.yaml"))
        inside = f". It holds runs: {', '.join(map(str, runs[-3:]))}" if runs else ""
        raise ValueError(
            f"{run} is no run folder: expected {', '.join(OF_A_RUN)} in it{inside} [RL7001]"
        )

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
