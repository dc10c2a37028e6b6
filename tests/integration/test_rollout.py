"""Rollout engines on the real stack: Ray, vLLM on CPU, a tiny Qwen3-MoE, its first layer dense."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rltrain.actors.failures import ActorFailed
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.parallel.rendezvous import Rendezvous
from rltrain.policy.passes.fetch_routes import fetch_routes
from rltrain.rollout.dispatch import Dispatcher
from rltrain.rollout.dispatch_board import RequestBatch
from rltrain.rollout.engine import RolloutEngine, start_engine
from rltrain.rollout.generator import Generator, build_batch
from rltrain.rollout.launch import EngineSpec, RouteCapture
from rltrain.rollout.requests import Request, Rollout, SamplingParams
from rltrain.rollout.route_store import store_here
from rltrain.rollout.stop_strings import response_texts
from rltrain.routing.integrity import RouteShape
from rltrain.weights.sync.broadcast import BroadcastGroup, BroadcastSender
from rltrain.weights.sync.stream import BucketStream
from tests.integration.sync_links import links, send_weights

pytestmark = [pytest.mark.integration, pytest.mark.skipif(torch.cuda.is_available(), reason="CPU")]

EOS = 1
SLOW = 2000
SHAPE = RouteShape(num_layers=3, moe_layers=(1, 2), num_experts=8, experts_per_token=2)
BOTH_LAYERS = (1, 2)
CONFIG = Config.model_validate(
    {
        "algorithm": {"group_size": 4},
        "data": {"max_prompt_tokens": 40},
        "rollout": {
            "max_response_tokens": 24,
            "deterministic": True,
            # Blocks that are shorter than prompts, so that these are cached.
            "engine_args": {"skip_tokenizer_init": True, "block_size": 32},
        },
    }
)

FREE = CONFIG.model_copy(
    update={"rollout": CONFIG.rollout.model_copy(update={"deterministic": False})}
)


@dataclass(frozen=True)
class Prompt:
    prompt_tokens: tuple[int, ...]
    id: str


def prompts(count: int, seed: int = 0) -> list[Prompt]:
    draw = random.Random(seed)
    lengths = [draw.randrange(1, 40) for _ in range(count)]
    return [
        Prompt(tuple(draw.randrange(2, 48) for _ in range(n)), f"{seed}-{i}")
        for i, n in enumerate(lengths)
    ]


@dataclass
class Watched:
    """What a request's outputs are awaited from, with a look at each."""

    collector: Any
    look: Callable[[Any], None]

    async def get(self) -> Any:
        output = await self.collector.get()
        self.look(output)
        return output


class StaggeredEngine(RolloutEngine):
    """Requests reach vLLM at uneven intervals, as they would on a busy machine."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._pending: list[Any] = []
        self._finished_early = self._cached_tokens = 0

    async def _add(self, name: str, request: Request, params: Any) -> Any:
        self._pending.append(await super()._add(name, request, params))
        await asyncio.sleep(random.choice([0, 0, 0.02]))
        self._finished_early += any(output.output is not None for output in self._pending)
        return Watched(self._pending[-1], self._look)

    def _look(self, output: Any) -> None:
        self._cached_tokens += output.num_cached_tokens

    def num_cached_tokens(self) -> int:
        """Prompt tokens read from the prefix cache since the last call."""
        found, self._cached_tokens = self._cached_tokens, 0
        return found

    def num_finished_early(self) -> int:
        """How many requests arrived when an output was there but not yet taken."""
        return self._finished_early


class UnequalEngine(RolloutEngine):
    """Responses to prompts with the id ``slow`` end after SLOW tokens, others after 3."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._finished_slow = 0

    async def _add(self, name: str, request: Request, params: Any) -> Any:
        params.max_tokens = SLOW if request.prompt_id == "slow" else 3
        params.ignore_eos, params.stop_token_ids = True, []
        if request.prompt_id == "slow":  # an abort overtakes some of them
            await asyncio.sleep(0.02)
        return Watched(await super()._add(name, request, params), self._look)

    def _look(self, output: Any) -> None:
        (completion,) = output.outputs
        whole = completion.finish_reason == "length" and len(completion.token_ids) > 3
        self._finished_slow += whole

    def finished_slow(self) -> int:
        """How many responses were not cut short."""
        return self._finished_slow

    async def in_vllm(self) -> int:
        """How many requests its process has, in a moment when it has had time for all messages."""
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        await self._engine.resume_generation()
        return len(self._engine.output_processor.request_states)


