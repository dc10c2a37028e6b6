"""What a weight sync sends to an engine with FP8 weights, and what the engine is told of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rltrain.weights.architecture.decoder import MLA, Architecture
from rltrain.weights.architecture.quantization_config import BlockFP8, quantization
from rltrain.weights.families import model_parameters
from rltrain.weights.huggingface.load import read_tensors
from rltrain.weights.huggingface.quantized import quantize_fp8
from rltrain.weights.huggingface.tensor_files import SINGLE
from rltrain.weights.mapping.seeded import seeded_tensor
from rltrain.weights.sync.delivery import expected_tensors
from rltrain.weights.sync.engine_fp8 import check_fp8_blocks, fp8_config, quantize_stream
from rltrain.weights.sync.stream import BucketStream
from tests.unit.weights.held import HeldSender

ARCH = Architecture(
    family="qwen3_moe",
    num_layers=2,
    hidden_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=256,
    vocab_size=300,
    rope_theta=10000.0,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_positions=16,
    num_experts=4,
    experts_per_token=2,
    expert_size=128,
    norm_topk_prob=True,
    moe_layers=(1,),
)
LATENT = replace(
    ARCH,
    family="deepseek_v3",
    num_kv_heads=4,
    head_dim=96,
    mla=MLA(
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=32,
    ),
    score_function="sigmoid",
    expert_bias=True,
    shared_expert_size=128,
)
ROUTER = "model.layers.1.mlp.gate"


def stream(arch: Architecture) -> list[tuple[str, torch.Tensor]]:
    tensors = [t for p in model_parameters(arch) if not p.copy for t in p.tensors]
    return [(t.name, seeded_tensor(t).to(torch.bfloat16)) for t in tensors]


@pytest.mark.parametrize("arch", [ARCH, LATENT], ids=["grouped queries", "latent attention"])
def test_every_projection_is_sent_in_blocks_and_nothing_else(arch: Architecture) -> None:
    plain, sent = dict(stream(arch)), list(quantize_stream(stream(arch), arch))
    names = [name for name, _ in sent]
    expected = expected_tensors(arch, "bfloat16", fp8=True)
    assert len(names) == len(set(names)) and set(names) == expected.keys()
    assert plain.keys() == expected_tensors(arch, "bfloat16", fp8=False).keys()
    for name, tensor in sent:
        source = name.removesuffix("_scale_inv")
        if "_proj" in name and "norm" not in name:  # independent of how the rule is written
            values, scale = quantize_fp8(plain[source])
            expected = scale if name.endswith("_scale_inv") else values
            assert tensor.dtype == expected.dtype
        else:
            expected = plain[name]
            assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.float(), expected.float())
    assert f"{ROUTER}.weight" in names and f"{ROUTER}.weight_scale_inv" not in names
    # A rank that has no values cuts the stream where those that send it do.
    without = quantize_stream(((name, x.to("meta")) for name, x in stream(arch)), arch)
    forms = [[(name, x.dtype, x.shape) for name, x in found] for found in (without, sent)]
    assert forms[0] == forms[1]


def test_half_the_bytes_travel_in_buckets_of_the_same_size() -> None:
    arch = replace(ARCH, vocab_size=4)
    plain, sent = stream(arch), list(quantize_stream(stream(arch), arch))
    sizes = [sum(t.nbytes for _, t in tensors) for tensors in (plain, sent)]
    assert sizes[1] < 0.51 * sizes[0]
    received, sender = {}, HeldSender(50_000)
    buckets = BucketStream(quantize_stream(stream(arch), arch), sender, 50_000)
    while (bucket := buckets.next_bucket()) is not None:
        received |= dict(sender.read(bucket))
    buckets.close()
    assert received.keys() == dict(sent).keys()
    for name, tensor in sent:
        found = received[name]
        assert found.dtype == tensor.dtype and torch.equal(found.float(), tensor.float())


def test_the_configuration_declares_what_is_sent() -> None:
    for arch in (ARCH, LATENT):
        config = fp8_config(arch)
        assert quantization({"quantization_config": config}, "") == BlockFP8()
        kept = {f"{name}.weight" for name in config["modules_to_not_convert"]}
        assert kept == {"model.embed_tokens.weight", "lm_head.weight", f"{ROUTER}.weight"}


def test_a_folder_is_read_as_what_a_sync_would_send(tmp_path: Path) -> None:
    save_file(dict(stream(LATENT)), tmp_path / SINGLE)
    read = list(read_tensors(tmp_path, LATENT, torch.bfloat16))
    assert [name for name, _ in read] == [name for name, _ in stream(LATENT)]
    for (name, found), (_, expected) in zip(read, stream(LATENT), strict=True):
        buffer = name.endswith("e_score_correction_bias")
        assert found.dtype == (torch.float32 if buffer else torch.bfloat16)
        assert torch.equal(found.float(), expected.float())


def test_blocks_fit_what_the_engine_joins_and_cuts() -> None:
    check_fp8_blocks(ARCH, 1)
    check_fp8_blocks(LATENT, 1)
    with pytest.raises(ValueError, match=r"k_proj\.weight has shape \[64, 160\].*parts of 64"):
        check_fp8_blocks(replace(ARCH, num_kv_heads=1), 1)
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj\.weight has shape \[48, 160\]"):
        check_fp8_blocks(replace(ARCH, expert_size=48), 1)
    with pytest.raises(ValueError, match=r"k_proj\.weight.*tensor_parallel=2.*multiple of 128"):
        check_fp8_blocks(ARCH, 2)
    check_fp8_blocks(replace(ARCH, head_dim=128, expert_size=256), 2)
    wide = replace(LATENT.mla, qk_nope_head_dim=96)
    latent = replace(LATENT, head_dim=128, mla=wide, expert_size=256, shared_expert_size=256)
    with pytest.raises(ValueError, match=r"o_proj\.weight has shape \[160, 128\].*parts of 64"):
        check_fp8_blocks(latent, 2)
