"""Weight sync into a real vLLM engine: bitwise what a fresh engine loads, or an error."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.v1.engine.async_llm import AsyncLLM

from rltrain.weights import receiver
from rltrain.weights.digest import check_same
from rltrain.weights.transport import SHARED_MEMORY, Bucket, BucketWriter

pytestmark = [pytest.mark.integration, pytest.mark.skipif(torch.cuda.is_available(), reason="CPU")]

PROMPTS = [{"prompt_token_ids": [7, 3, 11, 5 + i, 2]} for i in range(4)]
# Five buckets or more, so that layers span them.
BUCKET_BYTES = 200_000

Weights = dict[str, torch.Tensor]
MakeModel = Callable[[int, str], tuple[Path, Weights]]


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    def make(seed: int, dtype: str) -> tuple[Path, Weights]:
        """A folder with random weights, and its tensors as a policy would send them."""
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(
            vocab_size=200,  # vLLM pads it to 256
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=48,  # the CPU kernel pads it to 64
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
        folder = tmp_path_factory.mktemp(f"seed{seed}")
        Qwen3MoeForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
        return folder, _read(folder)

    return make


def _read(folder: Path) -> Weights:
    from safetensors.torch import load_file

    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def arguments(folder: Path, dtype: str) -> dict[str, Any]:
    return {
        "model": str(folder),
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "logprobs_mode": "processed_logprobs",
        "distributed_executor_backend": "uni",
        **receiver.engine_args(),
    }


def sampling() -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=1, max_tokens=12, logprobs=0, detokenize=False, ignore_eos=True
    )


def sampled(outputs: list[Any]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities."""
    completions = [output.outputs[0] for output in outputs]
    return [
        (
            list(c.token_ids),
            [at[token].logprob for token, at in zip(c.token_ids, c.logprobs, strict=True)],
        )
        for c in completions
    ]


def generate(engine: LLM) -> list[tuple[list[int], list[float]]]:
    return sampled(engine.generate(PROMPTS, sampling(), use_tqdm=False))


def digest(engine: LLM) -> dict[str, str]:
    return engine.collective_rpc("weight_digest")[0]


def buckets(weights: Weights) -> Iterator[Bucket]:
    with BucketWriter(iter(weights.items()), BUCKET_BYTES) as writer:
        while (bucket := writer.next_bucket()) is not None:
            yield bucket


def sync(engine: LLM, weights: Weights, spoil: Callable[[Bucket], None] | None = None) -> None:
    engine.start_weight_update()
    for bucket in buckets(weights):
        if spoil:
            spoil(bucket)
        engine.update_weights({"update_info": dict(bucket)})
    engine.finish_weight_update()
    assert engine.reset_prefix_cache()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_syncs_in_a_row_equal_fresh_engines(make_model: MakeModel, dtype: str) -> None:
    engine = LLM(**arguments(make_model(0, dtype)[0], dtype))
    for seed in (1, 2):
        folder, weights = make_model(seed, dtype)
        sync(engine, weights)
        fresh = LLM(**arguments(folder, dtype))
        check_same(digest(engine), digest(fresh))
        assert generate(engine) == generate(fresh)