class Clerk:
    """Answers calls after a while, so many at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._has = self._most = self._served = 0
        self._aborted: set[str] = set()

    def capabilities(self) -> dict[str, int]:
        return {"max_num_seqs": 2}

    async def generate(
        self, requests: list[Request], sampling: Any, call: str
    ) -> list[Request] | None:
        self._has += len(requests)
        self._most = max(self._most, self._has)
        for _ in range(int(self._seconds / 0.01)):
            await asyncio.sleep(0.01)
            if call in self._aborted:
                return None
        self._has -= len(requests)
        self._served += len(requests)
        return requests

    async def abort(self, calls: list[str]) -> None:
        self._aborted.update(calls)

    async def counts(self) -> tuple[int, int, int]:
        """The most it had at once, how many it answered, how many it was told to abort."""
        return self._most, self._served, len(self._aborted)


@dataclass(frozen=True)
class Cluster:
    model: Path
    store: Any
    plain: Any
    staggered: Any
    unequal: Any


def letters() -> Any:
    """A tokenizer of single letters, pairs, and halves of a character of two bytes."""
    pieces = ["<pad>", "<eos>", *"abcdefghijklmnopqrst", *"<>/", "\u0120", "\u010a"]
    pieces += ["ab", "cd", "ef", "gh", "ij", "</", "/>", "\u00c3", "\u00a9"]
    pieces += [first + second for first in "kl" for second in "mnopqr"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    assert len(vocab) == 48
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=48,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=SHAPE.num_layers,
        mlp_only_layers=[0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=SHAPE.num_experts,
        num_experts_per_tok=SHAPE.experts_per_token,
        moe_intermediate_size=64,
        max_position_embeddings=2 * SLOW,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    letters().save_pretrained(folder)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    store = store_here()
    spec = EngineSpec(str(folder), CONFIG.rollout, 40, 0, "cpu", RouteCapture(SHAPE, store, (1, 1)))
    plain, ready = start_engine(spec)
    staggered = ray.remote(StaggeredEngine).options(num_cpus=0).remote(spec)
    longer = FREE.rollout.model_copy(update={"max_response_tokens": SLOW})
    unequal = ray.remote(UnequalEngine).options(num_cpus=0).remote(replace(spec, rollout=longer))
    started = ray.get([ready, staggered.start.remote(), unequal.start.remote()])
    assert started[0]["routes"]
    yield Cluster(folder, store, plain, staggered, unequal)
    ray.shutdown()


def generate(
    generator: Generator, problems: list[Prompt], step: int, round: int = 0
) -> tuple[Batch, list[Rollout], list[str]]:
    """All groups, as a batch, as rollouts and as names, in the order of the problems."""
    found = [group for group in generator.stream(problems, step, round) if group is not None]
    groups = sorted(found, key=lambda group: group.index)
    assert [group.index for group in groups] == list(range(len(problems)))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return build_batch(rollouts, 4), rollouts, [name for group in groups for name in group.names]


def routes_of(rollouts: list[Rollout]) -> list[np.ndarray[Any, Any]]:
    refs = [r.routes for r in rollouts if r.routes]
    ends = np.cumsum([ref.rows + 1 for (ref,) in refs])
    return [rows[:-1] for rows in np.split(fetch_routes(refs, BOTH_LAYERS), ends[:-1])]


def test_a_step_becomes_a_batch_with_full_coverage(cluster: Cluster) -> None:
    problems = prompts(7)
    generator = Generator([cluster.plain, cluster.staggered], CONFIG)
    batch, rollouts, names = generate(generator, problems, step=0)
    assert batch.num_sequences == len(rollouts) == len(set(names)) == 28
    assert names[5] == f"prompt {problems[1].id[:12]} sample 1"
    cut = [rollout.finish_reason == "length" for rollout in rollouts]
    assert batch.truncated is not None and batch.truncated.tolist() == cut
    _, again, others = generate(generator, problems[:1], step=0, round=1)
    assert not set(others) & set(names)
    assert [r.response_tokens for r in again] != [r.response_tokens for r in rollouts[:4]]
    for i, rollout in enumerate(rollouts):
        assert rollout.prompt_tokens == problems[i // 4].prompt_tokens
        assert (rollout.response_tokens[-1] == EOS) == (rollout.finish_reason == "stop")
        assert EOS not in rollout.response_tokens[:-1]
        assert 1 <= len(rollout.response_tokens) <= 24
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    assert len({r.response_tokens for r in rollouts[:4]}) > 1
    assert batch.route_mask is not None
    assert int(batch.route_mask.sum()) == int((batch.seq_lens - 1).sum())
    for length, routes in zip(batch.seq_lens.tolist(), routes_of(rollouts), strict=True):
        assert routes.shape == (length - 1, 2, 2) and routes.dtype == np.uint8
    one_layer = fetch_routes(list(batch.rollout_expert_indices or ()), (2,))
    first = int(batch.offsets[5])
    fifth = routes_of(rollouts)[5]
    assert np.array_equal(one_layer[first : first + len(fifth)], fifth[:, 1:])


def test_logprobs_and_routes_are_those_of_the_model(cluster: Cluster) -> None:
    """Row t is about token t: shifted by one, or layers swapped, agreement falls to chance."""
    _, rollouts, _ = generate(Generator([cluster.plain], CONFIG), prompts(6), step=1)
    hits, differences = against(cluster.model, rollouts)
    assert hits > 0.95
    assert differences < 0.03


def against(folder: Path, rollouts: list[Rollout]) -> tuple[float, float]:
    """The share of rows whose experts are those of the model in ``folder`` as transformers computes
    it, and how far log-probabilities are from its, on average."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    hits, differences = [], []
    for rollout, routes in zip(rollouts, routes_of(rollouts), strict=True):
        tokens = torch.tensor([*rollout.prompt_tokens, *rollout.response_tokens])
        with torch.no_grad():
            out = model(tokens[None], output_router_logits=True)
        for layer, logits in enumerate(out.router_logits):
            native = logits.topk(2).indices[:-1].sort().values
            captured = torch.from_numpy(routes[:, layer].astype(np.int64)).sort().values
            hits.append((native == captured).all(-1))
        logprobs = out.logits[0].float().log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        assert rollout.logprobs is not None
        differences.append(logprobs[-len(rollout.logprobs) :] - torch.tensor(rollout.logprobs))
    return float(torch.cat(hits).float().mean()), float(torch.cat(differences).abs().mean())


