"""Responses that end at stop strings, in vLLM with our scheduler, with routes and without.

The same requests are answered with strings and without. On a GPU vLLM samples a token ahead: it is
worth running there, too.

    python tests/integration/test_stop_scheduler.py FOLDER       # where there is no pytest
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
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the first engine's is still there when the second starts
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
PROMPTS = [[2 + (i * j) % 40 for j in range(n)] for i, n in enumerate([9, 13, 17, 21, 25, 60])]
NEW_TOKENS = 24
LETTERS = [chr(ord("A") + i) for i in range(48)]  # by token


def check_all(found: dict[str, Any]) -> None:
    for kind in ("routes", "no_routes"):
        check(**found[kind], stops=found["stops"])
        for prompt, whole, cut in zip(PROMPTS, *found[kind].values(), strict=True):
            for answer in (whole, cut):
                rows = len(prompt) + len(answer["tokens"]) - 1
                assert len(answer["routes"]) == (rows if kind == "routes" else 0)
            if not torch.cuda.is_available():  # what shares a batch decides how sums are rounded
                assert cut["routes"] == whole["routes"][: len(cut["routes"])]


def check(whole: list[Any], cut: list[Any], stops: list[str]) -> None:
    ended = [answer["stop"] for answer in cut]
    assert None in ended and set(stops) <= set(ended)
    for uncut, answer in zip(whole, cut, strict=True):
        tokens, stop = answer["tokens"], answer["stop"]
        text = text_of(tokens)
        assert not any(each in text[:-1] for each in stops)
        assert stop == next((each for each in stops if each in text), None)
        assert answer["reason"] == ("stop" if stop else "length")
        assert stop or len(tokens) == NEW_TOKENS
        assert len(answer["logprobs"]) == len(tokens)
        if not torch.cuda.is_available():
            assert tokens == uncut["tokens"][: len(tokens)]
            assert answer["logprobs"] == uncut["logprobs"][: len(tokens)]


def text_of(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


# In the process with vLLM


def save_with_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from tests.integration.scheduler_model import save_scheduler_model

    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    save_scheduler_model(folder)


def engine(folder: Path, *, routes: bool) -> Any:
    from vllm import LLM

    from rltrain.rollout.launch import ROUTE_SCHEDULER

    return LLM(
        str(folder),
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=96,
        gpu_memory_utilization=0.2,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        enable_return_routed_experts=routes,
        scheduler_cls=ROUTE_SCHEDULER,
    )


def answers(llm: Any, stops: list[str]) -> list[dict[str, Any]]:
    """To one request after the other: alone each is computed in the same way, cut or not."""
    from rltrain.rollout.completion import sampled_logprobs, stop_string, vllm_params
    from rltrain.rollout.requests import Request, SamplingParams

    found = []
    sampling = SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, stop=tuple(stops))
    for i, prompt in enumerate(PROMPTS):
        request = Request(tuple(prompt), i, f"{i}", 0)
        params = vllm_params(request, sampling, [])
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        answer = output.outputs[0]
        routes = answer.routed_experts
        found.append(
            {
                "tokens": list(answer.token_ids),
                "stop": stop_string(answer),
                "reason": answer.finish_reason,
                "logprobs": sampled_logprobs(request, answer),
                "routes": [] if routes is None else routes.tolist(),
            }
        )
    return found


def main(folder: Path) -> None:
    os.environ |= ENVIRONMENT
    save_with_tokenizer(folder / "model")
    found: dict[str, Any] = {}
    for kind in ("routes", "no_routes"):
        llm = engine(folder / "model", routes=kind == "routes")
        in_advance = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        assert in_advance == torch.cuda.is_available()
        whole = answers(llm, [])
        if not found:  # such as two of the responses have
            first, second = text_of(whole[0]["tokens"]), text_of(whole[1]["tokens"])
            found["stops"] = [first[11:14], second[6:8]]
        found[kind] = {"whole": whole, "cut": answers(llm, found["stops"])}
    (folder / "found.json").write_text(json.dumps(found))
    check_all(found)
    sys.stdout.write(f"ended at {found['stops']}; a token ahead: {in_advance}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
else:
    import pytest

    pytestmark = pytest.mark.integration

    def test_a_response_ends_with_the_token_that_completes_a_string(tmp_path: Path) -> None:
        command = [sys.executable, __file__, str(tmp_path)]
        subprocess.run(command, env=os.environ | ENVIRONMENT, check=True, timeout=300)
        check_all(json.loads((tmp_path / "found.json").read_text()))
