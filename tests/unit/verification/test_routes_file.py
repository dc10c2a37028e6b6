"""A file of routes is read back completely or rejected, and its content is measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rltrain.verification.routes_file import HEADER, TENSORS, Routes
from rltrain.verification.routes_inspection import inspect_routes


def some_routes(num_experts: int = 8, **fields: Any) -> Routes:
    """Sequences of 4 and 3 tokens, two layers, top-2; row t of layer l has experts t+l, t+l+1."""
    first = torch.arange(7)[:, None, None] + torch.arange(2)[None, :, None]
    ids = (first + torch.arange(2)) % num_experts
    ids[0, 0, 0] = num_experts - 1
    values: dict[str, Any] = {
        "ids": ids.to(torch.uint8 if num_experts <= 256 else torch.int16),
        "route_mask": torch.tensor([True, True, True, False, True, True, False]),
        "seq_lens": torch.tensor([4, 3]),
        "tokens": torch.arange(7),
        "layers": (1, 3),
        "num_experts": num_experts,
        "weight_version": 5,
        "producer": "vLLM 0.30.0",
    }
    return Routes(**values | fields)


@pytest.mark.parametrize("num_experts", [8, 255, 256, 257, 512, 65536])
def test_a_file_is_read_back_whole(tmp_path: Path, num_experts: int) -> None:
    routes = some_routes(num_experts)
    routes.save(tmp_path / "r.safetensors")
    found = Routes.load(tmp_path / "r.safetensors")
    for name in TENSORS:
        assert torch.equal(getattr(found, name), getattr(routes, name))
        assert getattr(found, name).dtype == getattr(routes, name).dtype
    assert (found.layers, found.num_experts) == ((1, 3), num_experts)
    assert (found.weight_version, found.producer) == (5, "vLLM 0.30.0")
    assert [file.name for file in tmp_path.iterdir()] == ["r.safetensors"]


def test_margins_are_kept_if_there_are_any(tmp_path: Path) -> None:
    file = tmp_path / "r.safetensors"
    some_routes().save(file)
    assert Routes.load(file).margins is None
    routes = some_routes(margins=torch.rand(7, 2))
    routes.save(file)
    found = Routes.load(file).margins
    assert found is not None and torch.equal(found, routes.margins)
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    save_file(load_file(file) | {"margins": found + 1}, file, header)
    with pytest.raises(ValueError, match="checksum"):
        Routes.load(file)
    for wrong in (torch.rand(7, 3), torch.rand(7, 2).double()):
        with pytest.raises(ValueError, match=r"margins: expected torch.float32 of \[7, 2\]"):
            some_routes(margins=wrong)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    some_routes().save(tmp_path / "r.safetensors")
    return tmp_path / "r.safetensors"


def test_any_changed_byte_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=r"r\.safetensors"):
            Routes.load(file)


def test_a_file_cut_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut short or something else"):
            Routes.load(file)


def test_a_foreign_file_is_refused(file: Path) -> None:
    save_file({"weight": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=r"expected routes.* found metadata \[\].*'weight'"):
        Routes.load(file)
    file.write_bytes(b"not a tensor in sight, but long enough to have a header")
    with pytest.raises(ValueError, match="something else"):
        Routes.load(file)


def rewritten(file: Path, tensors: dict[str, Any] | None = None, **about: Any) -> None:
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()[HEADER])
    save_file(load_file(file) | (tensors or {}), file, {HEADER: json.dumps(header | about)})


@pytest.mark.parametrize(
    "about", [{"producer": "vLLM 0.31.0"}, {"weight_version": 6}, {"layers": [1, 2]}, {"more": 1}]
)
def test_changed_metadata_is_noticed(file: Path, about: dict[str, Any]) -> None:
    rewritten(file, **about)
    with pytest.raises(ValueError, match=r"checksum .* the file was changed"):
        Routes.load(file)


def test_changed_tensors_are_noticed(file: Path) -> None:
    rewritten(file, {"tokens": torch.arange(7) + 1})
    with pytest.raises(ValueError, match="checksum"):
        Routes.load(file)


@pytest.mark.parametrize("text", ["[1]", "{", '{"layers": 3}', "null"])
def test_metadata_that_is_not_ours_is_refused(file: Path, text: str) -> None:
    save_file(load_file(file), file, {HEADER: text})
    with pytest.raises(ValueError, match=r"r\.safetensors"):
        Routes.load(file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ids": torch.zeros(7, 2, 2, dtype=torch.int64)}, "ids: expected torch.uint8"),
        ({"ids": torch.zeros(7, 4, dtype=torch.uint8)}, "ids: expected torch.uint8 with 3 dims"),
        ({"num_experts": 300}, "ids: expected torch.int16"),
        ({"num_experts": 4}, "ids below num_experts=4, found 7"),
        ({"route_mask": torch.ones(7)}, "route_mask: expected torch.bool"),
        ({"route_mask": torch.ones(6, dtype=torch.bool)}, "a mask of 6"),
        ({"tokens": torch.arange(8)}, "8 tokens"),
        ({"seq_lens": torch.tensor([4, 4])}, "summing to 8"),
        ({"seq_lens": torch.tensor([7, 0])}, "sequences of 1 token or more"),
        ({"layers": (3, 1)}, "expected 2 different layers in order"),
        ({"layers": (1, 1)}, "expected 2 different layers in order"),
        ({"layers": (1, 2, 3)}, "expected 2 different layers in order"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(some_routes(), **fields)


# What is in it


def test_well_formed_routes() -> None:
    found = inspect_routes(some_routes())
    assert (found.num_tokens, found.num_sequences, found.dtype) == (7, 2, "uint8")
    assert (found.coverage, found.valid_fraction, found.zero_layers) == (1.0, 1.0, ())
    assert found.duplicate_rows == {1: 0, 3: 0}
    assert found.longest_repeat == {1: 1, 3: 1}


def test_faults_are_counted_over_captured_rows() -> None:
    routes = some_routes()
    routes.ids[:, 1] = 0
    routes.ids[1, 0, 1] = routes.ids[1, 0, 0]
    routes.route_mask[5] = False
    found = inspect_routes(routes)
    assert found.coverage == 4 / 5
    assert found.zero_layers == (3,)
    assert found.duplicate_rows == {1: 1, 3: 4}
    assert found.valid_fraction == 0.0
    assert found.longest_repeat == {1: 1, 3: 3}
    assert found.peak_load[3] == 8.0


def test_a_repeat_ends_with_its_sequence_and_at_a_missing_row() -> None:
    routes = some_routes()
    routes.route_mask[:] = True
    routes.ids[:, 0] = torch.tensor([2, 5])
    routes.ids[2, 0] = torch.tensor([5, 2])  # the same experts in another order
    assert inspect_routes(routes).longest_repeat == {1: 4, 3: 1}
    routes.route_mask[1] = False
    assert inspect_routes(routes).longest_repeat[1] == 3  # the second sequence
    routes.route_mask[5] = False
    assert inspect_routes(routes).longest_repeat[1] == 2


def test_load_is_that_of_captured_rows() -> None:
    routes = some_routes()
    routes.ids[:, 0] = torch.tensor([0, 1])
    routes.ids[3, 0] = torch.tensor([2, 3])  # not captured
    routes.ids[4, 0] = torch.tensor([0, 2])
    assert inspect_routes(routes).peak_load[1] == 5 / (10 / 8)


def test_nothing_captured() -> None:
    routes = replace(some_routes(), route_mask=torch.zeros(7, dtype=torch.bool))
    found = inspect_routes(routes)
    assert (found.coverage, found.valid_fraction, found.zero_layers) == (0.0, 1.0, ())
    assert found.longest_repeat == found.peak_load == {1: 0, 3: 0}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2**31))
def test_shares_by_the_definition(lens: list[int], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    n = sum(lens)
    routes = Routes(
        ids=torch.randint(4, (n, 3, 2), generator=g).to(torch.uint8),
        route_mask=torch.rand(n, generator=g) < 0.7,
        seq_lens=torch.tensor(lens),
        tokens=torch.arange(n),
        layers=(0, 1, 5),
        num_experts=4,
        weight_version=0,
        producer="test",
    )
    found = inspect_routes(routes)
    ends = {sum(lens[: i + 1]) - 1 for i in range(len(lens))}
    owed = [bool(m) for row, m in enumerate(routes.route_mask) if row not in ends]
    assert found.coverage == pytest.approx(sum(owed) / len(owed) if owed else 1.0)
    rows = [row.tolist() for row, m in zip(routes.ids, routes.route_mask, strict=True) if m]
    valid = [all(a != b for a, b in row) for row in rows]
    assert found.valid_fraction == pytest.approx(sum(valid) / len(valid) if valid else 1.0)
    for i, layer in enumerate((0, 1, 5)):
        assert found.duplicate_rows[layer] == sum(row[i][0] == row[i][1] for row in rows)
        load = [sum(e in row[i] and row[i].count(e) for row in rows) for e in range(4)]
        expected = max(load) / (sum(load) / 4) if rows else 0.0
        assert found.peak_load[layer] == pytest.approx(expected)
