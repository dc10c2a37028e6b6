"""``rltrain doctor``: what of this machine, its packages and a configuration would stop a run."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rltrain.config import Config
from rltrain.controller.doctor.findings import (
    Finding,
    exit_status,
    fail,
    run_check,
    show_finding,
    show_json,
    show_summary,
)


def doctor(arguments: Sequence[str]) -> int:
    """Print one line per check, with a remedy for each problem; the exit status is 1 if a check
    failed.

    Raises:
        ValueError: the command line is wrong.
    """
    parser = argparse.ArgumentParser(prog="rltrain doctor")
    parser.add_argument("overrides", nargs="*", metavar="+recipe=NAME or name=value")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="also train the tiny model for two steps and check what must hold",
    )
    options = parser.parse_intermixed_args(arguments)
    began = time.monotonic()
    findings: list[Finding] = []

    def report(new: Sequence[Finding]) -> None:
        findings.extend(new)
        if not options.json:
            sys.stdout.write("".join(map(show_finding, new)))
            sys.stdout.flush()

    _examine(options, report)
    if options.self_test:
        from rltrain.controller.doctor.self_test import self_test

        report(run_check("self-test", self_test))
    if options.json:
        sys.stdout.write(show_json(findings, os.environ))
    else:
        sys.stdout.write(f"\n{show_summary(findings, time.monotonic() - began)}")
    return exit_status(findings)


def _examine(options: argparse.Namespace, report: Callable[[Sequence[Finding]], None]) -> None:
    from rltrain.controller.doctor.examination import Examination

    config = None
    if options.overrides:
        try:
            config = _configuration(options)
        except ValueError as error:
            report([fail("configuration", str(error), "correct the command line")])
    examination = Examination(config, os.environ)
    try:
        for name, check in examination.checks():
            report(run_check(name, check))
    finally:
        examination.close()


def _configuration(options: argparse.Namespace) -> Config:
    from rltrain.main import compose, start_folder

    return start_folder(compose(options.overrides, options.config_dir))
