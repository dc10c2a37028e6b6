"""`rltrain routes` from end to end: record on one rank, replay on others, compare what they did."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rltrain.cli.app import main
from rltrain.routing.codec import decode
from rltrain.verification.routes_file import Routes

pytestmark = pytest.mark.integration

TOKENS = [[5, 7, 9, 11, 3, 2, 60, 44, 8], [3, 1, 2, 4, 4], [1], [17, 5, 33, 6, 2, 9, 12]]


def routes(*arguments: object) -> int:
    return main(["routes", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("routes")
    (folder / "t.json").write_text(json.dumps(TOKENS))
    assert routes("record", "tiny:qwen3", folder / "one", "--tokens", folder / "t.json") == 0
    yield folder


def replayed(folder: Path, given: str, *options: Any) -> int:
    """The status of comparing a replay with what one rank computed when it recorded."""
    assert routes("replay", "tiny:qwen3", folder / given, folder / "other", *options) == 0
    return routes("compare", folder / "one.pass.safetensors", folder / "other")


def test_a_recording_is_whole(folder: Path) -> None:
    found = Routes.load(folder / "one")
    assert found.seq_lens.tolist() == [9, 5, 1, 7]
    assert found.tokens.tolist() == [token for sequence in TOKENS for token in sequence]
    ids = decode(found.ids).sort(-1).values
    assert (ids[..., 0] < ids[..., 1]).all()
    assert found.margins is not None and (found.margins > 0).all()
    assert len({tuple(row) for row in ids[:, 0].tolist()}) > 3


@pytest.mark.parametrize(
    "options",
    [
        ("--layout", "tp=2,pp=2", "--recompute", "full", "--max-tokens", "12"),
        ("--layout", "cp=2", "--recompute", "moe"),
        # A rank has one sequence of one token, which yields no loss, and another has none.
        ("--layout", "dp=5", "--max-tokens", "40"),
    ],
    ids=lambda options: options[1],
)
def test_another_layout_on_the_same_routes(folder: Path, options: tuple[str, ...]) -> None:
    assert replayed(folder, "one", *options) == 0


def test_a_recording_of_another_layout_is_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Margins too: they come from the rank that owns the layer and the token."""
    record = ("record", "tiny:qwen3", folder / "dp", "--tokens", folder / "t.json")
    assert routes(*record, "--layout", "dp=2,ep=2,pp=2", "--max-tokens", "16") == 0
    assert routes("compare", folder / "one", folder / "dp") == 0
    assert "0 differences" in capsys.readouterr().out
    one, other = Routes.load(folder / "one"), Routes.load(folder / "dp")
    assert torch.equal(one.ids, other.ids)
    assert one.margins is not None and other.margins is not None
    assert torch.allclose(one.margins, other.margins, rtol=1e-3, atol=1e-5)
    assert routes("compare", folder / "one.pass.safetensors", folder / "dp.pass.safetensors") == 0


def test_one_changed_row_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the routes, by row and layer, and in what a replay of them computes."""
    whole = Routes.load(folder / "one")
    ids = whole.ids.clone()
    ids[11, 1] = torch.tensor([e for e in range(8) if e not in ids[11, 1].tolist()][-2:])
    replace(whole, ids=ids).save(folder / "changed")
    assert routes("compare", folder / "one", folder / "changed", "--near-tie", "1e-6") == 1
    printed = capsys.readouterr().out
    assert (
        f"sample 1: first at row 2 (token 2), layer 1: A {decode(whole.ids)[11, 1].tolist()}"
        in (printed)
    )
    assert printed.count("first at") == 1 and printed.endswith(
        "1 differences that neither a near-tie (margin up to 1e-06) nor an earlier difference "
        "explains\n"
    )
    assert replayed(folder, "changed", "--layout", "tp=2") == 1
    assert "NOT within" in capsys.readouterr().out


def test_a_layout_that_does_not_fit_starts_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = ("replay", "tiny:qwen3", folder / "one", folder / "never")
    assert routes(*replay, "--layout", "pp=3") == 2
    assert "policy.parallel.pp=3" in capsys.readouterr().err
    assert not (folder / "never").exists()
