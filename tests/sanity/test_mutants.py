"""The lists of planted faults are not stale: `python -m tests.mutants.run` can plant each."""

import ast
from pathlib import Path

import pytest

from tests.mutants.run import ROOT, Mutant, every, read

MUTANTS = every()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.file}: {m.why}" for m in MUTANTS])
def test_can_be_planted_and_has_its_test(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    assert mutant.mutated(source) != source
    assert mutant.why and mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name.partition("[")[0] in functions, f"{file} has no {name}"


def test_none_is_listed_twice() -> None:
    planted = [(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS]
    assert len(set(planted)) == len(planted)


def test_what_cannot_be_planted_is_refused(tmp_path: Path) -> None:
    mutant = Mutant("why", "a.py", "x = 1", "x = 2", ("tests/a.py::test_a",))
    assert mutant.mutated("x = 1\n") == "x = 2\n"
    for source in ("", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match=r"a.py: 'x = 1' occurs [02] times, expected once"):
            mutant.mutated(source)
    (tmp_path / "some.toml").write_text('[[mutant]]\nwhy = "no more than this"\n')
    with pytest.raises(ValueError, match=r"some.toml: expected why, file, old, new, test"):
        read(tmp_path / "some.toml")
