"""``rltrain routes capture``: the routes of a rollout engine through some tokens."""

import sys
import tempfile

import torch

from rltrain.actors.failures import AwaitedCall, get_all
from rltrain.config import Config
from rltrain.controller.cluster.ray_cluster import cluster
from rltrain.controller.cluster.route_stores import start_route_stores
from rltrain.policy.passes.fetch_routes import fetch_routes
from rltrain.rollout.engine import start_engine
from rltrain.rollout.launch import EngineSpec, RouteCapture
from rltrain.rollout.requests import Request, SamplingParams
from rltrain.routing.integrity import RouteShape
from rltrain.verification.routes_arguments import TokenSource
from rltrain.verification.routes_file import Routes
from rltrain.verification.routes_passes import read_tokens, resolve_model

# The engine reads every token of the prompt, the last one too, only to sample one more.
ONE = SamplingParams(temperature=1.0, max_tokens=1, greedy=True, capture_routes=True)


def capture(model: str, source: TokenSource, dtype: str, out: str) -> int:
    """Start an engine, let it read the tokens as prompts, save what it chose."""
    arch, folder = resolve_model(model)
    if folder is None:
        raise ValueError(f"{model}: vLLM reads a Hugging Face folder; give one [RL7004]")
    tokens = read_tokens(model, source, arch, folder)
    shape = RouteShape(arch.num_layers, arch.moe_layers, arch.num_experts, arch.experts_per_token)
    with tempfile.TemporaryDirectory(prefix="rltrain-routes-") as logs:
        config = _config(logs, dtype)
        with cluster(config) as placed:
            route_capture = RouteCapture(shape, start_route_stores(placed))
            longest = max(map(len, tokens))
            spec = EngineSpec(str(folder), config.rollout, longest, 0, placed.device, route_capture)
            engine, ready = start_engine(spec, **placed.engine_options(0))
            start = AwaitedCall("rollout", "start", "cluster.start_timeout_s")
            get_all([ready], start, config.cluster.start_timeout_s)
            requests = [Request(sequence, 0, f"{n}", 0) for n, sequence in enumerate(tokens)]
            sent = engine.generate.remote(requests, ONE)
            call = AwaitedCall("rollout", "generate")
            (rollouts,) = get_all([sent], call, config.cluster.call_timeout_s)
            samples = [rollout.routes for rollout in rollouts]
            fetched = torch.from_numpy(fetch_routes(samples, arch.moe_layers))
    # The last row of each sequence is the sampled token's. The engine has not read it: left out.
    parts = [part[:-1] for part in fetched.split([len(sequence) + 1 for sequence in tokens])]
    Routes(
        ids=torch.cat(parts),
        route_mask=torch.ones(sum(map(len, tokens)), dtype=torch.bool),
        seq_lens=torch.tensor([len(sequence) for sequence in tokens]),
        tokens=torch.tensor([token for sequence in tokens for token in sequence]),
        layers=arch.moe_layers,
        num_experts=arch.num_experts,
        weight_version=samples[0][0].weight_version,
        producer=samples[0][0].producer,
    ).save(out)
    sys.stdout.write(f"{out}\n")
    return 0


def _config(logs: str, dtype: str) -> Config:
    return Config.model_validate(
        {
            "trainer": {"output_dir": logs},
            "rollout": {
                "max_response_tokens": 1,
                "deterministic": True,
                "dtype": dtype,
                "engine_args": {"skip_tokenizer_init": True},
            },
        }
    )
