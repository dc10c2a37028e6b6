"""The frame of every page: one file that loads nothing and runs no script but its own two.

A content security policy allows the chart library and our script by their hash, and nothing else:
text of a model or a file cannot run, even if it were taken for markup.
"""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

FOLDER = Path(__file__).parent
SCRIPTS = ("decode.js", "charts.js", "heatmaps.js", "zoom.js", "samples.js", "page.js")


def write_page(path: Path, template: str, values: Mapping[str, Any]) -> Path:
    """Render a template with our scripts and style, and put it in place in one rename.

    ``values["data"]`` is the JSON that the scripts read.
    """
    chart_library, script = library(), own_script()
    page = (
        _environment()
        .get_template(template)
        .render(
            {**values, "data": json_script(values["data"])},
            policy=content_policy((chart_library, script)),
            style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
            library=Markup(chart_library),
            script=Markup(script),
        )
    )
    beside = path.with_name(f"{path.name}.partial")
    # A lone surrogate, which JSON can hold, is written as a question mark.
    beside.write_text(page, encoding="utf-8", errors="replace")
    os.replace(beside, path)
    return path


@cache
def library() -> str:
    return (FOLDER / "vendor" / "echarts.min.js").read_text(encoding="utf-8")


@cache
def own_script() -> str:
    parts = [(FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def content_policy(scripts: Sequence[str]) -> str:
    """The page may run these scripts, and load nothing."""
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def json_script(data: Any) -> Markup:
    """JSON for a script element: no text in it can end the element or start a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = format_number
    return environment


def format_number(value: float | None) -> str:
    """A value the way a person writes it: whole numbers whole, others with four digits."""
    if value is None:
        return "not finite"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.4g}"
