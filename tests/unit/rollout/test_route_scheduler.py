"""vLLM's real schedulers with routes sent once, and a model runner that only keeps books.

On GPUs a step is scheduled while the last one runs. Here vLLM's ``AsyncScheduler`` does the same,
one step ahead, on any machine: requests are preempted, stopped and aborted while a step of theirs
is in flight. The runner's KV cache holds the number of the pass that wrote each slot, and so do the
routes, so a row tells which pass it is from. What a row has to be is read from that cache when its
token is sampled, and not from what the scheduler keeps.
"""

import json
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput, RoutedExpertsLists
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rltrain.rollout.route_scheduler import route_scheduler

BLOCK, BLOCKS, PIECE, SEQS = 4, 12, 8, 6
WORD, STOP = 5, 1
Row = tuple[int, ...]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    sizes = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 48,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 256,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    args = EngineArgs(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=96,
        max_num_batched_tokens=PIECE,
        max_num_seqs=SEQS,
        enable_return_routed_experts=True,
    )
    found = args.create_engine_config()
    found.cache_config.num_gpu_blocks = BLOCKS
    found.cache_config.block_size = BLOCK
    init_none_hash(sha256)
    return found


@dataclass
class Books:
    """A model runner's KV cache, and what each response's rows have to be."""

    scheduler: Any
    stops: dict[str, int]  # how many tokens a response has, the stop token included
    kv: dict[int, int] = field(default_factory=dict)  # slot -> number of the pass, token by token
    passes: int = 0
    rows: dict[str, list[int]] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)  # sampled, perhaps not yet delivered

    def run(self, step: Any) -> tuple[ModelRunnerOutput, dict[str, list[int]]]:
        """A step, and of each request that samples the passes that its new token is made of."""
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        slots, made, sampled, read = [], [], [], {}
        for name, count in step.num_scheduled_tokens.items():
            [blocks] = self.scheduler.kv_cache_manager.get_blocks(name).get_block_ids()
            place = [b * BLOCK + i for b in blocks for i in range(BLOCK)]
            end = starts[name] + count
            for slot in place[starts[name] : end]:
                self.passes += 1
                self.kv[slot] = self.passes
                slots.append(slot)
                made.append(self.passes)
            if self.scheduler.requests[name].is_prefill_chunk:
                sampled.append([])
            else:
                read[name] = [self.kv[slot] for slot in place[:end]]
                prompt = self.scheduler.requests[name].num_prompt_tokens
                sampled.append([STOP if end - prompt + 1 == self.stops[name] else WORD])
        names = list(step.num_scheduled_tokens)
        routes = np.array(made, dtype="<u4").view(np.uint8).reshape(-1, 2, 2)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            routed_experts=RoutedExpertsLists(routes, np.array(slots, dtype=np.int64)),
        )
        return output, read

    def deliver(self, name: str, read: list[int]) -> None:
        """A token is the response's next: its row is that of the pass that it was sampled with."""
        mine = self.rows.setdefault(name, [])
        mine += read[len(mine) :] if not mine else read[-1:]


def play(config: Any, seed: int, *, ahead: bool, caching: bool) -> Counter[str]:
    """Some requests to their ends, checked; returns what happened to them on the way."""
    config.scheduler_config.async_scheduling = ahead
    config.cache_config.enable_prefix_caching = caching
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    scheduler = route_scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )
    draw, events = random.Random(seed), Counter[str]()
    watch(scheduler, events)
    hasher = get_request_block_hasher(BLOCK, sha256)
    books = Books(scheduler, {})
    waiting = deque(str(i) for i in range(draw.randrange(4, 10)))
    doomed = {name for name in waiting if draw.random() < 0.15}
    finished: dict[str, np.ndarray[Any, Any]] = {}
    in_flight: deque[tuple[Any, ModelRunnerOutput, dict[str, list[int]]]] = deque()
    while waiting or scheduler.has_requests() or in_flight:
        while waiting and draw.random() < 0.5:
            name, limit = waiting.popleft(), draw.randrange(1, 25)
            books.stops[name] = draw.randrange(1, 30)
            length = draw.randrange(1, 21)
            params = SamplingParams(max_tokens=limit, stop_token_ids=[STOP], ignore_eos=True)
            prompt = [2 + i % 40 for i in range(length)]
            scheduler.add_request(Request(name, prompt, params, None, block_hasher=hasher))
        for name in sorted(doomed & scheduler.requests.keys()):
            if draw.random() < 0.1:
                events["aborted in flight"] += scheduler.requests[name].num_in_flight_tokens > 0
                scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        if draw.random() < 0.02:  # all are preempted, and what is in flight is dropped
            events["reset in flight"] += bool(in_flight and scheduler.running)
            scheduler.reset_prefix_cache(reset_running_requests=True)
        step = scheduler.schedule()
        events["from the cache"] += any(new.num_computed_tokens for new in step.scheduled_new_reqs)
        in_flight.append((step, *books.run(step)))
        while len(in_flight) > ahead or (in_flight and not step.total_num_scheduled_tokens):
            take(scheduler, books, events, in_flight.popleft(), finished)
    for name, routes in finished.items():
        found = np.ascontiguousarray(routes).reshape(len(routes), 4).view("<u4")[:, 0].tolist()
        assert found == books.rows[name], f"seed {seed}, request {name}"
    assert finished.keys() | doomed >= books.stops.keys()
    left = scheduler.ended_routes, scheduler.kept_routes, scheduler.lost_slots
    assert not any(left)
    return events


def take(
    scheduler: Any,
    books: Books,
    events: Counter[str],
    arrived: tuple[Any, ModelRunnerOutput, dict[str, list[int]]],
    finished: dict[str, np.ndarray[Any, Any]],
) -> None:
    """Hand a step's output to the scheduler, and look at what it tells its client."""
    step, output, read = arrived
    for to_client in scheduler.update_from_output(step, output).values():
        for told in to_client.outputs:
            books.deliver(told.request_id, read[told.request_id])
            assert (told.routed_experts is not None) == (told.finish_reason is not None)
            if told.finish_reason is not None:
                finished[told.request_id] = told.routed_experts


def watch(scheduler: Any, events: Counter[str]) -> None:
    """Count what a test has to have seen."""
    preempt, free = scheduler._preempt_request, scheduler._free_request

    def preempting(request: Any, *args: Any, **kwargs: Any) -> Any:
        when = "in flight" if request.num_in_flight_tokens else "at rest"
        events[f"preempted {when}"] += 1
        events["preempted before a token"] += request.num_output_tokens == 0
        events["preempted again"] += request.num_preemptions > 0
        return preempt(request, *args, **kwargs)

    def freeing(request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.status == RequestStatus.FINISHED_STOPPED:
            events["stopped in flight"] += request.num_in_flight_tokens > 0
        events["in pieces"] += request.num_prompt_tokens > PIECE
        return free(request, *args, **kwargs)

    scheduler._preempt_request, scheduler._free_request = preempting, freeing


@pytest.mark.parametrize("caching", [False, True], ids=["without cache", "prefix cache"])
@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "a step ahead"])
def test_rows_are_those_of_the_passes_that_the_tokens_were_sampled_with(
    config: Any, ahead: bool, caching: bool
) -> None:
    events = Counter[str]()
    for seed in range(200):
        events += play(config, seed, ahead=ahead, caching=caching)
    seen = {"preempted before a token", "preempted again", "in pieces"}
    if ahead:
        seen |= {f"{what} in flight" for what in ("preempted", "stopped", "aborted", "reset")}
    seen |= {"from the cache"} if caching else set()
    assert all(events[what] >= 10 for what in seen), events
