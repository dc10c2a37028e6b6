"""GitHub's workflow calls what .ci/run calls, with the least rights and pinned actions."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
COMMANDS = "\n".join(step["run"] for step in STEPS if "run" in step)


def make_targets(script: str) -> set[str]:
    calls = re.findall(r"^make((?: [a-z]+)+)$", script, re.MULTILINE)
    return {target for call in calls for target in call.split()}


def test_it_makes_what_our_ci_makes() -> None:
    known = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ours = make_targets((ROOT / ".ci/run").read_text()) - {"sizes"}  # which only prints
    assert ours and ours | {"wheel"} == make_targets(COMMANDS) <= known


def test_folders_that_it_tests_exist() -> None:
    folders = re.findall(r"\btests/\S+", COMMANDS)
    assert folders and all((ROOT / folder).is_dir() for folder in folders)


def test_actions_are_pinned_and_rights_are_least() -> None:
    actions = [step["uses"] for step in STEPS if "uses" in step]
    assert actions and all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", use) for use in actions)
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in WORKFLOW["jobs"].values())


def test_every_python_of_the_project_is_in_the_matrix() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    assert WORKFLOW["jobs"]["quick"]["strategy"]["matrix"]["python"] == pythons
