"""Reading a Hugging Face folder: both forms of experts, slices, and folders that are broken."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.huggingface.export import write_safetensors
from rltrain.weights.huggingface.load import open_checkpoint, read_tensors
from rltrain.weights.huggingface.quantized import quantize_fp8, scale_shape
from rltrain.weights.huggingface.tensor_files import INDEX, SINGLE
from rltrain.weights.mapping.assembly import to_megatron
from rltrain.weights.mapping.grid import AxisPosition, GridPosition
from rltrain.weights.mapping.local_parameters import local_parameters

ARCH = Architecture(
    family="qwen3_moe",
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=12,
    vocab_size=11,
    rope_theta=10000.0,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_positions=16,
    num_experts=4,
    experts_per_token=2,
    expert_size=6,
    norm_topk_prob=True,
    moe_layers=(1,),
)
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def random_checkpoint(arch: Architecture = ARCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [t for p in model_parameters(arch) if not p.copy for t in p.tensors]
    return {t.name: torch.randn(t.shape, generator=generator) for t in tensors}


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, with the experts of a layer together, as transformers has them in memory."""
    experts = "model.layers.1.mlp.experts."
    found = {name: t for name, t in tensors.items() if not name.startswith(experts)}

    def every(part: str) -> Tensor:
        return torch.stack([tensors[f"{experts}{i}.{part}.weight"] for i in range(4)])

    found[experts + "gate_up_proj"] = torch.cat([every("gate_proj"), every("up_proj")], dim=1)
    found[experts + "down_proj"] = every("down_proj")
    return found


def test_experts_together_or_apart_and_in_one_file_or_several(tmp_path: Path):
    tensors = random_checkpoint()
    folders = {name: tmp_path / name for name in ("apart", "together", "several")}
    for folder in folders.values():
        folder.mkdir()
    save_file(tensors, folders["apart"] / SINGLE)
    save_file(stacked(tensors), folders["together"] / SINGLE)
    write_safetensors(folders["several"], tensors.items(), max_shard_bytes=2000)
    assert len(list(folders["several"].glob("model-*-of-*.safetensors"))) > 2
    apart, together, several = (open_checkpoint(f, ARCH) for f in folders.values())
    for parameter in model_parameters(ARCH):
        for axis in [AxisPosition(), AxisPosition(0, 2), AxisPosition(1, 2)]:
            if axis.size == 2 and parameter.rule.cut is None:
                continue
            expected = to_megatron(parameter, apart.read, ARCH, axis)
            assert torch.equal(to_megatron(parameter, together.read, ARCH, axis), expected)
            assert torch.equal(to_megatron(parameter, several.read, ARCH, axis), expected)


QUANTIZED = Architecture(**{**vars(ARCH), "hidden_size": 160, "expert_size": 192, "head_dim": 96})


