"""A broken model folder ends a run before anything starts, naming file and tensor, or field."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rltrain.controller.checks.model_checks import check_weights
from rltrain.data.tokenizer import VOCAB_SIZE, tiny_tokenizer
from rltrain.main import main
from rltrain.weights.families import read_architecture
from rltrain.weights.huggingface.export import write_safetensors
from rltrain.weights.huggingface.tensor_files import INDEX

ROOT = Path(__file__).parents[3]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
UP = "model.layers.0.mlp.experts.1.up_proj.weight"
NORM = "model.norm.weight"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two files."""
    folder = tmp_path_factory.mktemp("model") / "whole"
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=2,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_safetensors(folder, tensors.items(), sum(t.nbytes for t in tensors.values()) * 2 // 3)
    assert {path.name for path in folder.glob("*.safetensors")} == {FIRST, SECOND}
    return folder


def remove(folder: Path) -> None:
    (folder / SECOND).unlink()


def cut(folder: Path) -> None:
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 4)


def cut_header(folder: Path) -> None:
    os.truncate(folder / SECOND, 100)


def change(**tensors: Tensor | None) -> Callable[[Path], None]:
    """Put tensors into the file that holds ``UP``; None takes one out of it."""

    def break_folder(folder: Path) -> None:
        weight_map = read(folder / INDEX)["weight_map"]
        file = folder / weight_map[UP]
        changed = load_file(file) | tensors
        save_file({name: t for name, t in changed.items() if t is not None}, file)
        names = {n: f for n, f in weight_map.items() if tensors.get(n, 0) is not None}
        added = {n: weight_map[UP] for n, t in tensors.items() if t is not None}
        (folder / INDEX).write_text(json.dumps({"weight_map": names | added}))

    return break_folder


def twice(folder: Path) -> None:
    other = SECOND if read(folder / INDEX)["weight_map"][UP] == FIRST else FIRST
    save_file(load_file(folder / other) | {UP: torch.zeros(24, 32)}, folder / other)


def index_says(name: str, file: str) -> Callable[[Path], None]:
    def break_folder(folder: Path) -> None:
        index = read(folder / INDEX)
        index["weight_map"][name] = file
        (folder / INDEX).write_text(json.dumps(index))

    return break_folder


def config_says(**fields: Any) -> Callable[[Path], None]:
    def break_folder(folder: Path) -> None:
        changed = read(folder / "config.json") | fields
        (folder / "config.json").write_text(json.dumps(changed))

    return break_folder


def both(*steps: Callable[[Path], None]) -> Callable[[Path], None]:
    def break_folder(folder: Path) -> None:
        for step in steps:
            step(folder)

    return break_folder


def read(file: Path) -> Any:
    return json.loads(file.read_text())


FP8 = torch.zeros(24, 32).to(torch.float8_e4m3fn)
SCALE = f"{UP}_scale_inv"
in_blocks = config_says(quantization_config=BLOCKS)

BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing file": (remove, (f"{SECOND} is missing", "it holds model.")),
    "cut off in the data": (cut, (f"{SECOND} is not a whole safetensors file",)),
    "cut off in the header": (cut_header, (f"{SECOND} is not a whole safetensors file",)),
    "missing tensor": (change(**{UP: None}), (f"tensor {UP} is in none",)),
    "wrong shape": (change(**{UP: torch.zeros(32, 24)}), (UP, "shape [32, 24]", "[24, 32]")),
    "further tensor": (
        change(**{"model.layers.1.mlp.gate.weight": torch.zeros(2, 32)}),
        (".safetensors: model.layers.1.mlp.gate.weight belongs to no part of a qwen3_moe",),
    ),
    "the same tensor twice": (twice, (f": {UP} is in ", "keep one")),
    "a tensor that is elsewhere": (
        index_says("model.norm.weight", FIRST),
        (INDEX, "model.norm.weight is in", "it is not there"),
    ),
    "a file outside": (
        index_says(UP, "../model.safetensors"),
        (INDEX, f"{UP} is in ../model.safetensors, outside of the folder"),
    ),
    "unknown rope_scaling": (
        config_says(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        ("config.json: rope_scaling of type 'spiral'",),
    ),
    "GPTQ": (
        config_says(quantization_config={"quant_method": "gptq", "bits": 4}),
        ("config.json: quantization_config.quant_method='gptq'", "bf16"),
    ),
    "FP8 of one scale a tensor": (
        config_says(quantization_config={"quant_method": "fp8"}),
        ("config.json: quantization_config.weight_block_size=None",),
    ),
    "FP8 that config.json does not declare": (
        change(**{UP: FP8, SCALE: torch.ones(1, 1)}),
        (f"{UP} is F8_E4M3", "config.json declares no quantization_config"),
    ),
    "FP8 without its scale": (
        both(change(**{UP: FP8}), in_blocks),
        (f"{UP} is F8_E4M3", "NAME_scale_inv", "one of the two is missing"),
    ),
    "a scale of the wrong shape": (
        both(change(**{UP: FP8, SCALE: torch.ones(1, 2)}), in_blocks),
        (f"{SCALE} is F32 of shape [1, 2]", "must be BF16 or F32 or F8_E8M0 of shape [1, 1]"),
    ),
    "a scale of what is not FP8": (
        both(change(**{SCALE: torch.ones(1, 1)}), in_blocks),
        (f"{UP} is F32 of shape [24, 32]", "must be F8_E4M3"),
    ),
    "a scale of nothing": (
        both(change(**{"model.layers.9.weight_scale_inv": torch.ones(1, 1)}), in_blocks),
        ("model.layers.9.weight_scale_inv belongs to no part",),
    ),
    "a scale of what is no matrix": (
        both(change(**{f"{NORM}_scale_inv": torch.ones(1, 1)}), in_blocks),
        (f"{NORM} has shape [32], expected a matrix",),
    ),
}


def overrides(folder: Path) -> list[str]:
    return [
        "+recipe=grpo_moe_r3",
        "cluster.device=cpu",
        f"model.path={folder}",
        f"trainer.output_dir={folder.parent}/run",
    ]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused(
    name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_folder, messages = BROKEN[name]
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    break_folder(folder)
    assert main(overrides(folder)) == 2
    said = capsys.readouterr().err
    assert str(folder) in said
    assert [message for message in messages if message not in said] == [], said
    assert not (tmp_path / "run").exists()
    assert not ray.is_initialized()


def test_the_program_ends_at_once_and_leaves_nothing(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    cut(folder)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rltrain.main", *overrides(folder)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("rltrain: cannot start\n") and SECOND in done.stderr
    assert "ray" not in done.stderr.lower()
    assert time.monotonic() - began < 60
    assert not (tmp_path / "run").exists()


def test_the_layout_of_the_hugging_face_cache_is_read(whole: Path, tmp_path: Path) -> None:
    """Files are links into a folder of blobs."""
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(whole.iterdir())):
        shutil.copy2(file, blobs / f"{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    check_weights(str(snapshot), read_architecture(snapshot))
