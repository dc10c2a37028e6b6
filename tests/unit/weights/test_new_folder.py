"""A folder that appears whole or not at all, and lists of tensors that fit a file."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.weights.huggingface.export import write_safetensors
from rltrain.weights.huggingface.new_folder import new_folder, split_by_bytes


def test_the_folder_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with new_folder(out) as folder:
        (folder / "policy").mkdir()
        (folder / "policy" / "a").write_text("a")
        assert not out.exists()
    assert list(out.parent.rglob("*")) == [out, out / "policy", out / "policy" / "a"]
    with pytest.raises(ValueError, match=r"out exists already"), new_folder(out):
        pass


def test_after_an_error_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("half")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_one_process_writes_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    out, left = tmp_path / "out", tmp_path / ".out.partial" / "new" / "a"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    with new_folder(out) as folder:
        assert not list(folder.iterdir())
        (folder / "b").write_text("b")
        with pytest.raises(ValueError, match="another process is writing it"), new_folder(out):
            pass
    assert list(tmp_path.rglob("*")) == [out, out / "b"]


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 50))
def test_shards_hold_all_in_order_and_none_too_much(sizes: list[int], limit: int) -> None:
    tensors = [(n, torch.empty(size, dtype=torch.uint8)) for n, size in enumerate(sizes)]
    found, lists = [], set()
    for shard in split_by_bytes(tensors, limit):
        found.append([n for n, _ in shard])
        lists.add(id(shard))
    assert len(lists) == 1  # emptied and filled again: no tensor of an earlier file stays alive
    assert [n for shard in found for n in shard] == list(range(len(sizes)))
    for shard, following in zip(found, [*found[1:], None], strict=True):
        total = sum(sizes[n] for n in shard)
        assert total <= limit or len(shard) == 1
        assert following is None or total + sizes[following[0]] > limit


def test_others_may_read_the_files_as_any(tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2)}
    write_safetensors(tmp_path, tensors.items(), max_shard_bytes=12)
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 4 and len(modes) == 1
