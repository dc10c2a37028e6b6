"""Plants faults into copies of this tree, one at a time, and sees the named test of each fail.

    python -m tests.mutants.run [--only TEXT]      # or: make mutants

A fault is a table in a ``tests/mutants/*.toml``:

    [[mutant]]
    why = "warm-up never ends"                   # what goes wrong, in a few words
    file = "rltrain/policy/optimizer.py"
    old = "self.update += 1"                     # occurs exactly once in the file
    new = "self.update += 0"                     # still valid Python
    test = "tests/unit/policy/test_learning_rate.py::test_X"      # or a list of such

A good fault is silent and well-formed: an order, a mask, a denominator, a stale value. It is not a
crash. A good test is the cheapest that notices. Every test is run without any fault first. A fault
counts as caught when its test then fails by an assertion or a refusal. A name or attribute that
Python does not find, a TypeError, and a test that hangs do not count.

``tests/sanity/test_mutants.py`` keeps the lists from going stale.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1500.0
PRELOADED = ("pytest", "hypothesis", "torch", "transformers", "ray", "megatron.core.optimizer")
"""What takes most of the time of a small test. Nothing of this repository."""
CRASHES = r"(?:Syntax|Import|ModuleNotFound|Name|Attribute|Type)Error\b"
HANGS = r"Failed: Timeout|'rank \d+': None"
BROKEN = re.compile(rf"^(?:E|ERROR) .*?({CRASHES}|{HANGS})", re.MULTILINE)
"""What a failing test says that never came as far as noticing the fault; ranks may hang."""


@dataclass(frozen=True)
class Mutant:
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mutated(self, source: str) -> str:
        """Raises ValueError unless ``old`` occurs exactly once, and what results is Python."""
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {found} times, expected once")
        changed = source.replace(self.old, self.new)
        compile(changed, self.file, "exec")
        return changed


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    verdict: str
    seconds: float


def read(file: Path) -> list[Mutant]:
    """Raises ValueError: a table lacks a key, or has another one."""
    found = []
    for entry in tomllib.loads(file.read_text())["mutant"]:
        if entry.keys() != {"why", "file", "old", "new", "test"}:
            raise ValueError(f"{file.name}: expected why, file, old, new, test; found {entry}")
        tests = entry.pop("test")
        found.append(Mutant(**entry, tests=tuple([tests] if isinstance(tests, str) else tests)))
    return found


def every() -> list[Mutant]:
    return [
        mutant for file in sorted(Path(__file__).parent.glob("*.toml")) for mutant in read(file)
    ]


def plant(mutant: Mutant, healthy: Path) -> Outcome:
    """Run the fault's tests in a copy of the tree ``healthy`` that has it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rltrain-mutant-") as folder:
        tree = Path(shutil.copytree(healthy, Path(folder).resolve(), dirs_exist_ok=True))
        file = tree / mutant.file
        file.write_text(mutant.mutated(file.read_text()))
        code, output = run_tests(tree, ["-x", *mutant.tests])
    return Outcome(mutant, _verdict(code, output), time.monotonic() - started)


def copy_tree(folder: Path) -> None:
    """What git tracks and what it does not ignore, without compiled files."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (source := ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)


def run_tests(tree: Path, arguments: Sequence[str]) -> tuple[int | None, str]:
    """Pytest in ``tree``: its exit code, None if it hangs, and what it printed."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # Forked, so that what is preloaded is there.
        context = multiprocessing.get_context("fork")
        pytest = context.Process(target=_pytest, args=(tree, arguments, output.fileno()))
        pytest.start()
        pytest.join(TIMEOUT_S)
        if (code := pytest.exitcode) is None:
            assert pytest.pid is not None
            os.killpg(pytest.pid, signal.SIGKILL)
            pytest.join()
        output.seek(0)
        return code, output.read()


def _pytest(tree: Path, arguments: Sequence[str], output: int) -> NoReturn:
    """In a process that has imported nothing of this repository but this file."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    # A compiled file is trusted by the second it was written in: a fault could be missed.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    rltrain = importlib.import_module("rltrain")
    assert Path(str(rltrain.__file__)).is_relative_to(tree), rltrain.__file__
    pytest = importlib.import_module("pytest")
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))


def _verdict(code: int | None, output: str) -> str:
    if code == 0:
        return "SURVIVED"
    if code != 1:
        return "BROKEN (hangs)" if code is None else f"BROKEN (pytest ended with {code})"
    found = BROKEN.search(output)
    return f"BROKEN ({found[1]})" if found else "caught"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run")
    parser.add_argument("--only", default="", help="faults that have TEXT in file, why or test")
    options = parser.parse_args()
    chosen = [m for m in every() if options.only in " ".join((m.why, m.file, *m.tests))]
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    print(f"{len(chosen)} faults; first their {len(tests)} tests without any", flush=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # as tests/conftest.py does
    with warnings.catch_warnings(action="ignore"):
        for name in PRELOADED:
            importlib.import_module(name)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="rltrain-healthy-") as folder:
        # One copy for all, so that who edits the tree meanwhile changes nothing.
        healthy = Path(folder).resolve()
        copy_tree(healthy)
        code, output = run_tests(healthy, tests)
        if code or re.search(r"\d+ skipped", output):
            print(f"{output}\nbefore faults are planted these tests have to pass, none skipped")
            return 1
        for mutant in chosen:
            found = plant(mutant, healthy)
            verdicts.append(found.verdict)
            names = " ".join(test.partition("::")[2] for test in mutant.tests)
            text = f"{found.seconds:4.0f} s  {mutant.file}: {mutant.why}  <- {names}"
            print(f"{found.verdict:8}  {text}", flush=True)
    caught = verdicts.count("caught")
    print(f"{len(chosen)} faults planted, {caught} caught, {len(chosen) - caught} not")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
