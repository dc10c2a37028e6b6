"""Tries a reward function before a run, and shows what it printed."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rltrain.config.redact import escape_control, strip_terminal_codes
from rltrain.config.reward import RewardConfig
from rltrain.environments.pool import RewardPool
from rltrain.environments.reward_sample import RewardInput, RewardResult

SHOWN_LINES, SHOWN_CHARACTERS = 20, 200
"""Of the output: its last lines, and the first characters of each."""


def dry_run(config: RewardConfig, samples: Sequence[RewardInput]) -> list[RewardResult]:
    """The result of each sample, however many fail. It serves to try a reward before a run.

    What the function printed goes to standard error, at most its last lines.

    Raises:
        ValueError: the reward function cannot be used, or a sample is not plain JSON.
    """
    config = config.model_copy(update={"num_workers": 1, "max_failed_fraction": 1})
    with tempfile.TemporaryDirectory(prefix="rltrain-reward-") as logs:
        try:
            with RewardPool(config, Path(logs)) as pool:
                return pool.score(samples)
        finally:
            sys.stderr.write(_last_output(Path(logs), _what_runs(config)))


def _what_runs(config: RewardConfig) -> str:
    return config.shown if config.components else config.function


def _last_output(logs: Path, function: str) -> str:
    """The end of what the workers printed, without what a terminal would obey; "" for nothing."""
    texts = [file.read_text(errors="replace") for file in sorted(logs.glob("*.log"))]
    lines = escape_control(strip_terminal_codes("".join(texts))).splitlines()
    printed = [line[:SHOWN_CHARACTERS] for line in lines if line.strip() and line[:4] != "=== "]
    if not printed:
        return ""
    shown = printed[-SHOWN_LINES:]
    title = f"output of {function}"
    if len(shown) < len(printed):
        title += f", the last {len(shown)} of {len(printed)} lines"
    return "".join(f"{line}\n" for line in [f"{title}:", *(f"  {line}" for line in shown)])
