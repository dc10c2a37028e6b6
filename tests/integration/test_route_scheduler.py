"""Routes sent once against routes sent token by token: vLLM in one process, the same requests.

Both against requests that run alone, undisturbed, and those against the same with a cached prompt.

The KV cache is so small that requests are preempted and computed again, one of them before all of
its prompt was, and one is aborted. In the first layer's place routes say in which step they were
computed, so that those of a token computed again are told from those it was sampled with.

On a GPU vLLM schedules a step while the last one runs, so a request is preempted with a token under
way: it is worth running there, too (tests/unit/rollout/test_route_scheduler.py does so without).

    python tests/integration/test_route_scheduler.py FOLDER      # where there is no pytest
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
PROMPTS = [
    [2 + (i * j) % 40 for j in range(length)] for i, length in enumerate([9, 13, 17, 21, 25, 60])
]
ABORTED, NEW_TOKENS, BLOCK, BLOCKS, PIECE = "3", 24, 32, 7, 8


def check(theirs: dict[str, Any], ours: dict[str, Any], alone: dict[str, Any]) -> None:
    finished = {str(i) for i in range(len(PROMPTS))} - {ABORTED}
    assert theirs["routes"].keys() == ours["routes"].keys() == finished
    assert ours["tokens"] == theirs["tokens"]
    assert ours["routes"] == theirs["routes"]
    assert ours["preemptions"] == theirs["preemptions"] > ours["before_a_token"] > 0
    for rows in ours["routes"].values():
        steps, chosen = zip(*rows, strict=True)
        assert len(set(map(str, chosen))) > 4
        assert len(set(map(str, steps))) >= NEW_TOKENS
    assert ours["async_scheduling"] == theirs["async_scheduling"] == torch.cuda.is_available()
    assert ours["messages_with_routes"] == len(finished)
    assert theirs["messages_with_routes"] > len(finished) * (NEW_TOKENS - 1)
    assert ours["left_behind"] == 0
    if not torch.cuda.is_available():  # in bf16 which tokens share a pass may flip an expert
        for name in finished:
            assert ours["tokens"][name] == alone["tokens"][name]
            chosen = [row[1] for row in ours["routes"][name]]
            assert chosen == [row[1] for row in alone["routes"][name]], "preempted and in pieces"
    assert alone["cached_tokens"] >= BLOCK
    assert alone["cached"] == alone["routes"]


# In the process with vLLM


def engine_on(folder: Path, blocks: int, piece: int, **scheduler: str) -> Any:
    from vllm import LLM

    return LLM(
        str(folder),
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=96,
        gpu_memory_utilization=0.2,
        block_size=BLOCK,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=piece,
        max_num_seqs=len(PROMPTS),
        enable_return_routed_experts=True,
        **scheduler,
    )


def sampling() -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def generate_alone(folder: Path, **scheduler: str) -> dict[str, Any]:
    """Every request by itself, whole and with room enough; then again with its prompt cached."""
    llm = engine_on(folder, 64, 96, **scheduler)
    outputs: list[list[Any]] = [
        [llm.generate({"prompt_token_ids": p}, sampling(), use_tqdm=False)[0] for p in PROMPTS]
        for _ in range(2)
    ]
    routes = [
        {str(i): output.outputs[0].routed_experts.tolist() for i, output in enumerate(found)}
        for found in outputs
    ]
    tokens = {str(i): list(output.outputs[0].token_ids) for i, output in enumerate(outputs[0])}
    cached_tokens = max(output.num_cached_tokens for output in outputs[1])
    return {
        "tokens": tokens,
        "routes": routes[0],
        "cached": routes[1],
        "cached_tokens": cached_tokens,
    }


def generate(folder: Path, **scheduler: str) -> dict[str, Any]:
    engine: Any = engine_on(folder, BLOCKS, PIECE, **scheduler).llm_engine
    scheduler_of_engine = engine.engine_core.engine_core.scheduler
    counts = {"messages_with_routes": 0, "preemptions": 0, "before_a_token": 0, "steps": 0}
    process, preempt = engine.output_processor.process_outputs, scheduler_of_engine._preempt_request
    update = scheduler_of_engine.update_from_output

    def stamping(step: Any, output: Any) -> Any:
        if output.routed_experts is not None:
            counts["steps"] += 1
            output.routed_experts.routing_data[:, 0] = counts["steps"]
        return update(step, output)

    def counting(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        counts["messages_with_routes"] += sum(o.routed_experts is not None for o in outputs)
        return process(outputs, *args, **kwargs)

    def preempting(request: Any, *args: Any, **kwargs: Any) -> Any:
        counts["preemptions"] += 1
        counts["before_a_token"] += request.num_output_tokens == 0
        return preempt(request, *args, **kwargs)

    engine.output_processor.process_outputs = counting
    scheduler_of_engine._preempt_request = preempting
    scheduler_of_engine.update_from_output = stamping
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling())
    tokens, routes, steps = {}, {}, 0
    while engine.has_unfinished_requests():
        for request in engine.step():
            if request.finished and request.request_id != ABORTED:
                tokens[request.request_id] = list(request.outputs[0].token_ids)
                routes[request.request_id] = request.outputs[0].routed_experts.tolist()
        steps += 1
        if steps == 5:
            engine.abort_request([ABORTED])
    left = sum(
        len(getattr(scheduler_of_engine, name, ()))
        for name in ("ended_routes", "kept_routes", "lost_slots")
    )
    in_advance = engine.vllm_config.scheduler_config.async_scheduling
    found = {"tokens": tokens, "routes": routes, "left_behind": left}
    return found | counts | {"async_scheduling": in_advance}


def table(theirs: dict[str, Any], ours: dict[str, Any], alone: dict[str, Any]) -> list[str]:
    """What docs/routes.md shows, in Markdown."""
    crowded = {n: [row[1] for row in rows] for n, rows in ours["routes"].items()}
    calm = {n: [row[1] for row in rows] for n, rows in alone["routes"].items()}
    prompts = {n: len(PROMPTS[int(n)]) for n in crowded}
    preempted = (
        f"{ours['preemptions']} preemptions, {ours['before_a_token']} before the first token"
    )
    cases = {
        f"the prompt is in the prefix cache, up to {alone['cached_tokens']} tokens of it": [
            (alone["cached"][n], alone["routes"][n]) for n in alone["routes"]
        ],
        f"the prompt is read {PIECE} tokens at a time": [
            (crowded[n][: prompts[n]], calm[n][: prompts[n]]) for n in crowded
        ],
        f"preempted and computed again: {preempted}": [
            (crowded[n][prompts[n] :], calm[n][prompts[n] :]) for n in crowded
        ],
        "routes token by token, as vLLM sends them, with the step of each row": [
            (ours["routes"][n], theirs["routes"][n]) for n in crowded
        ],
    }
    lines = ["| request | rows | equal |", "|---|---|---|"]
    for case, pairs in cases.items():
        same = [a == b for one, two in pairs for a, b in zip(one, two, strict=True)]
        lines.append(f"| {case} | {len(same)} | {sum(same)} |")
    return lines


def main(folder: Path) -> None:
    from rltrain.rollout.launch import ROUTE_SCHEDULER
    from tests.integration.scheduler_model import save_scheduler_model

    os.environ |= ENVIRONMENT
    save_scheduler_model(folder / "model")
    found = {
        "theirs": generate(folder / "model"),
        "ours": generate(folder / "model", scheduler_cls=ROUTE_SCHEDULER),
        "alone": generate_alone(folder / "model", scheduler_cls=ROUTE_SCHEDULER),
    }
    (folder / "found.json").write_text(json.dumps(found))
    check(**found)
    sys.stdout.write("\n".join(table(**found)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
else:
    import pytest

    pytestmark = pytest.mark.integration

    def test_a_response_has_the_same_routes_in_one_message(tmp_path: Path) -> None:
        command = [sys.executable, __file__, str(tmp_path)]
        subprocess.run(command, env=os.environ | ENVIRONMENT, check=True, timeout=300)
        check(**json.loads((tmp_path / "found.json").read_text()))
