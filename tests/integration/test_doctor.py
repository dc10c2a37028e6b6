"""``rltrain doctor`` as a user runs it, from an empty folder; and its self-test with a fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rltrain.controller.doctor.findings import State
from rltrain.controller.doctor.self_test import self_test

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]


def test_the_doctor_looks_at_everything_and_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rltrain.cli.app", "doctor", "+recipe=grpo_moe_r3", "--json"]
    done = subprocess.run(
        [*command, "model.path=missing"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    findings = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert findings["Ray"]["state"] in ("ok", "warn"), findings["Ray"]
    assert "first task after" in findings["Ray"]["found"]
    assert [name for name, f in findings.items() if f["state"] == "fail"] == ["model"]
    assert "missing" in findings["model"]["found"]
    assert findings["disk: output"]["state"] == findings["loopback ports"]["state"] == "ok"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_self_test_finds_stale_weights() -> None:
    assert {finding.state for finding in self_test()} <= {State.OK, State.WARN}
    failed = [f.check for f in self_test(["trainer.sync_every=2"]) if f.state is State.FAIL]
    assert failed == ["self-test: weight sync"]
