"""From rollouts to the batch, and from prompts to requests."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.batch import RouteRef
from rltrain.config import Config
from rltrain.rollout.dispatch_board import RequestBatch
from rltrain.rollout.generator import Generator, build_batch, make_requests
from rltrain.rollout.requests import Rollout

TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=6).map(tuple)


def route_ref(rows: int, missing: tuple[tuple[int, int], ...] = ()) -> RouteRef:
    return RouteRef(
        start_row=0,
        rows=rows,
        missing=missing,
        layers=(0, 1),
        experts_per_token=2,
        num_experts=8,
        dtype="uint8",
        block_sizes=(2,),
        checksums=(0,),
        token_checksum=0,
        weight_version=0,
        producer="vLLM 0.30.0",
        blocks=("object",),
    )


def rollout(prompt: tuple[int, ...], response: tuple[int, ...], **fields: Any) -> Rollout:
    defaults: dict[str, Any] = {
        "logprobs": tuple(-1.0 - i for i in range(len(response))),
        "finish_reason": "stop",
        "weight_version": 0,
        "routes": (route_ref(len(prompt) + len(response) - 1),),
    }
    return Rollout(prompt_tokens=prompt, response_tokens=response, **(defaults | fields))


REASONS = st.sampled_from(["stop", "length"])


@given(st.lists(st.tuples(TOKENS, TOKENS, st.integers(0, 5), REASONS), min_size=1, max_size=5))
def test_batch_holds_every_rollout_in_order(parts: list[tuple[Any, Any, int, Any]]) -> None:
    rollouts = [
        rollout(p, r, weight_version=v, finish_reason=why)
        for p, r, v, why in parts
        for _ in range(2)
    ]
    batch = build_batch(rollouts, group_size=2)
    assert batch.rollout_logprobs is not None and batch.route_mask is not None
    assert batch.weight_version is not None and batch.group_ids is not None
    offsets = batch.offsets.tolist()
    for i, sample in enumerate(rollouts):
        rows = slice(offsets[i], offsets[i + 1])
        prompt, response = len(sample.prompt_tokens), len(sample.response_tokens)
        assert batch.tokens[rows].tolist() == [*sample.prompt_tokens, *sample.response_tokens]
        assert batch.response_mask[rows].tolist() == [False] * prompt + [True] * response
        assert batch.rollout_logprobs[rows].tolist() == [0.0] * prompt + list(sample.logprobs or ())
        assert batch.route_mask[rows].tolist() == [True] * (prompt + response - 1) + [False]
        assert batch.weight_version[i] == sample.weight_version
        assert batch.group_ids[i] == i // 2
        assert batch.truncated is not None
        assert batch.truncated[i] == (sample.finish_reason == "length")
    assert batch.rollout_expert_indices == tuple(r.routes for r in rollouts)
    # Coverage as DESIGN rule 6 defines it: captured rows / (tokens - 1).
    assert int(batch.route_mask.sum()) == int((batch.seq_lens - 1).sum())


def test_every_token_has_the_version_that_sampled_it() -> None:
    spans = ((0, 4), (1, 5), (3, 7))
    batch = build_batch(
        [
            rollout((1, 2), (3, 4, 5, 6), weight_version=7, weight_spans=spans),
            rollout((1, 2, 3), (4,), weight_version=6),
        ],
        group_size=2,
    )
    assert batch.token_versions is not None and batch.weight_version is not None
    assert batch.token_versions.tolist() == [4, 4, 4, 5, 5, 7] + [6] * 4
    assert batch.weight_version.tolist() == [7, 6]


def test_missing_rows_are_out_of_the_mask_of_their_own_sample() -> None:
    turns = (
        route_ref(1, missing=((0, 1),)),
        replace(route_ref(3), first_row=1, missing=((2, 4),)),
    )
    rollouts = [
        rollout((1, 2), (3, 4, 5), routes=turns),
        rollout((1, 2), (3,), routes=(route_ref(2, missing=((1, 2),)),)),
    ]
    batch = build_batch(rollouts, 2)
    assert batch.route_mask is not None
    assert batch.route_mask.tolist() == [False, True, False, False, False, True, False, False]


def test_logprobs_keep_every_bit_of_float32() -> None:
    value = float(torch.tensor(-0.1, dtype=torch.float32))
    batch = build_batch([rollout((1,), (2,), logprobs=(value,))] * 2, 2)
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs.tolist() == [0.0, value] * 2


def test_without_capture_there_are_neither_routes_nor_mask() -> None:
    batch = build_batch([rollout((1, 2), (3,), routes=())] * 2, 2)
    assert batch.rollout_expert_indices is None and batch.route_mask is None


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        ([rollout((1,), (2,))] * 3, "groups of 2"),
        ([], "groups of 2"),
        ([rollout((1,), (2,), logprobs=None)] * 2, "found none"),
        ([rollout((1,), (2, 3), logprobs=(-1.0,))] * 2, "expected 2 log-probabilities"),
        ([rollout((1,), (2,)), rollout((1,), (2,), routes=())], "tokens - 1 = 1 rows"),
        ([rollout((1,), (2,), routes=(route_ref(2),))] * 2, "tokens - 1 = 1 rows"),
        (
            [rollout((1,), (2, 3), routes=(replace(route_ref(2), first_row=1),))] * 2,
            "tokens - 1 = 2 rows",
        ),
    ],
)
def test_malformed_rollouts_are_refused(rollouts: list[Rollout], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_batch(rollouts, 2)


@dataclass(frozen=True)
class Prompt:
    prompt_tokens: tuple[int, ...]
    id: str


def test_every_request_of_a_step_has_its_own_seed_even_for_a_repeated_prompt() -> None:
    problems = [Prompt((1,), "a"), Prompt((2,), "b"), Prompt((1,), "a")]
    groups = make_requests(problems, num_samples=4, run_seed=0, step=1)
    assert [len(group) for group in groups] == [4, 4, 4]
    assert [group[0].prompt_tokens for group in groups] == [(1,), (2,), (1,)]
    seeds = {request.seed for group in groups for request in group}
    assert len(seeds) == 12
    later = make_requests(problems, num_samples=4, run_seed=0, step=2)
    assert seeds.isdisjoint(request.seed for group in later for request in group)


@dataclass
class Recorder:
    """In the place of the engines' dispatcher: keeps what it is asked for."""

    calls: list[Any]

    def run(self, calls: Any, sampling: Any, step: int, patience: Any) -> Any:
        self.calls.append((calls, sampling, step))
        yield from ()


