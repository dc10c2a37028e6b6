"""Conversations of several turns in a real engine, against transformers in fp32 and against the
whole conversation read at once.

Tokens, log-probabilities and routes of the joined turns have to be those of one undisturbed pass:
with a prefix cache, without one, and with a KV cache that has room for one of six conversations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import Qwen3MoeForCausalLM

from rltrain.config.rollout import RolloutConfig
from rltrain.rollout.engine import start_engine
from rltrain.rollout.generator import build_batch
from rltrain.rollout.launch import EngineSpec, RouteCapture
from rltrain.rollout.requests import Request, Rollout, SamplingParams
from rltrain.rollout.route_store import store_here
from rltrain.rollout.turns import join_turns, next_turn
from tests.integration.random_moe import SHAPE, VOCABULARY, random_moe, routes_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]
LONGEST = 480
SAMPLING = SamplingParams(temperature=1.0, max_tokens=40, capture_routes=True)
ENGINES: dict[str, dict[str, Any]] = {
    "prefix cache": {},
    "no prefix cache": {"enable_prefix_caching": False},
    # Room for 15 x 32 tokens, which is one conversation at its end. Six of them begin, so that
    # some have to give up their blocks while they generate.
    "small KV cache": {"num_gpu_blocks_override": 16},
}


@dataclass(frozen=True)
class Served:
    engine: Any
    model: Qwen3MoeForCausalLM

    def converse(self, turns: list[int], observed: int) -> list[list[Rollout]]:
        """Conversations of so many turns, side by side, turn by turn."""
        draw = np.random.default_rng(0)
        asked = [
            Request(tuple(draw.integers(2, VOCABULARY, 9 + 11 * n).tolist()), n, f"{n}", 0)
            for n in range(len(turns))
        ]
        taken: list[list[Rollout]] = [[] for _ in turns]
        while going := [n for n in range(len(turns)) if len(taken[n]) < turns[n]]:
            answers = ray.get(self.engine.generate.remote([asked[n] for n in going], SAMPLING))
            for n, rollout in zip(going, answers, strict=True):
                taken[n].append(rollout)
                said = draw.integers(2, VOCABULARY, observed).tolist()
                asked[n] = next_turn(asked[n], rollout, said, seed=len(taken[n]))
        return taken

    def reference(self, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probability of each token but the first, and the experts of each but the last."""
        tokens = torch.tensor([*rollout.prompt_tokens, *rollout.response_tokens])
        with torch.no_grad():
            out = self.model(tokens[None, :-1], output_router_logits=True)
        of_next = out.logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        chosen = [layer.topk(2).indices.sort().values for layer in out.router_logits]
        return of_next, torch.stack(chosen, 1)

    def at_once(self, rollouts: list[Rollout]) -> list[torch.Tensor]:
        """The routes of the same tokens as the prompts of one request each."""
        whole = [
            Request((*one.prompt_tokens, *one.response_tokens), 0, "whole", n)
            for n, one in enumerate(rollouts)
        ]
        one = SamplingParams(temperature=1.0, max_tokens=1, capture_routes=True)
        return [routes_of(found)[:-1] for found in ray.get(self.engine.generate.remote(whole, one))]


@pytest.fixture(
    scope="module",
    params=[
        "prefix cache",
        pytest.param("no prefix cache", marks=pytest.mark.slow),
        pytest.param("small KV cache", marks=pytest.mark.slow),
    ],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    config = random_moe(2 * LONGEST)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    rollout = RolloutConfig(
        max_response_tokens=SAMPLING.max_tokens,
        dtype="float32",
        engine_args={"skip_tokenizer_init": True, "block_size": 32, **ENGINES[request.param]},
    )
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    capture = RouteCapture(SHAPE, store_here(), (1, 1))
    spec = EngineSpec(str(folder), rollout, LONGEST - SAMPLING.max_tokens, 0, "cpu", capture)
    engine, ready = start_engine(spec)
    ray.get(ready)
    yield Served(engine, model)
    ray.shutdown()


def test_turns_are_one_undisturbed_conversation(served: Served) -> None:
    conversations = served.converse(turns=[1, 2, 3, 4, 5, 6], observed=21)
    joined = [join_turns(turns) for turns in conversations]
    batch = build_batch(joined, 1)
    assert batch.route_mask is not None
    assert int(batch.route_mask.sum()) == batch.num_tokens - batch.num_sequences
    for turns, rollout, at_once in zip(conversations, joined, served.at_once(joined), strict=True):
        rows = [ref.rows for turn in turns for ref in turn.routes]
        assert sum(rows) == len(rollout.prompt_tokens) + len(rollout.response_tokens) - 1
        logprobs, experts = served.reference(rollout)
        sampled = torch.ones(len(rollout.response_tokens), dtype=torch.bool)
        for begin, end in rollout.observations:
            sampled[begin:end] = False
        assert int(sampled.sum()) == SAMPLING.max_tokens * len(turns)
        of_response = logprobs[len(rollout.prompt_tokens) - 1 :]
        differences = (of_response - torch.tensor(rollout.logprobs))[sampled].abs()
        assert float(differences.max()) < 1e-3
        found = routes_of(rollout)
        assert float((found == experts).all(-1).float().mean()) > 0.999
        assert float((found == at_once).all(-1).float().mean()) > 0.999
        # A row too early or too late is seen.
        assert float((found[1:] == experts[:-1]).all(-1).float().mean()) < 0.5
