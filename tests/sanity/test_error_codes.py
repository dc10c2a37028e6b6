"""Every error code of the source has one entry in docs/troubleshooting.md, and none is unused."""

import ast
import re
from pathlib import Path

import pytest

from rltrain.config.error_codes import PARTS, codes_in, entries, explain, help_line, with_code

ROOT = Path(__file__).parents[2]
ENTRIES = entries()
AREAS = {
    "1": "configuration",
    "2": "data",
    "3": "model",
    "4": "cluster",
    "5": "training",
    "6": "checkpoints",
    "7": "tools",
}


def codes_of_source() -> dict[str, set[str]]:
    """The files that raise each code: all string constants that are not documentation."""
    raised: dict[str, set[str]] = {}
    for file in sorted((ROOT / "rltrain").rglob("*.py")):
        tree = ast.parse(file.read_text())
        documentation = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in documentation:
                for code in re.findall(r"\bRL\d{4}\b", node.value):
                    raised.setdefault(code, set()).add(str(file.relative_to(ROOT)))
    return raised


def test_every_code_has_one_entry_and_every_entry_a_code_that_is_raised() -> None:
    written = [entry.code for entry in ENTRIES if entry.code]
    assert len(written) == len(set(written)), "a code has two entries"
    raised = codes_of_source()
    assert len(raised) >= 30
    assert set(written) == set(raised)
    assert written == sorted(written) and {code[2] for code in written} == set(AREAS)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.code or entry.title)
def test_an_entry_has_its_four_parts_and_words_to_search_for(entry) -> None:
    parts = re.findall(r"^\*\*([^*]+)\*\*: (.+)", entry.text, re.MULTILINE)
    assert tuple(name for name, _ in parts) == PARTS
    assert all(len(text) > 15 for _, text in parts)
    assert "Search words: " in entry.text


def test_there_are_thirty_symptoms_and_some_without_a_message() -> None:
    assert len(ENTRIES) >= 30 and sum(not entry.code for entry in ENTRIES) >= 10


def test_the_keys_that_entries_name_are_keys() -> None:
    from rltrain.config.reference import keys, sections

    known = {key.name for key in keys()} | set(sections())
    free = tuple(f"{key.name}." for key in keys() if key.free)
    tops = {name.partition(".")[0] for name in known}
    for entry in ENTRIES:
        for name in re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)[`=]", entry.text):
            if name.partition(".")[0] in tops and name not in known:
                assert name.startswith(free), f"{entry.code or entry.title} names {name}"


def test_the_metrics_that_entries_name_are_metrics() -> None:
    from rltrain.tracking.catalogue import METRICS

    known = {metric.glob for metric in METRICS}
    areas = {name.partition("/")[0] for name in known}
    for entry in ENTRIES:
        for name in re.findall(r"`([a-z_]+/[a-z0-9_]+)`", entry.text):
            if name.partition("/")[0] in areas:
                assert name in known, f"{entry.code or entry.title} names {name}"


def test_a_code_leads_to_its_entry() -> None:
    assert codes_in("a [RL1001]\nb [RL1002] [RL1001]") == ["RL1001", "RL1002"]
    assert help_line("a [RL1001]") == "help: rltrain explain RL1001\n" and help_line("a") == ""
    assert with_code("a", "RL1001") == "a [RL1001]"
    assert with_code("a [RL1002] (b)", "RL1001") == "a (b) [RL1002]"
    assert with_code("a [RL1002]\nb [RL1003]", "RL1001") == "a [RL1002]\nb [RL1003]"
    shown = explain(["rl1001", "[RL6005]"])
    assert shown.startswith("RL1001: ") and "\nRL6005: " in shown
    assert "**" not in shown and "`" not in shown and "rltrain keys WORD" in shown
    assert explain([]).count("\n") == len(ENTRIES)
    with pytest.raises(ValueError, match="RL9999: there is no such code"):
        explain(["RL9999"])
