"""Writes what tests measured of the models into the table of docs/models.md.

    RLTRAIN_MEASURED=measured.json pytest tests/distributed/test_families.py \\
        tests/integration/test_family_routes.py tests/integration/test_family_runs.py
    python -m tests.models_table measured.json
"""

import json
import sys
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end of measured -->\n"
LAYOUTS = ("one rank", "tp2 ep2", "pp2")
COLUMNS = (
    "model",
    "logits: one rank, tp2 ep2, pp2",
    "gradients: the same",
    "export",
    "fp32 engine: routes that differ",
    "its log-probabilities: mean, largest difference",
    "bf16 engine: routes that differ",
    "k3 native",
    "k3 with R3",
    "GRPO, 2 steps: largest k3",
)


def row(name: str, found: dict[str, Any]) -> list[str]:
    def errors(kind: str) -> str:
        return ", ".join(f"{found[f'{kind} {layout}']:.0e}" for layout in LAYOUTS)

    def maybe(kind: str, text: str) -> str:
        """``-`` for what this model has not, or where it was not run."""
        return text.format(found[kind]) if kind in found else "-"

    return [
        name,
        errors("logits"),
        errors("gradients"),
        found["export"],
        maybe("flips float32", "{:.2%}"),
        maybe("mismatch float32", "{0[mean]:.0e}, {0[largest]:.0e}"),
        maybe("flips bfloat16", "{:.2%}"),
        maybe("mismatch native", "{0[k3]:.1e}"),
        maybe("mismatch replayed", "{0[k3]:.1e}"),
        maybe("grpo k3", "{:.0e}"),
    ]


def table(measured: dict[str, dict[str, Any]]) -> str:
    """Models with experts first."""
    names = sorted(measured, key=lambda name: ("flips bfloat16" not in measured[name], name))
    rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
    rows += [row(name, measured[name]) for name in names]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def main(file: str) -> None:
    measured = json.loads(Path(file).read_text())
    before, rest = DOCUMENT.read_text().split(BEGIN)
    _, after = rest.split(END)
    DOCUMENT.write_text(before + BEGIN + table(measured) + END + after)


if __name__ == "__main__":
    main(sys.argv[1])
