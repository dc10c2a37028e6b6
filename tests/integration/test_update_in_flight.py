"""Weights that change in the midst of responses, in a real engine, against transformers.

The reference computes the same tokens with the same KV cache: what was read before an update was
read by the weights of that time, or is read again by the new ones. Were a boundary one token off,
it would see that.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, Qwen3MoeForCausalLM

from rltrain.config.rollout import RolloutConfig
from rltrain.parallel.rendezvous import Rendezvous
from rltrain.rollout.engine import start_engine
from rltrain.rollout.launch import EngineSpec, RouteCapture
from rltrain.rollout.requests import Request, Rollout, SamplingParams
from rltrain.rollout.route_store import store_here
from rltrain.weights.sync.broadcast import BroadcastGroup, BroadcastSender
from tests.integration.random_moe import SHAPE, VOCABULARY, random_moe, routes_of
from tests.integration.sync_links import links, send_weights

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]
TOKENS, PROMPT = 600, 70
VERSIONS = range(3)
"""Of weights: those that the engine starts with, and those of two updates."""
CPU = torch.device("cpu")
SAMPLING = SamplingParams(temperature=1.0, max_tokens=TOKENS, capture_routes=True)
SHORT = SamplingParams(temperature=1.0, max_tokens=3, capture_routes=True)


@dataclass(frozen=True)
class Served:
    engine: Any
    folders: Sequence[Path]
    group: BroadcastGroup
    recomputes: bool

    def update(self, version: int) -> None:
        """As the controller syncs, while requests run."""
        ray.get(self.engine.start_weight_sync.remote())
        weights = load_file(self.folders[version] / "model.safetensors")
        send_weights(self.engine, BroadcastSender(self.group, CPU, 100_000), weights).close()
        ray.get(self.engine.finish_weight_sync.remote(version))


@pytest.fixture(scope="module", params=["keep", pytest.param("recompute", marks=pytest.mark.slow)])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    config = random_moe(2 * TOKENS)
    folders = []
    for version in VERSIONS:
        torch.manual_seed(version)
        folders.append(tmp_path_factory.mktemp(f"weights{version}"))
        Qwen3MoeForCausalLM(config).save_pretrained(folders[-1])
    rollout = RolloutConfig(
        max_response_tokens=TOKENS,
        dtype="float32",
        update_in_flight=True,
        kv_cache_on_update=request.param,
        engine_args={"skip_tokenizer_init": True, "block_size": 32},
    )
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    capture = RouteCapture(SHAPE, store_here(), (1, 1))
    engine, ready = start_engine(EngineSpec(str(folders[0]), rollout, PROMPT, 0, "cpu", capture))
    ray.get(ready)
    meeting = Rendezvous.local(2)
    joining = engine.join_senders.remote(links(meeting))
    group = BroadcastGroup(meeting, 0, CPU, 60.0, 60.0)
    ray.get(joining)
    ray.get(engine.generate.remote([new_request(0, 9)], SHORT))  # the first call takes seconds
    yield Served(engine, folders, group, request.param == "recompute")
    ray.shutdown()


def new_request(number: int, length: int, name: str = "a") -> Request:
    draw = np.random.default_rng(length)
    return Request(tuple(draw.integers(2, VOCABULARY, length).tolist()), number, name, number)


def reference(
    served: Served, rollout: Rollout, shift: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the response, and the experts of every row  # [tokens - 1, L, K]

    Args:
        shift: how many tokens later the weights change than the rollout says
    """
    models = [Qwen3MoeForCausalLM.from_pretrained(f, dtype=torch.float32) for f in served.folders]
    tokens = torch.tensor([*rollout.prompt_tokens, *rollout.response_tokens])
    spans = rollout.weight_spans or ((0, rollout.weight_version),)
    # The weights that sample a token are those that read the one before it.
    reads = [0, *(len(rollout.prompt_tokens) + begin - 1 + shift for begin, _ in spans[1:])]
    cache, logits, experts = DynamicCache(), [], []
    for (begin, end), (_, version) in zip(pairwise([*reads, len(tokens) - 1]), spans, strict=True):
        if served.recomputes:
            cache = DynamicCache()
        first = 0 if served.recomputes else begin
        with torch.no_grad():
            out = models[version].eval()(
                tokens[None, first:end],
                past_key_values=cache,
                use_cache=True,
                output_router_logits=True,
            )
        logits.append(out.logits[0, begin - first :])
        chosen = [
            layer[begin - first :].topk(2).indices.sort().values for layer in out.router_logits
        ]
        experts.append(torch.stack(chosen, 1))
    of_next = torch.cat(logits).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return of_next[len(rollout.prompt_tokens) - 1 :], torch.cat(experts)


def test_every_token_and_route_is_of_the_weights_that_it_says(served: Served) -> None:
    requests = [new_request(n, length) for n, length in enumerate([3, 40, PROMPT, PROMPT])]
    running = served.engine.generate.remote(requests, SAMPLING)
    for version in VERSIONS[1:]:
        time.sleep(0.5)
        served.update(version)
    rollouts = ray.get(running)
    later = ray.get(served.engine.generate.remote([new_request(9, PROMPT)], SAMPLING))
    in_midst = [rollout for rollout in rollouts if len(rollout.weight_spans) == 3]
    assert len(in_midst) == len(rollouts), [rollout.weight_spans for rollout in rollouts]
    for rollout in rollouts:
        assert [version for _, version in rollout.weight_spans] == list(VERSIONS)
        assert rollout.weight_version == rollout.routes[0].weight_version == VERSIONS[-1]
        assert rollout.routes[0].rows == len(rollout.prompt_tokens) + TOKENS - 1
    # One that begins after the updates finds no prefix of before, though its prompt was cached.
    assert later[0].weight_spans == () and later[0].weight_version == VERSIONS[-1]
    for rollout in (*rollouts, *later):
        logprobs, experts = reference(served, rollout)
        differences = (logprobs - torch.tensor(rollout.logprobs)).abs()
        assert float(differences.max()) < 1e-3, (rollout.weight_spans, float(differences.max()))
        same = (experts == routes_of(rollout)).all(-1)
        assert float(same.float().mean()) > 0.999
    # The comparison sees a boundary that is one token off.
    for shift in (-1, 1):
        wrong, _ = reference(served, rollouts[0], shift)
        assert float((wrong - torch.tensor(rollouts[0].logprobs)).abs().max()) > 0.1


def test_an_aborted_request_leaves_nothing(served: Served) -> None:
    running = served.engine.generate.remote([new_request(0, 5, "b")], SAMPLING, "call")
    time.sleep(0.2)
    served.update(VERSIONS[-1])
    ray.get(served.engine.abort.remote(["call"]))
    assert ray.get(running) is None
    [rollout] = ray.get(served.engine.generate.remote([new_request(1, 5)], SHORT))
    assert rollout.weight_spans == () and len(rollout.response_tokens) == 3