def asked_for(seed: int, step: int, round: int = 0, **rollout: Any) -> Any:
    config = Config.model_validate({"trainer": {"seed": seed}, "rollout": rollout})
    generator = Generator([None], config)
    generator._dispatcher = Recorder([])  # type: ignore[assignment]
    list(generator.stream([Prompt((1,), "a"), Prompt((2,), "b")], step, round))
    generator.greedy([Prompt((1,), "a")])
    return generator._dispatcher.calls  # type: ignore[attr-defined]


def test_the_seeds_of_samples_depend_on_run_step_and_round() -> None:
    seen: set[int] = set()
    for seed, step, round in ((0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)):
        (calls, _, _), _ = asked_for(seed, step, round)
        seeds = {request.seed for call in calls for request in call.requests}
        (again, _, _), _ = asked_for(seed, step, round)
        assert seeds == {request.seed for call in again for request in call.requests}
        assert len(seeds) == 2 * Config().algorithm.group_size
        assert seen.isdisjoint(seeds)
        seen |= seeds


def test_evaluation_stops_where_training_does() -> None:
    (_, sampling, _), (_, greedy, _) = asked_for(0, 1, stop=["</answer>"])
    assert sampling.stop == greedy.stop == ("</answer>",)
    assert greedy.greedy and greedy.num_samples == 1 and not sampling.greedy


def test_seeds_do_not_depend_on_the_other_prompts() -> None:
    alone = make_requests([Prompt((1,), "a")], 2, run_seed=0, step=0)
    among = make_requests([Prompt((2,), "b"), Prompt((1,), "a")], 2, run_seed=0, step=0)
    assert alone[0] == among[1]


def test_a_seed_is_that_of_run_step_prompt_and_sample_and_of_nothing_else() -> None:
    problems = [Prompt((1,), "a"), Prompt((2,), "b")]
    given: dict[str, int] = {"num_samples": 3, "run_seed": 5, "step": 7, "round": 0}
    groups = make_requests(problems, **given)
    for problem, group in zip(problems, groups, strict=True):
        for sample, request in enumerate(group):
            digest = hashlib.sha256(f"5/7/{sample}/{problem.id}".encode()).digest()
            assert request.seed == int.from_bytes(digest[:8], "big") >> 1
            assert (request.prompt_id, request.sample_index) == (problem.id, sample)
    seen = [{request.seed for group in groups for request in group}]
    for name in ("run_seed", "step", "round"):
        others = make_requests(problems, **{**given, name: given[name] + 1})
        seen.append({request.seed for group in others for request in group})
    assert all(len(seeds) == 6 for seeds in seen) and len(set().union(*seen)) == 24


def calls(
    engines: int, groups: int, size: int, *, deterministic: bool, alone: bool
) -> list[RequestBatch]:
    cfg = Config.model_validate(
        {"algorithm": {"group_size": size}, "rollout": {"deterministic": deterministic}}
    )
    problems = [Prompt((1,), f"{i}") for i in range(groups)]
    requests = make_requests(problems, size, 0, 0)
    found = Generator(range(engines), cfg)._calls(requests, alone)
    for call in found:
        assert call.requests == [request for i in call.groups for request in requests[i]]
    assert sorted(i for call in found for i in call.groups) == list(range(groups))
    return found


def test_where_order_decides_what_is_sampled_every_engine_has_one_call() -> None:
    for alone in (False, True):
        found = calls(3, 7, 4, deterministic=True, alone=alone)
        shares = [(call.engine, list(call.groups)) for call in found]
        assert shares == [(0, [0, 3, 6]), (1, [1, 4]), (2, [2, 5])]
    assert [call.engine for call in calls(3, 2, 4, deterministic=True, alone=False)] == [0, 1]


def test_small_groups_go_together_unless_some_are_to_be_left_out() -> None:
    found = calls(2, 7, 16, deterministic=False, alone=False)
    assert [list(call.groups) for call in found] == [[0, 1, 2, 3], [4, 5, 6]]
    assert {call.engine for call in found} == {None}
    for size, alone in (16, True), (100, False):
        found = calls(2, 7, size, deterministic=False, alone=alone)
        assert [list(call.groups) for call in found] == [[i] for i in range(7)]
