"""Routes sent once against routes sent token by token: vLLM in one process, the same requests.

The KV cache is so small that requests are preempted and computed again, and one is aborted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.integration, pytest.mark.skipif(torch.cuda.is_available(), reason="CPU")]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
PROMPTS = [[2 + (i * j) % 40 for j in range(9 + 4 * i)] for i in range(6)]
ABORTED, NEW_TOKENS, BLOCK, BLOCKS = "3", 24, 32, 9


def test_a_response_has_the_same_routes_in_one_message(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path)]
    subprocess.run(command, env=os.environ | ENVIRONMENT, check=True, timeout=300)
    found = json.loads((tmp_path / "found.json").read_text())
    theirs, ours = found["vllm"], found["ours"]
    finished = {str(i) for i in range(len(PROMPTS))} - {ABORTED}
    assert theirs["routes"].keys() == ours["routes"].keys() == finished
    assert ours["tokens"] == theirs["tokens"]
    assert ours["routes"] == theirs["routes"]
    assert ours["preemptions"] == theirs["preemptions"] > 0
    assert {len(set(map(str, rows))) > 4 for rows in ours["routes"].values()} == {True}
    assert ours["messages_with_routes"] == len(finished)
    assert theirs["messages_with_routes"] > len(finished) * (NEW_TOKENS - 1)
    assert ours["left_behind"] == 0


# In the process with vLLM


def save_model(folder: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=48,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def generate(folder: Path, **scheduler: str) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=96,
        gpu_memory_utilization=0.2,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        enable_chunked_prefill=False,
        enable_return_routed_experts=True,
        **scheduler,
    )
    engine: Any = llm.llm_engine
    scheduler_of_engine = engine.engine_core.engine_core.scheduler
    counts = {"messages_with_routes": 0, "preemptions": 0}
    process, preempt = engine.output_processor.process_outputs, scheduler_of_engine._preempt_request

    def counting(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        counts["messages_with_routes"] += sum(o.routed_experts is not None for o in outputs)
        return process(outputs, *args, **kwargs)

    def preempting(*args: Any, **kwargs: Any) -> Any:
        counts["preemptions"] += 1
        return preempt(*args, **kwargs)

    engine.output_processor.process_outputs = counting
    scheduler_of_engine._preempt_request = preempting
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    tokens, routes, steps = {}, {}, 0
    while engine.has_unfinished_requests():
        for request in engine.step():
            if request.finished and request.request_id != ABORTED:
                tokens[request.request_id] = list(request.outputs[0].token_ids)
                routes[request.request_id] = request.outputs[0].routed_experts.tolist()
        steps += 1
        if steps == 5:
            engine.abort_request([ABORTED])
    left = len(getattr(scheduler_of_engine, "held_routes", ()))
    return {"tokens": tokens, "routes": routes, "left_behind": left, **counts}


def main(folder: Path) -> None:
    from rltrain.rollout.launch import ROUTE_SCHEDULER

    save_model(folder / "model")
    found = {
        "vllm": generate(folder / "model"),
        "ours": generate(folder / "model", scheduler_cls=ROUTE_SCHEDULER),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
