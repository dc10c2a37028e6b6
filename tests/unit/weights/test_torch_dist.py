"""Chunks written as a checkpoint are read back, whole, in part and across; what is not whole is
refused. That Megatron reads and writes the same is in tests/distributed/test_convert.py."""

from pathlib import Path

import pytest
import torch

from rltrain.weights.huggingface.stored_model import Chunk, StoredModel
from rltrain.weights.huggingface.torch_dist import TorchDistReader, write_torch_dist

WHOLE = torch.arange(24.0).view(1, 6, 4)


def chunk(first: int, rows: int, key: str = "a") -> Chunk:
    return Chunk(key, (0, first, 0), (1, rows, 4), (1, 6, 4))


UPPER, LOWER = chunk(0, 2), chunk(2, 4)
STORED = StoredModel({"both": (UPPER, LOWER)}, ("extra",), {"kind": "test"})


def rows(of: Chunk) -> torch.Tensor:
    return WHOLE[0, of.offset[1] : of.offset[1] + of.shape[1]]


@pytest.mark.parametrize("max_file_bytes", [1, 10**6])
def test_any_box_is_read_from_the_files_that_hold_it(tmp_path: Path, max_file_bytes: int) -> None:
    write_torch_dist(tmp_path, [(c, rows(c)) for c in (UPPER, LOWER)], STORED, max_file_bytes)
    assert len(list(tmp_path.glob("*.distcp"))) == (3 if max_file_bytes == 1 else 2)
    reader = TorchDistReader(tmp_path)
    for box in (UPPER, LOWER, chunk(0, 6), chunk(1, 3)):
        assert torch.equal(reader.read(box), rows(box).view(box.shape))
    cast = reader.read(LOWER, torch.bfloat16)
    assert cast.dtype == torch.bfloat16 and torch.equal(cast[0], rows(LOWER).bfloat16())
    with pytest.raises(ValueError, match="expected a tensor b, found none"):
        reader.read(chunk(0, 2, "b"))
    with pytest.raises(ValueError, match=r"a has 20 of the 24 elements at \[0, 1, 0\]"):
        reader.read(chunk(1, 6))


def test_what_is_no_checkpoint_of_a_whole_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found no \.metadata"):
        TorchDistReader(tmp_path)
    with pytest.raises(ValueError, match="tensor-volume: 24 chunks-volume: 8"):
        write_torch_dist(tmp_path, [(UPPER, rows(UPPER))], STORED, 1)
    with pytest.raises(ValueError, match=r"a: expected one dtype, found torch\.float32 and torch"):
        write_torch_dist(tmp_path, [(UPPER, rows(UPPER)), (LOWER, rows(LOWER).half())], STORED, 1)


def test_where_parameters_lie_survives_json() -> None:
    assert StoredModel.from_json(STORED.to_json()) == STORED
