"""Engines whose weights are stored in another form than they use: loading, then syncs.

vLLM multiplies FP8 blocks on CPUs with AMX instructions only. Here plain torch does it instead;
the folders, the loading, the reloading and the names are vLLM's own.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, SamplingParams
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from rltrain.weights.families import read_architecture
from rltrain.weights.huggingface.load import read_tensors
from rltrain.weights.huggingface.quantized import quantize_fp8
from rltrain.weights.huggingface.tensor_files import SINGLE
from rltrain.weights.sync import receiver
from rltrain.weights.sync.broadcast import BroadcastSender
from rltrain.weights.sync.digest import check_same
from rltrain.weights.sync.engine_fp8 import LOAD_FORMAT, fp8_config, quantize_stream
from rltrain.weights.sync.stream import BucketStream
from tests.distributed.tiny_families import make
from tests.integration.sync_group import CPU, join

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]

PROMPTS = [{"prompt_token_ids": [7, 3, 11, 5 + i, 2]} for i in range(4)]
Named = Iterable[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two random models, each in bf16 and in FP8 blocks; hidden size 160 leaves ragged blocks."""
    found = {}
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(
            vocab_size=200,
            hidden_size=160,
            moe_intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
        plain = tmp_path_factory.mktemp(f"bf16-{seed}")
        Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(plain)
        arch = read_architecture(plain)
        found[f"bf16 {seed}"] = plain
        found[f"fp8 {seed}"] = save(
            tmp_path_factory.mktemp(f"fp8-{seed}"),
            quantize_stream(tensors_of(plain), arch),
            config_of(plain) | {"quantization_config": fp8_config(arch)},
        )
    return found


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def save(folder: Path, tensors: Named, config: dict[str, Any]) -> Path:
    save_file(dict(tensors), folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    return read_tensors(folder, read_architecture(folder), torch.bfloat16)


def engine_on(folder: Path, **options: Any) -> LLM:
    rotary_embedding._ROPE_DICT.clear()  # which the engines of a process share
    return LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        kv_cache_memory_bytes=16 * 2**20,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
        **receiver.receiver_args(),
        **options,
    )


def reading_otherwise(quantization: dict[str, Any] | None) -> dict[str, Any]:
    overrides = {"quantization_config": quantization}
    return {"load_format": LOAD_FORMAT, "hf_overrides": overrides}


def sync(engine: LLM, tensors: Named) -> None:
    sender = BroadcastSender(join(engine), CPU, 200_000)
    engine.start_weight_update()
    stream = BucketStream(iter(tensors), sender, 200_000)
    while (bucket := stream.next_bucket()) is not None:
        sender.send()
        engine.update_weights({"update_info": dict(bucket)})
    stream.close()
    engine.finish_weight_update()
    assert engine.reset_prefix_cache()


def digest(engine: LLM) -> dict[str, str]:
    return engine.collective_rpc("weight_digest")[0]


def generate(engine: LLM) -> list[Any]:
    sampling = SamplingParams(
        temperature=1.0, seed=1, max_tokens=12, logprobs=0, detokenize=False, ignore_eos=True
    )
    completions = [o.outputs[0] for o in engine.generate(PROMPTS, sampling, use_tqdm=False)]
    return [
        (list(c.token_ids), [at.popitem()[1].logprob for at in c.logprobs]) for c in completions
    ]


def test_a_folder_in_fp8_runs_in_bf16_and_is_synced(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Nothing in the place of anything: the engine runs what the policy reads of the folder."""
    engine = engine_on(folders["fp8 0"], **reading_otherwise(None))
    config = config_of(folders["bf16 0"])
    fresh = engine_on(save(tmp_path, tensors_of(folders["fp8 0"]), config))
    check_same(digest(engine), digest(fresh))
    assert generate(engine) == generate(fresh)
    sync(engine, tensors_of(folders["bf16 1"]))
    fresh = engine_on(folders["bf16 1"])
    check_same(digest(engine), digest(fresh))
    assert generate(engine) == generate(fresh)


def test_gpt_oss_in_mxfp4_runs_in_bf16_and_is_synced(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("model", "mxfp4", "plain")}
    make("gpt_oss").to(torch.bfloat16).save_pretrained(folders["model"])
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folders["model"] / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, rows, columns = tensor.shape
            packed = (experts, columns, rows // 32)
            stored[f"{name}_blocks"] = torch.randint(256, (*packed, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(118, 122, packed, dtype=torch.uint8)
        else:
            stored[name] = tensor
    config = config_of(folders["model"])
    folders["mxfp4"].mkdir()
    folders["plain"].mkdir()
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    save(folders["mxfp4"], stored.items(), config | mxfp4)
    save(folders["plain"], tensors_of(folders["mxfp4"]), config)
    engine = engine_on(folders["mxfp4"], **reading_otherwise(None))
    fresh = digest(engine_on(folders["plain"]))
    check_same(digest(engine), fresh)
    sync(engine, tensors_of(folders["plain"]))
    check_same(digest(engine), fresh)


def test_an_engine_in_fp8_is_synced_bitwise(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_in_torch(monkeypatch)
    arch = read_architecture(folders["bf16 0"])
    engine = engine_on(folders["bf16 0"], **reading_otherwise(fp8_config(arch)))
    fresh = engine_on(folders["fp8 0"])  # vLLM's own loader on a folder as DeepSeek's
    check_same(digest(engine), digest(fresh))
    assert generate(engine) == generate(fresh)
    del fresh
    for _ in range(2):
        sync(engine, quantize_stream(tensors_of(folders["bf16 1"]), arch))
    fresh = engine_on(folders["fp8 1"])
    check_same(digest(engine), digest(fresh))
    assert generate(engine) == generate(fresh)
    lost = "model.layers.1.mlp.experts.5.up_proj.weight_scale_inv"
    sent = [
        pair for pair in quantize_stream(tensors_of(folders["bf16 1"]), arch) if pair[0] != lost
    ]
    unfilled = r"routed_experts \(491566 of 491568 elements\)"
    with pytest.raises(ValueError, match=rf"missing \['{lost}'\] \(1 in all\).*{unfilled}"):
        sync(engine, sent)


def test_blocks_are_those_of_vllm() -> None:
    with torch.compiler.set_stance("force_eager"):
        for rows, columns, dtype in ((256, 384, torch.bfloat16), (129, 300, torch.float32)):
            tensor = torch.randn(rows, columns, dtype=dtype) * torch.rand(rows, 1, dtype=dtype)
            tensor[:, :128] = 0
            found, theirs = quantize_fp8(tensor), per_block_cast_to_fp8(tensor)
            for ours, expected in zip(found, theirs, strict=True):
                assert ours.dtype == expected.dtype
                assert torch.equal(ours.float(), expected.float())


def multiply_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's two AMX kernels compute, and weights in the order of rows that it needs."""

    def plain(values: Tensor, scale: Tensor) -> Tensor:
        rows, columns = values.shape[-2:]
        grown = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
        return values.float() * grown[..., :rows, :columns]

    def multiply(kernel: Any, layer: Any, x: Tensor, bias: Any = None) -> Tensor:
        weight = plain(layer.weight, layer.weight_scale_inv)
        return linear(x.float(), weight).to(x.dtype)

    def experts(
        kernel: Any,
        out: Tensor,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        gates: Tensor,
        ids: Tensor,
        *_: Any,
    ) -> None:
        first, second = plain(w1, kernel.w1_scale), plain(w2, kernel.w2_scale)
        found = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(len(first)):
            gate, up = linear(x.float(), first[expert]).chunk(2, dim=-1)
            weight = (gates * (ids == expert)).sum(-1, keepdim=True)
            found += weight * linear(silu(gate) * up, second[expert])
        out.copy_(found)

    kernel, moe = CPUFp8BlockScaledMMKernel, cpu_moe.CPUExpertsFp8
    monkeypatch.setattr(kernel, "is_supported", classmethod(lambda *_: (True, None)))
    monkeypatch.setattr(kernel, "process_weights_after_loading", lambda *_: None)
    monkeypatch.setattr(kernel, "apply_weights", multiply)
    monkeypatch.setattr(moe, "_supports_current_device", staticmethod(lambda: True))
    monkeypatch.setattr(moe, "apply", lambda kernel, **given: experts(kernel, *given.values()))
    monkeypatch.setattr(cpu_moe, "prepare_fp8_moe_layer_for_cpu", lambda w1, w2: (w1, w2))