def test_two_engines_give_the_same_bits_whatever_came_before_and_when_requests_arrive(
    cluster: Cluster,
) -> None:
    generate(Generator([cluster.staggered], CONFIG), prompts(20), step=9)  # another history
    # Samples of a step share their prompt's blocks; what earlier steps cached of it is gone.
    shared = ray.get(cluster.staggered.num_cached_tokens.remote())
    seen = set()
    for step in range(3):
        results = []
        for engine in (cluster.plain, cluster.staggered):
            _, rollouts, _ = generate(Generator([engine], CONFIG), prompts(20), step)
            results.append(
                (
                    [r.response_tokens for r in rollouts],
                    [r.logprobs for r in rollouts],
                    [routes.tobytes() for routes in routes_of(rollouts)],
                )
            )
        assert results[0] == results[1]
        assert ray.get(cluster.staggered.num_cached_tokens.remote()) == shared
        seen.add(str(results[0][0]))
    assert len(seen) == 3  # every step has its own seeds
    # The reason it holds: vLLM runs nothing before it has the whole batch.
    one_token = SamplingParams(temperature=1.0, max_tokens=1)
    requests = [Request((2 + i,), i, "p", i) for i in range(46)]
    ray.get(cluster.staggered.generate.remote(requests, one_token))
    assert ray.get(cluster.staggered.num_finished_early.remote()) == 0