def quantized(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The matrices of attention and experts as FP8 blocks, and what they then stand for."""
    stored, read = {}, {}
    for name, tensor in tensors.items():
        if ("proj" not in name) or tensor.dim() < 2:
            stored[name] = read[name] = tensor
            continue
        pairs = [quantize_fp8(matrix) for matrix in tensor.reshape(-1, *tensor.shape[-2:])]
        values, scale = (torch.stack(list(part)) for part in zip(*pairs, strict=True))
        grown = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
        plain = values.float() * grown[:, : tensor.shape[-2], : tensor.shape[-1]]
        stored[name] = values.view(tensor.shape)
        stored[f"{name}_scale_inv"] = scale.view(scale_shape(tensor.shape))
        read[name] = plain.view(tensor.shape)
    return stored, read


@pytest.mark.parametrize("together", [False, True])
def test_fp8_blocks_read_as_plain_tensors(tmp_path: Path, together: bool):
    """With experts together their blocks reach across an expert's gate and up projection."""
    tensors = random_checkpoint(QUANTIZED)
    stored, read = quantized(stacked(tensors) if together else tensors)
    quant, plain = tmp_path / "quantized", tmp_path / "plain"
    for folder, content in ((quant, stored), (plain, read)):
        folder.mkdir()
        write_safetensors(folder, content.items(), max_shard_bytes=200_000)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (quant / "config.json").write_text(json.dumps({"quantization_config": config}))
    found, expected = open_checkpoint(quant, QUANTIZED), open_checkpoint(plain, QUANTIZED)
    for parameter in model_parameters(QUANTIZED):
        for axis in [AxisPosition(), AxisPosition(0, 2), AxisPosition(1, 2)]:
            if axis.size == 1 or parameter.rule.cut is not None:
                ours = to_megatron(parameter, found.read, QUANTIZED, axis)
                assert torch.equal(ours, to_megatron(parameter, expected.read, QUANTIZED, axis))
    whole = dict(read_tensors(quant, QUANTIZED, torch.float32))
    assert whole.keys() == tensors.keys()
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert (whole[name] - tensors[name]).abs().max() <= tensors[name].abs().max() / 16


def test_mxfp4_experts_read_as_plain_tensors(tmp_path: Path):
    """Stored with rows and columns swapped, as gpt-oss is."""
    tensors = stacked(random_checkpoint(QUANTIZED))
    stored, plain = dict(tensors), dict(tensors)
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{part}"
        experts, rows, columns = stored.pop(name).shape
        blocks = torch.randint(256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, columns, rows // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    quant = tmp_path / "quantized"
    for folder, content in ((quant, stored), (tmp_path, plain)):
        folder.mkdir(exist_ok=True)
        save_file(content, folder / SINGLE)
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    (quant / "config.json").write_text(json.dumps(config))
    found, expected = open_checkpoint(quant, QUANTIZED), open_checkpoint(tmp_path, QUANTIZED)
    for parameter in model_parameters(QUANTIZED):
        if parameter.expert is not None:
            for axis in [AxisPosition(), AxisPosition(1, 2)]:
                ours = to_megatron(parameter, found.read, QUANTIZED, axis)
                assert torch.equal(ours, to_megatron(parameter, expected.read, QUANTIZED, axis))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (EXPERT, None, f"{EXPERT} is in none"),
        ("lm_head.weight", None, r"lm_head\.weight is in none"),
        (EXPERT, torch.zeros(8, 6), rf"{SINGLE}: {EXPERT} has shape \[8, 6\].*\[6, 8\]"),
        (EXPERT, torch.zeros(6, 8).to(torch.float8_e4m3fn), f"{EXPERT} is F8_E4M3"),
        (
            "model.layers.2.mlp.gate.weight",
            torch.zeros(4, 8),
            rf"{SINGLE}: model\.layers\.2\.mlp\.gate\.weight belongs to no part",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, tensor: Tensor | None, message: str):
    changed = random_checkpoint() | {name: tensor}
    save_file({n: t for n, t in changed.items() if t is not None}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path, ARCH)


def test_experts_together_of_a_wrong_shape(tmp_path: Path):
    tensors = stacked(random_checkpoint())
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(3, 12, 8)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"gate_up_proj has shape \[3, 12, 8\].*\[4, 12, 8\]"):
        open_checkpoint(tmp_path, ARCH)


def test_files_that_do_not_fit(tmp_path: Path):
    with pytest.raises(ValueError, match="neither"):
        open_checkpoint(tmp_path, ARCH)
    write_safetensors(tmp_path, random_checkpoint().items(), max_shard_bytes=2000)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=rf"{shard.name} is not a whole safetensors file"):
        open_checkpoint(tmp_path, ARCH)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"{shard.name} is missing"):
        open_checkpoint(tmp_path, ARCH)
    kept = load(whole)
    name, _ = kept.popitem()
    save_file(kept, shard)
    with pytest.raises(ValueError, match=rf"{INDEX} says that {name} is in .*{shard.name}"):
        open_checkpoint(tmp_path, ARCH)
    (tmp_path / INDEX).write_text(json.dumps({"weights": {}}))
    with pytest.raises(ValueError, match="not an index"):
        open_checkpoint(tmp_path, ARCH)


def test_tied_embeddings_need_no_head(tmp_path: Path):
    arch = Architecture(**{**vars(ARCH), "tie_embeddings": True})
    tensors = random_checkpoint(arch)
    assert "lm_head.weight" not in tensors
    save_file(tensors, tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path, arch)
    head = to_megatron(model_parameters(arch)[-1], checkpoint.read, arch, AxisPosition())
    assert torch.equal(head, tensors["model.embed_tokens.weight"])
    assert load_file(tmp_path / SINGLE).keys() == tensors.keys()


def model_with(names: list[str], first_layer: int = 0) -> nn.Module:
    """A module with parameters of these names, and layers that know their number."""
    root = nn.Module()
    for name in names:
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.zeros(1)))
    for i, layer in root.get_submodule("decoder.layers").named_children():
        layer.layer_number = first_layer + int(i) + 1
    return root


def test_model_and_map_name_the_same_parameters():
    names = [p.name for p in model_parameters(ARCH)]
    held = local_parameters([model_with(names)], ARCH, GridPosition())
    assert held.keys() == set(names)
    lost = "decoder.layers.1.mlp.experts.linear_fc1.weight2"
    with pytest.raises(ValueError, match=f"no parameter for qwen3_moe's {lost}"):
        local_parameters([model_with([n for n in names if n != lost])], ARCH, GridPosition())
    with pytest.raises(ValueError, match=r"no weights for the model's decoder\.layers\.0\.bias"):
        local_parameters([model_with([*names, "decoder.layers.0.bias"])], ARCH, GridPosition())
    with pytest.raises(ValueError, match="4 experts cannot be shared out over ep=3"):
        local_parameters([model_with(names)], ARCH, GridPosition(ep=AxisPosition(0, 3)))


def test_a_pipeline_stage_and_an_expert_rank_hold_what_their_numbers_say():
    every = [p.name for p in model_parameters(ARCH)]
    expected = [n for n in every if n.startswith("decoder.layers.1.") and n[-1] not in "01"]
    local = [n.replace("layers.1", "layers.0").replace("weight2", "weight0") for n in expected]
    stage = model_with([n.replace("weight3", "weight1") for n in local], first_layer=1)
    placement = GridPosition(pp=AxisPosition(1, 2), ep=AxisPosition(1, 2))
    assert local_parameters([stage], ARCH, placement).keys() == set(expected)
