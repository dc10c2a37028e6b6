"""``rltrain doctor``: what of this machine, its packages and a configuration would stop a run."""

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
    remedy_of,
    run_check,
    show_finding,
    show_json,
    show_summary,
)


def doctor(
    overrides: Sequence[str],
    config_dir: Path | None = None,
    *,
    json: bool = False,
    with_self_test: bool = False,
    cluster: str | None = None,
) -> int:
    """Print one line per check, with a remedy for each problem; the exit status is 1 if a check
    failed.

    Args:
        overrides: a configuration to examine, too; the machine alone where there are none
        json: print the findings as JSON
        with_self_test: also train the tiny model for two steps and check what must hold
        cluster: the address of a Ray cluster whose nodes are compared with this machine
    """
    began = time.monotonic()
    findings: list[Finding] = []

    def report(new: Sequence[Finding]) -> None:
        findings.extend(new)
        if not json:
            sys.stdout.write("".join(map(show_finding, new)))
            sys.stdout.flush()

    config = _examine(overrides, config_dir, report)
    if cluster is not None:
        from rltrain.controller.doctor.cluster_checks import check_cluster

        table, found = check_cluster(cluster, config or Config())
        report(found)
        if table and not json:
            sys.stdout.write(f"\n{table}\n")
    if with_self_test:
        from rltrain.controller.doctor.self_test import self_test

        report(run_check("self-test", self_test))
    if json:
        sys.stdout.write(show_json(findings, os.environ))
    else:
        sys.stdout.write(f"\n{show_summary(findings, time.monotonic() - began)}")
    return exit_status(findings)


def _examine(
    overrides: Sequence[str],
    config_dir: Path | None,
    report: Callable[[Sequence[Finding]], None],
) -> Config | None:
    """The checks of this machine; the configuration, if there is one and it is valid."""
    from rltrain.controller.doctor.examination import Examination

    config = None
    if overrides:
        try:
            config = _configuration(overrides, config_dir)
        except ValueError as error:
            report([fail("configuration", str(error), remedy_of(str(error), "see rltrain keys"))])
    examination = Examination(config, os.environ)
    try:
        for name, check in examination.checks():
            report(run_check(name, check))
    finally:
        examination.close()
    return config


def _configuration(overrides: Sequence[str], config_dir: Path | None) -> Config:
    from rltrain.main import compose, start_folder

    return start_folder(compose(overrides, config_dir))
