"""Malformed inputs by the thousand: each is taken or refused in words, and nothing else.

    python -m tests.reliability.fuzz --count 10000 --json FILE [--only checkpoints]

A case is made from its number alone, so a failure can be repeated: `--only KIND --first NUMBER
--count 1`.
"""

import argparse
import json
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.reliability import fuzz_checkpoints, fuzz_configs, fuzz_data, fuzz_engine, fuzz_rewards

Case = Callable[[random.Random], str]
"""Tries one input and returns what became of it. It raises where that must not be."""

KINDS: dict[str, Callable[[Path], Case]] = {
    "configurations": fuzz_configs.make,
    "command lines": fuzz_configs.make_command_lines,
    "JSONL": fuzz_data.make_jsonl,
    "Parquet": fuzz_data.make_parquet,
    "checkpoint records": fuzz_checkpoints.make_records,
    "checkpoint tensors": fuzz_checkpoints.make_tensors,
    "engine routes": fuzz_engine.make_routes,
    "engine completions": fuzz_engine.make_completions,
    "reward messages": fuzz_rewards.make,
}
COSTLY = {"command lines": 20}
"""Of these, one case where others have so many: Hydra composes each."""
MOST_SHOWN = 3


@dataclass
class Report:
    """What became of the cases of one kind."""

    kind: str
    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run(kind: str, count: int, first: int = 0) -> Report:
    report, began = Report(kind), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try_one = KINDS[kind](Path(folder))
        logging.disable(logging.WARNING)
        for number in range(first, first + count):
            report.cases += 1
            try:
                report.outcomes[try_one(random.Random(f"{kind} {number}"))] += 1
            except Exception:  # what must not be: it is counted and shown
                report.failures.append(f"{number}: {traceback.format_exc()}")
    logging.disable(logging.NOTSET)
    report.seconds = round(time.monotonic() - began, 1)
    return report


def table(reports: list[Report]) -> str:
    lines = ["| inputs | cases | outcomes | failures | s |", "|" + "---|" * 5]
    for one in reports:
        outcomes = ", ".join(f"{count} {name}" for name, count in one.outcomes.most_common())
        lines.append(
            f"| {one.kind} | {one.cases} | {outcomes} | {len(one.failures)} | {one.seconds:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", choices=list(KINDS), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    reports = []
    for kind in options.only or KINDS:
        count = -(-options.count // COSTLY.get(kind, 1))
        reports.append(run(kind, count, options.first))
        sys.stderr.write(f"{kind}: {reports[-1].cases}, {len(reports[-1].failures)} failures\n")
    sys.stdout.write(table(reports) + "\n")
    for report in reports:
        for failure in report.failures[:MOST_SHOWN]:
            sys.stdout.write(f"\n{report.kind} {failure}\n")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([vars(one) for one in reports], indent=1) + "\n")
    return int(any(report.failures for report in reports))


if __name__ == "__main__":
    sys.exit(main())
