"""What vLLM samples from models in folders, with its log-probabilities and routes.

    python -m tests.integration.family_engine DTYPE TEMPERATURE[,TEMPERATURE ...] FOLDER ...

Writes ``DTYPE.routes.safetensors`` and ``DTYPE.logprobs.safetensors`` into every folder, from the
model in its ``model/``; where there are several temperatures, ``DTYPE.TEMPERATURE.``. One process,
one engine after the other.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes

import numpy as np
import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.model_executor.layers import rotary_embedding

from rltrain.patches import vllm as vllm_patches
from rltrain.routing.codec import encode
from rltrain.verification.routes_file import Routes
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import read_architecture

NUM_PROMPTS = 32
PROMPT_TOKENS = 5
RESPONSE_TOKENS = 20


def prompts(vocab_size: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator)
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def run(folder: Path, dtype: str, temperatures: list[str]) -> None:
    arch = read_architecture(folder / "model")
    vars(rotary_embedding)["_ROPE_DICT"].clear()  # shared among the engines of a process
    engine = LLM(
        model=str(folder / "model"),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=PROMPT_TOKENS + RESPONSE_TOKENS,
        kv_cache_memory_bytes=16 * 2**20,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
        enable_return_routed_experts=True,
        hf_overrides={"head_dtype": "float32"},
    )
    for temperature in temperatures:
        sampling = SamplingParams(
            temperature=float(temperature),
            seed=1,
            max_tokens=RESPONSE_TOKENS,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
        )
        outputs = engine.generate(prompts(arch.vocab_size), sampling, use_tqdm=False)
        routes, logprobs = collect(outputs, arch)
        name = dtype if len(temperatures) == 1 else f"{dtype}.{temperature}"
        routes.save(folder / f"{name}.routes.safetensors")
        save_file({"logprobs": logprobs}, folder / f"{name}.logprobs.safetensors")


def collect(outputs: list[Any], arch: Architecture) -> tuple[Routes, torch.Tensor]:
    """Of all samples; the row of a last token is not captured. Log-probabilities of a prompt: 0."""
    tokens, ids, logprobs = [], [], []
    for output in outputs:
        [completion] = output.outputs
        sampled = list(completion.token_ids)
        sample = [*output.prompt_token_ids, *sampled]
        rows = completion.routed_experts[:, list(arch.moe_layers)]
        assert len(rows) == len(sample) - 1, (rows.shape, len(sample))
        tokens += sample
        ids += [rows, np.zeros_like(rows[:1])]
        logprobs += [0.0] * PROMPT_TOKENS
        logprobs += [at[t].logprob for t, at in zip(sampled, completion.logprobs, strict=True)]
    length = PROMPT_TOKENS + RESPONSE_TOKENS
    mask = torch.ones(len(tokens), dtype=torch.bool)
    mask[length - 1 :: length] = False
    routes = Routes(
        ids=torch.from_numpy(encode(np.concatenate(ids), arch.num_experts)),
        route_mask=mask,
        seq_lens=torch.full((len(outputs),), length),
        tokens=torch.tensor(tokens),
        layers=arch.moe_layers,
        num_experts=arch.num_experts,
        weight_version=0,
        producer="vLLM",
    )
    return routes, torch.tensor(logprobs)


if __name__ == "__main__":
    vllm_patches.patch_vllm_for_cpu()
    dtype, temperatures, *folders = sys.argv[1:]
    for folder in folders:
        run(Path(folder), dtype, temperatures.split(","))
