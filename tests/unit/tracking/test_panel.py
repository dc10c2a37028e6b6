"""The live panel: what it shows, in any terminal, and what does not break it."""

import io
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.eta import Eta
from rltrain.tracking.panel import PHASES, LivePanel
from rltrain.tracking.tracker import Tracker

ROOT = Path(__file__).parents[3]
COLOUR = r"\x1b\[(?:[0-9;]*;)?(?:3|4|9|10)[0-9](?:;[0-9;]*)?m"
METRICS = {
    "reward/mean": 0.4127,
    "eval/accuracy": 0.482,
    "mismatch/k3": 3.1e-5,
    "routing/coverage": 1.0,
    "throughput/tokens_per_second": 12345.6,
    "time/step": 5.21,
}


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, color_system="truecolor")


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(panel: LivePanel, width: int = 80, **options: object) -> str:
    """The panel as it is drawn now."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, **options)
    console.print(panel.render())
    return written(console)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture
def panel(console: Console) -> Iterator[LivePanel]:
    with closing(LivePanel(console, "rltrain  outputs/run", 60, Eta(60))) as panel:
        yield panel


def test_it_shows_the_phase_the_step_and_what_counts(panel: LivePanel) -> None:
    panel.phase("start_engines")
    assert "starting engines  0s" in plain(shown(panel))
    panel.step(0, {})
    panel.step(1, METRICS)
    panel.phase("generate")
    text = plain(shown(panel))
    for part in (
        "rltrain  outputs/run",
        "step 1 of 60",
        "0s left",
        "generating  0s",
        "reward 0.413",
        "accuracy 48.2%",
        "tokens/s 12,346",
        "mismatch k3 3.1e-05",
        "coverage 1",
    ):
        assert part in text, part
    panel.step(2, {"reward/mean": 0.5})
    text = plain(shown(panel))
    assert "step 2 of 60" in text and "reward 0.500" in text
    assert "accuracy 48.2%" in text  # until the next evaluation


def test_a_resumed_run_begins_at_its_checkpoint(panel: LivePanel, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_steps": 60, "progress": panel}
    with Tracker(tmp_path, TrackingConfig(backends=[]), {}, {}, first_step=13, **options):
        assert "step 12 of 60" in plain(shown(panel))


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_it_is_as_wide_as_the_terminal_and_no_wider(panel: LivePanel, width: int) -> None:
    panel.step(1, METRICS)
    logging.getLogger("rltrain").warning("a long warning " * 30)
    panel.phase("native_logprobs")
    lines = plain(shown(panel, width)).splitlines()
    assert {len(line) for line in lines} == {width}
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", " ".join(lines)).split())
    assert "reward 0.413" in text and "! a long w" in text


def test_without_colours(panel: LivePanel, monkeypatch: pytest.MonkeyPatch) -> None:
    panel.step(1, METRICS)
    assert re.search(COLOUR, shown(panel, color_system="truecolor"))
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(panel, color_system="truecolor")
    assert not re.search(COLOUR, text)
    assert "reward 0.413" in plain(text)


def test_lines_of_steps_and_logs_stand_above_it(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each from the beginning of a line on, so that no line of the panel is torn."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    handler = logging.StreamHandler(terminal)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    kept = logging.StreamHandler(io.StringIO())  # a file
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler, kept])
    monkeypatch.setattr(root, "level", logging.INFO)
    with closing(LivePanel(console, "run", 9, Eta(9))) as panel:
        panel.step(1, METRICS)
        logging.getLogger("rltrain").info("[bold]an \x1b[2Jinfo[/bold]")
        logging.getLogger("rltrain").warning("first\nsecond")
        text = plain(shown(panel))
        assert "! first" in text and "second" not in text and "info" not in text
        for number in range(9):
            logging.getLogger("rltrain").warning("number %d", number)
        text = plain(shown(panel))
        assert [number for number in range(9) if f"! number {number}" in text] == [6, 7, 8]
    assert root.handlers == [handler, kept]
    assert terminal.getvalue() == "" and "an" in kept.stream.getvalue()
    lines = plain(written(console)).replace("\r", "\n").splitlines()
    assert "step 1  reward 0.413  accuracy 48.2%  coverage 1  k3 3.1e-05  5.2 s/step" in lines
    assert "INFO [bold]an info[/bold]" in lines
    assert "\x1b[2J" not in written(console)  # which would empty the screen
    assert "WARNING first" in lines and "second" in lines


def test_what_libraries_print_stands_above_it(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with closing(LivePanel(console, "run", 9, Eta(9))):
        print("printed")  # noqa: T201
        sys.stderr.write("warned\n")
    lines = plain(written(console)).replace("\r", "\n").splitlines()
    assert "printed" in lines and "warned" in lines


def test_it_is_gone_when_it_is_closed(console: Console) -> None:
    with closing(LivePanel(console, "run", 9, Eta(9))) as panel:
        panel.step(3, METRICS)
    console.print("after")
    erased = written(console).rpartition("\x1b[?25h")[2]  # the cursor is shown again
    assert plain(erased).split() == ["after"]


def test_every_phase_has_a_name_in_words() -> None:
    source = "".join(p.read_text() for p in (ROOT / "rltrain/controller").rglob("*.py"))
    phases = set(re.findall(r'\.phase\(\s*"(\w+)"', source))
    assert phases and phases <= set(PHASES)


def test_a_log_file_that_is_not_open_yet_is_left_alone(console: Console, tmp_path: Path) -> None:
    waiting = logging.FileHandler(tmp_path / "log", delay=True)
    logging.getLogger().addHandler(waiting)
    try:
        with closing(LivePanel(console, "run", 60, Eta(60))):
            assert waiting in logging.getLogger().handlers
    finally:
        logging.getLogger().removeHandler(waiting)
