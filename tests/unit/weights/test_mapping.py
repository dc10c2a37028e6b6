"""The map between Hugging Face tensors and Megatron parameters, without a model."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.mapping.assembly import to_huggingface, to_megatron
from rltrain.weights.mapping.grid import AxisPosition, GridPosition
from rltrain.weights.mapping.parameters import HfTensorSpec, ParameterSpec

SIZES = st.sampled_from([1, 2, 4])


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    num_kv_heads = draw(SIZES)
    num_experts = draw(st.sampled_from([0, 4]))
    num_layers = draw(st.integers(1, 2))
    return Architecture(
        family="qwen3_moe" if num_experts else "qwen3",
        num_layers=num_layers,
        hidden_size=4,
        num_heads=num_kv_heads * draw(st.sampled_from([4, 8])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        ffn_size=8,
        vocab_size=draw(st.integers(1, 17)),
        rope_theta=1e4,
        norm_eps=1e-6,
        tie_embeddings=draw(st.booleans()),
        max_positions=16,
        num_experts=num_experts,
        experts_per_token=2 if num_experts else 0,
        expert_size=4 if num_experts else 0,
        moe_layers=(num_layers - 1,) if num_experts else (),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(["none", "heads"])),
    )


def numbered(arch: Architecture) -> dict[str, Tensor]:
    """A checkpoint in which every element of the model is another number."""
    found, start = {}, 0
    for tensor in (t for p in model_parameters(arch) if not p.copy for t in p.tensors):
        size = torch.Size(tensor.shape).numel()
        found[tensor.name] = torch.arange(start, start + size).view(tensor.shape)
        start += size
    return found


def reader(checkpoint: dict[str, Tensor]):
    def read(tensor: HfTensorSpec, dim: int, start: int, stop: int) -> Tensor:
        return checkpoint[tensor.name].narrow(dim, start, stop - start)

    return read


def find(arch: Architecture, suffix: str) -> ParameterSpec:
    return next(p for p in model_parameters(arch) if p.name.endswith(suffix))


@settings(max_examples=60)
@given(architectures(), SIZES, SIZES)
def test_cut_over_any_ranks_and_put_together_again(arch: Architecture, tp: int, etp: int):
    checkpoint = numbered(arch)
    back = {}
    for parameter in model_parameters(arch):
        size = parameter.axis(GridPosition(tp=AxisPosition(0, tp), etp=AxisPosition(0, etp))).size
        shards = [
            to_megatron(parameter, reader(checkpoint), arch, AxisPosition(r, size))
            for r in range(size)
        ]
        assert len({s.shape for s in shards}) == 1
        back |= dict(to_huggingface(parameter, shards, arch))
    assert back.keys() == checkpoint.keys()
    assert all(torch.equal(back[name], checkpoint[name]) for name in checkpoint)


@settings(max_examples=30)
@given(architectures(), SIZES)
def test_shards_hold_what_megatron_expects(arch: Architecture, tp: int):
    """Against a formula of its own: head by head for qkv, row by row for gate and up."""
    checkpoint = numbered(arch)
    d, per_group = arch.head_dim, arch.num_heads // arch.num_kv_heads
    q, k, v = (checkpoint[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    rows = []
    for group in range(arch.num_kv_heads):
        for head in range(group * per_group, (group + 1) * per_group):
            rows += [q[head * d + i] for i in range(d)]
        rows += [k[group * d + i] for i in range(d)] + [v[group * d + i] for i in range(d)]
    qkv = find(arch, "layers.0.self_attention.linear_qkv.weight")
    shards = [to_megatron(qkv, reader(checkpoint), arch, AxisPosition(r, tp)) for r in range(tp)]
    assert torch.equal(torch.cat(shards), torch.stack(rows))

    if 0 not in arch.moe_layers:
        gate, up = (checkpoint[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
        fc1 = find(arch, "layers.0.mlp.linear_fc1.weight")
        for rank in range(tp):
            local = to_megatron(fc1, reader(checkpoint), arch, AxisPosition(rank, tp))
            half = arch.ffn_size // tp
            mine = slice(rank * half, (rank + 1) * half)
            assert torch.equal(local[:half], gate[mine]) and torch.equal(local[half:], up[mine])


def test_every_name_is_there_once():
    arch = Architecture(
        "qwen3_moe",
        3,
        4,
        4,
        2,
        2,
        8,
        10,
        1e4,
        1e-6,
        False,
        16,
        4,
        2,
        4,
        True,
        (0, 2),
        qk_norm="heads",
    )
    found = model_parameters(arch)
    assert len({p.name for p in found}) == len(found) == 3 + 3 * 5 + 1 * 3 + 2 * (2 + 8)
    names = [t.name for p in found for t in p.tensors]
    assert len(set(names)) == len(names)
    assert find(arch, "decoder.layers.2.mlp.experts.linear_fc1.weight3").expert == 3
    assert find(arch, "decoder.layers.1.mlp.linear_fc2.weight").layer == 1


def test_padding_rows_are_zero():
    arch = Architecture("qwen3", 1, 4, 4, 2, 2, 8, 5, 1e4, 1e-6, False, 16)
    embedding = find(arch, "word_embeddings.weight")
    checkpoint = {k: v + 1 for k, v in numbered(arch).items()}
    last = to_megatron(embedding, reader(checkpoint), arch, AxisPosition(3, 4))
    assert last.shape == (2, 4) and not last.any()
