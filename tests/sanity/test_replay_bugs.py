"""docs/replay-bugs.md leaves no bug out, and what it cites is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.run import read as read_faults

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "replay-bugs.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("| \n").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| (\d|S\d)", line)
]
EVERY = [str(n) for n in range(1, 59)] + [f"S{n}" for n in range(1, 9)]
PLANTED = [  # (rows, tests); a reason begins "row 3:" or "rows 3, S1:"
    (re.sub(r"rows? ([^:]+):.*", r"\1", fault.why).split(", "), fault.tests)
    for fault in read_faults(ROOT / "tests" / "mutants" / "replay_bugs.toml")
]
CITED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+)(?:\[([^`]+)\])?)?`", PAGE)))


def test_every_bug_has_one_row() -> None:
    assert [row[0] for row in ROWS] == EVERY


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_says_what_holds_the_bug_off(row: list[str]) -> None:
    _, reference, symptom, answer, _ = row
    assert reference and symptom
    named = re.findall(r"`((?:rltrain|tests)/[\w/]+\.py)", answer)
    assert named, f"expected a test or the file of a design fact, found {answer!r}"
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize(("path", "name", "case"), CITED)
def test_a_cited_test_is_there(path: str, name: str, case: str) -> None:
    functions, words = read(path)
    assert not name or name in functions, f"{path} has no test {name}"
    if case:
        assert functions[name], f"{path}::{name} has no cases, and {case!r} is cited"
        assert case in words, f"{path} has no case {case!r}"


@cache
def read(path: str) -> tuple[dict[str, bool], set[str]]:
    """The tests of a file, with whether they have cases; every string and name, as a case has."""
    tree = ast.parse((ROOT / path).read_text())
    tests = {
        node.name: any("parametrize" in ast.unparse(mark) for mark in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    words |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return tests, {word for word in words if isinstance(word, str)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_date_is_that_of_a_planted_fault(row: list[str]) -> None:
    number, *_, answer, seen = row
    tests = [test for rows, tests in PLANTED if number in rows for test in tests]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d(, by hand)?|by design", seen), seen
    assert bool(tests) == (re.fullmatch(r"[\d-]+", seen) is not None), f"{seen}, planted: {tests}"
    for test in tests:
        assert test.partition("[")[0] in answer, f"the row does not cite {test}"


def test_every_planted_fault_is_of_a_row() -> None:
    assert {number for rows, _ in PLANTED for number in rows} <= set(EVERY)


def test_all_that_looks_like_a_test_is_checked() -> None:
    """A misspelled citation would not be checked."""
    assert PAGE.count("::test_") == len(re.findall(r"`tests/[\w/]+\.py::\w+(?:\[[^`]+\])?`", PAGE))
