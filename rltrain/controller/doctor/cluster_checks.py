"""Whether the nodes of a cluster have what this machine has, as ``rltrain doctor`` says it."""

import json
import subprocess
import sys
from collections.abc import Iterator

from rltrain.config import Config
from rltrain.controller.checks.engine_guards import VARIABLES
from rltrain.controller.checks.node_table import Row, show
from rltrain.controller.doctor.findings import Finding, fail, ok, remedy_of, warn

LIMIT_S = 240.0
"""To join the cluster and hear from every node."""


def check_cluster(address: str, config: Config) -> tuple[str, list[Finding]]:
    """The table, or "" where there is none, and the findings."""
    question = {
        "address": address,
        "model": config.model.path,
        "output": config.trainer.output_dir,
        "variables": sorted({rule.option for rule in VARIABLES}),
        "capture": config.routing_replay.capture,
        "engine_args": config.rollout.engine_args,
    }
    module = "rltrain.controller.doctor.cluster_trial"
    command = [sys.executable, "-W", "ignore", "-m", module, json.dumps(question)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "", [fail("cluster", f"no answer within {LIMIT_S:g} s", "see `ray status`")]
    if done.returncode:
        error = " ".join(done.stderr.strip().splitlines()[-2:])
        return "", [fail("cluster", error, remedy_of(error, "see `ray status`"))]
    found = json.loads(done.stdout)
    rows = [Row(**row) for row in found["rows"]]
    return show(rows, found["nodes"]), list(findings(rows, len(found["nodes"])))


def findings(rows: list[Row], num_nodes: int) -> Iterator[Finding]:
    """One for each row that differs. Pure."""
    for row in rows:
        where = "; ".join(
            f"{node}: {row.nodes[node]}" for node, state in row.states.items() if state != "same"
        )
        said = f"expected {row.driver or 'the same'}, found {where}"
        if row.state == "refused":
            yield fail(f"nodes: {row.what}", said, row.remedy)
        elif row.state == "differs":
            yield warn(f"nodes: {row.what}", said, row.remedy or "look at that node")
    if all(row.state == "same" for row in rows):
        yield ok("nodes", f"{num_nodes} have what this machine has")
