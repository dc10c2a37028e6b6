"""Who may import whom, and what must start fast."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "ray", "vllm", "megatron", "transformers", "wandb", "hydra", "numpy"}


def test_the_import_contract_holds() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint_imports, "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["rltrain", "rltrain.config", "rltrain.config.hydra_groups"])
def test_the_configuration_imports_nothing_heavy(module: str) -> None:
    code = f"import {module}, sys; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