def test_over_sampling_keeps_what_finishes_first_and_aborts_the_rest(cluster: Cluster) -> None:
    generator = Generator([cluster.unequal], FREE)
    problems = [replace(p, id="slow") if i in (0, 3) else p for i, p in enumerate(prompts(6))]
    for round in range(2):
        groups = [g for g in generator.stream(problems, 0, round, keep=4) if g is not None]
        assert sorted(group.index for group in groups) == [1, 2, 4, 5]
        for group in groups:
            assert [len(rollout.response_tokens) for rollout in group.rollouts] == [3] * 4
            assert [r.prompt_tokens for r in group.rollouts] == [
                problems[group.index].prompt_tokens
            ] * 4
            assert all(problems[group.index].id[:12] in name for name in group.names)
        # Nothing of the slow ones goes on: not in the engine, nor when weights are to be replaced.
        assert ray.get(cluster.unequal.in_vllm.remote()) == 0
    found = routes_of([rollout for group in groups for rollout in group.rollouts])
    assert [len(routes) for routes in found] == [
        len(rollout.prompt_tokens) + 2 for group in groups for rollout in group.rollouts
    ]
    # A call whose requests are still on their way to vLLM is given up, too, and nothing later.
    slow = [Request((2, 3), i, "slow", i) for i in range(200)]
    sampling = SamplingParams(temperature=1.0, max_tokens=3, capture_routes=True)
    for first, second in (("generate", "abort"), ("abort", "generate")):
        given = {"generate": (slow, sampling, first), "abort": ([first],)}
        calls = [getattr(cluster.unequal, m).remote(*given[m]) for m in (first, second)]
        assert ray.get(calls) == [None, None]
    call = cluster.unequal.generate.remote(slow[:30], sampling, "on the way")
    while not ray.get(cluster.unequal.in_vllm.remote()):
        time.sleep(0.01)
    ray.get(cluster.unequal.abort.remote(["on the way"]))
    assert ray.get(call) is None
    assert ray.get(cluster.unequal.finished_slow.remote()) == 0
    later = [Request((2, 3), i, "quick", i) for i in range(2)]
    assert len(ray.get(cluster.unequal.generate.remote(later, sampling))) == 2


def test_weights_are_not_replaced_under_a_request(cluster: Cluster) -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=SLOW)
    requests = [Request((2, 3), 0, "slow", 0)]
    call = cluster.unequal.generate.remote(requests, sampling, "a call")
    while not ray.get(cluster.unequal.in_vllm.remote()):
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="1 requests would see two versions"):
        ray.get(cluster.unequal.start_weight_sync.remote())
    ray.get(cluster.unequal.abort.remote(["a call"]))
    assert ray.get(call) is None


