"""Which MTP layers of a checkpoint are held, and which tensors belong to no layer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.huggingface.load import open_checkpoint
from rltrain.weights.mapping.mtp import mtp_copies, with_checkpoint_mtp, with_mtp_copies
from tests.unit.weights.test_deepseek import ARCH

TWO = replace(ARCH, mtp_layers=2)
EMBEDDING = torch.zeros(ARCH.vocab_size, ARCH.hidden_size)


def write(folder: Path, arch: Architecture, *extra: str, sharded: bool = False) -> None:
    tensors = {t.name: torch.zeros(t.shape) for p in model_parameters(arch) for t in p.tensors}
    tensors |= {name: EMBEDDING.clone() for name in extra}
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return
    save_file(tensors, folder / "one.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "one.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("sharded", [False, True])
def test_held_with_their_copies_or_skipped(tmp_path: Path, sharded: bool):
    write(tmp_path, TWO, *mtp_copies(TWO), sharded=sharded)
    assert with_checkpoint_mtp(TWO, tmp_path, "hold") == TWO
    without = with_checkpoint_mtp(TWO, tmp_path, "skip")
    assert without == replace(ARCH, skipped_mtp_layers=2)
    for arch in (TWO, without):
        open_checkpoint(tmp_path, arch)
    with pytest.raises(ValueError, match=r"model\.layers\.3\.\S+ belongs to no part"):
        open_checkpoint(tmp_path, ARCH)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_without_their_tensors_has_none(tmp_path: Path, sharded: bool):
    write(tmp_path, ARCH, sharded=sharded)
    arch = with_checkpoint_mtp(TWO, tmp_path, "hold")
    assert arch == replace(ARCH, skipped_mtp_layers=2)
    open_checkpoint(tmp_path, arch)


def test_some_of_their_tensors_are_not_enough(tmp_path: Path):
    write(tmp_path, replace(ARCH, mtp_layers=1))
    assert with_checkpoint_mtp(TWO, tmp_path, "hold") == TWO
    with pytest.raises(ValueError, match=r"tensor model\.layers\.4\.\S+ is in none"):
        open_checkpoint(tmp_path, TWO)


def test_only_their_copies_are_extra(tmp_path: Path):
    write(tmp_path, TWO, "model.layers.5.embed_tokens.weight")
    for mtp in ("hold", "skip"):
        with pytest.raises(ValueError, match=r"model\.layers\.5\.embed_tokens.* no part"):
            open_checkpoint(tmp_path, with_checkpoint_mtp(TWO, tmp_path, mtp))


def test_a_folder_that_cannot_be_read_decides_nothing(tmp_path: Path):
    assert with_checkpoint_mtp(TWO, tmp_path, "hold") == TWO
    for content in (b"", b"\xff" * 8 + b"{}", b"\2\0\0\0\0\0\0\0[]", b"\3\0\0\0\0\0\0\0" + b"123"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert with_checkpoint_mtp(TWO, tmp_path, "hold") in (
            TWO,
            replace(ARCH, skipped_mtp_layers=2),
        )
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            open_checkpoint(tmp_path, TWO)


def test_copies_follow_their_originals():
    named = [("model.embed_tokens.weight", 1), ("model.norm.weight", 2), ("lm_head.weight", 3)]
    assert list(with_mtp_copies(named, replace(ARCH, mtp_layers=1))) == [
        ("model.embed_tokens.weight", 1),
        ("model.layers.3.embed_tokens.weight", 1),
        ("model.norm.weight", 2),
        ("lm_head.weight", 3),
        ("model.layers.3.shared_head.head.weight", 3),
    ]
    tied = replace(ARCH, mtp_layers=1, tie_embeddings=True)
    assert ("model.layers.3.shared_head.head.weight", 1) in list(with_mtp_copies(named, tied))
    assert list(with_mtp_copies(named, ARCH)) == named