def test_calls_go_to_the_engine_that_has_room(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rltrain.rollout.dispatch.ABORT_S", 1.0)
    actor = ray.remote(Clerk).options(num_cpus=0)
    clerks, alone = [[actor.remote(0.02), actor.remote(s)] for s in (0.2, 600.0)]
    ray.get([clerk.capabilities.remote() for clerk in (*clerks, *alone)])
    sampling = SamplingParams(temperature=1.0, max_tokens=1)
    calls = [RequestBatch([i], [Request((i,), i, "p", i)]) for i in range(40)]
    dispatcher, loads = Dispatcher(clerks, 99.0), list[tuple[int, int]]()
    dispatcher.on_load = lambda engine, requests: loads.append((engine, requests))
    found = [done for done in dispatcher.run(calls, sampling, 0) if done is not None]
    of_each = [[requests for engine, requests in loads if engine == n] for n in (0, 1)]
    assert [(max(of_one), of_one[-1]) for of_one in of_each] == [(4, 0), (4, 0)]
    assert sorted(call.groups[0] for call, _ in found) == list(range(40))
    assert all(rollouts == call.requests for call, rollouts in found)
    (most, quick, _), (most_slow, slow, _) = ray.get([c.counts.remote() for c in clerks])
    assert most == most_slow == 4  # twice what they run at once
    assert quick + slow == 40 and quick > 2 * slow
    # One engine alone has them all at once; one that says nothing is named.
    assert len([d for d in Dispatcher(alone[:1], 99.0).run(calls, sampling, 0) if d]) == 40
    assert ray.get(alone[0].counts.remote())[0] > 4
    with pytest.raises(
        RuntimeError,
        match=r"engine 1, step 7, 4 requests there, 0 queued: .* within 5 s, and 1 did not",
    ):
        dispatcher = Dispatcher(alone, 5.0)
        dispatcher.on_load = lambda engine, requests: loads.append((engine, requests))
        list(dispatcher.run(calls, sampling, 7))
    assert dict(loads) == {0: 0, 1: 0}  # what was not answered was aborted
    assert ray.get(alone[1].counts.remote()) == (4, 0, 4)


def test_a_stop_string_cuts_a_response_and_changes_nothing_before(cluster: Cluster) -> None:
    """The same tokens, bit for bit the same log-probabilities and routes, and none beyond. One
    request at a time: what shares a forward pass decides how sums are rounded."""
    tokenizer = letters()
    sampling = SamplingParams(temperature=1.0, max_tokens=24, capture_routes=True)
    ends = {"stop": 0, "length": 0, None: 0}
    for i, prompt in enumerate(prompts(6, seed=5)):
        requests = [Request(prompt.prompt_tokens, 7 + i, prompt.id, 0)]
        (whole,) = ray.get(cluster.plain.generate.remote(requests, sampling))
        texts = [tokenizer.decode(whole.response_tokens[:n]) for n in range(25)]
        middle = len(texts[len(whole.response_tokens) // 2])
        stops = (texts[-1][max(0, middle - 1) : middle + 1].replace("\ufffd", "") or "a", "<>/<>")
        stopping = replace(sampling, stop=stops)
        (cut,) = ray.get(cluster.plain.generate.remote(requests, stopping))
        count = next((n for n in range(25) if any(stop in texts[n] for stop in stops)), None)
        expected = len(whole.response_tokens) if count is None else count
        assert cut.response_tokens == whole.response_tokens[:expected]
        assert cut.logprobs == whole.logprobs[:expected]
        by_string = count is not None and cut.response_tokens[-1] != EOS
        assert cut.stop_string == (stops[0] if by_string else None)
        assert cut.finish_reason == ("stop" if by_string else whole.finish_reason)
        assert response_texts(tokenizer, cut)[0] == (
            texts[count].partition(stops[0])[0]
            if by_string
            else response_texts(tokenizer, whole)[0]
        )
        ends[cut.finish_reason if not by_string else None] += 1
        before, after = routes_of([whole, cut])
        assert len(after) == len(prompt.prompt_tokens) + expected - 1
        assert np.array_equal(after, before[: len(after)])
    assert ends[None] >= 3


def test_stop_strings_and_tokens_in_training_and_evaluation(cluster: Cluster) -> None:
    rollout = FREE.rollout.model_copy(update={"stop": ["a", "k", "\n"]})
    config = FREE.model_copy(update={"rollout": rollout})
    generator = Generator([cluster.plain], config)
    batch, rollouts, _ = generate(generator, prompts(12), step=3)
    tokenizer = letters()
    for found in (*rollouts, *generator.greedy(prompts(12))):
        raw = tokenizer.decode(found.response_tokens)
        assert all(
            stop not in tokenizer.decode(found.response_tokens[:-1]) for stop in rollout.stop
        )
        assert (found.stop_string is not None) == any(stop in raw for stop in rollout.stop)
        assert found.finish_reason == "length" or found.stop_string or raw.endswith("<eos>")
    assert {"a", "k", "\n"} <= {found.stop_string for found in rollouts}
    # Coverage is whole: every token but a response's last has a route.
    assert batch.route_mask is not None
    assert int(batch.route_mask.sum()) == int((batch.seq_lens - 1).sum())
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [found.finish_reason == "length" for found in rollouts]


def test_greedy_responses_carry_neither_logprobs_nor_routes(cluster: Cluster) -> None:
    generator = Generator([cluster.plain], CONFIG)
    first, second = generator.greedy(prompts(3)), generator.greedy(prompts(3))
    assert first == second and len(first) == 3
    many = prompts(40)  # in several calls
    answered = Generator([cluster.unequal, cluster.plain], FREE).greedy(many)
    assert [r.prompt_tokens for r in answered] == [prompt.prompt_tokens for prompt in many]
    assert all(r.logprobs is None and r.routes == () for r in first)


def test_a_refused_request_leaves_the_engine_usable(cluster: Cluster) -> None:
    generator = Generator([cluster.plain], CONFIG)
    too_long = Prompt(tuple([2] * 70), "long")
    with pytest.raises(ActorFailed, match="ValueError: prompt long sample 0: expected a prompt of"):
        generator.greedy([*prompts(2), too_long])
    with pytest.raises(ActorFailed, match="ValueError: prompt other sample 0: token 1 has id"):
        generator.greedy([*prompts(2), Prompt((2, 48), "other")])
    assert len(generator.greedy(prompts(2))) == 2


def test_new_weights_are_in_use_from_the_next_request_on(cluster: Cluster, tmp_path: Path) -> None:
    """It leaves an engine half-loaded. The prompt is longer than a block of the KV cache, so the
    engine has its first tokens cached."""
    config = Qwen3MoeConfig.from_pretrained(cluster.model)
    torch.manual_seed(1)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    draw, engine = random.Random(0), cluster.unequal
    prompt = tuple(draw.randrange(2, 48) for _ in range(70))
    requests = [Request(prompt, i, "quick", i) for i in range(8)]
    sampling = SamplingParams(temperature=1.0, max_tokens=3, capture_routes=True)
    before = ray.get(engine.generate.remote(requests, sampling))
    ray.get(engine.start_weight_sync.remote())
    with pytest.raises(RuntimeError, match="between start and finish of a weight sync"):
        ray.get(engine.generate.remote(requests, sampling))
    meeting, cpu = Rendezvous.local(2), torch.device("cpu")
    joining = engine.join_senders.remote(links(meeting))
    sender = BroadcastSender(BroadcastGroup(meeting, 0, cpu, 60.0, 60.0), cpu, 100_000)
    ray.get(joining)
    send_weights(engine, sender, weights)
    ray.get(engine.finish_weight_sync.remote(1))
    after = ray.get(engine.generate.remote(requests, sampling))
    for rollouts, version, folder in (before, 0, cluster.model), (after, 1, tmp_path):
        assert {rollout.weight_version for rollout in rollouts} == {version}
        assert {rollout.routes[0].weight_version for rollout in rollouts} == {version}
        hits, difference = against(folder, rollouts)
        assert hits > 0.9 and difference < 0.1, (version, hits, difference)
    ray.get(engine.start_weight_sync.remote())
    stream = BucketStream(iter(weights.items()), sender, 100_000)
    bucket = stream.next_bucket()
    sender.send()
    ray.get(engine.load_weight_bucket.remote(bucket))
    with pytest.raises(Exception, match="after 1 buckets, none of them the last"):
        ray.get(engine.finish_weight_sync.remote(2))
    stream.close()
    assert ray.get(engine.weight_version.remote()) == 1
    with pytest.raises(RuntimeError, match="between start and finish of a weight sync"):
        ray.get(engine.generate.remote(requests, sampling))


def test_a_dead_engine_is_named_and_its_routes_live_on(cluster: Cluster) -> None:
    """Last, since it takes an engine away."""
    generator = Generator([cluster.plain, cluster.staggered], CONFIG)
    _, rollouts, _ = generate(Generator([cluster.staggered], CONFIG), prompts(3), step=0)
    before = [array.tobytes() for array in routes_of(rollouts)]
    actor = psutil.Process(ray.get(cluster.staggered.capabilities.remote())["pid"])
    for child in actor.children(recursive=True):
        child.kill()
    with pytest.raises(RuntimeError, match=r"engine process died\. It was killed"):
        generate(generator, prompts(2), step=0)
    ray.kill(cluster.staggered)
    with pytest.raises(RuntimeError, match=r"generate, engine 1, step 4: .* died\. It was killed"):
        generate(generator, prompts(2), step=4)
    assert [array.tobytes() for array in routes_of(rollouts)] == before
