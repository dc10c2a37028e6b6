"""Prompts in, groups of responses out as they finish, and the batch they make."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Any

import numpy as np
import torch

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.rollout.dispatch import Dispatcher, Replacer, poll_s
from rltrain.rollout.dispatch_board import RequestBatch
from rltrain.rollout.requests import Prompt, Request, Rollout, SamplingParams, request_seed
from rltrain.routing.align import last_rows

REQUESTS_PER_CALL = 64
"""Small groups are sent in one call, to save the cost of many calls."""


@dataclass(frozen=True)
class ResponseGroup:
    """The responses to one prompt."""

    index: int  # of the prompt in the sequence of problems
    rollouts: list[Rollout]
    names: list[str]  # of the responses, for error messages


class Generator:
    """Generates on a set of started engines.

    Args:
        engines: handles of ``RolloutEngine`` actors.
        replacer: starts engines again that died; None: a death is an error
    """

    def __init__(
        self, engines: Sequence[Any], cfg: Config, replacer: Replacer | None = None
    ) -> None:
        self.engines = engines
        self._dispatcher = Dispatcher(engines, cfg.cluster.call_timeout_s, replacer)
        self._run_seed = cfg.trainer.seed
        self._deterministic = cfg.rollout.deterministic
        self._sampling = SamplingParams(
            temperature=cfg.rollout.temperature,
            max_tokens=cfg.rollout.max_response_tokens,
            num_samples=cfg.algorithm.group_size,
            capture_routes=cfg.routing_replay.capture,
            stop=tuple(cfg.rollout.stop),
        )
        self._greedy = SamplingParams(
            temperature=cfg.rollout.temperature,
            max_tokens=cfg.rollout.max_response_tokens,
            greedy=True,
            logprobs=False,
            stop=tuple(cfg.rollout.stop),
        )

    @property
    def is_generating(self) -> bool:
        """Whether an engine has requests."""
        return self._dispatcher.is_generating

    @property
    def num_requests(self) -> int:
        """That the engines have."""
        return self._dispatcher.num_requests

    def watch(self, on_load: Callable[[int, int], None]) -> None:
        """Have ``on_load`` told how many requests an engine has, whenever that changes."""
        self._dispatcher.on_load = on_load

    def stream(
        self,
        problems: Sequence[Prompt],
        step: int,
        round: int = 0,
        keep: int | None = None,
        patience: Callable[[], float] = poll_s,
    ) -> Iterator[ResponseGroup | None]:
        """G responses to each problem, group by group as they finish. It yields None if none has
        finished for a moment, so that the caller can do other work. Several streams may go on by
        turns.

        Args:
            round: the step's round of generation, from 0; a problem gets other samples in each
            keep: stop after this many groups and abort the others; None: keep all
            patience: how many seconds that moment may last
        """
        num_samples = self._sampling.num_samples
        groups = make_requests(problems, num_samples, self._run_seed, step, round=round)
        return self._run(groups, self._sampling, step, keep or len(groups), patience)

    def greedy(self, problems: Sequence[Prompt]) -> list[Rollout]:
        """The greedy response to each problem, without log-probabilities or routes."""
        groups = make_requests(problems, self._greedy.num_samples, self._run_seed, step=0)
        finished = [g for g in self._run(groups, self._greedy, 0, len(groups)) if g is not None]
        return [r for group in sorted(finished, key=lambda g: g.index) for r in group.rollouts]

    def _run(
        self,
        groups: Sequence[Sequence[Request]],
        sampling: SamplingParams,
        step: int,
        keep: int,
        patience: Callable[[], float] = poll_s,
    ) -> Iterator[ResponseGroup | None]:
        calls = self._calls(groups, alone=keep < len(groups))
        with closing(self._dispatcher.run(calls, sampling, step, patience)) as results:
            for result in results:
                if result is None:
                    yield None
                    continue
                call, rollouts = result
                for n, i in enumerate(call.groups[:keep]):
                    responses = rollouts[n * sampling.num_samples : (n + 1) * sampling.num_samples]
                    yield ResponseGroup(i, responses, [str(request) for request in groups[i]])
                keep -= len(call.groups)
                if keep <= 0:
                    return

    def _calls(self, groups: Sequence[Sequence[Request]], alone: bool) -> list[RequestBatch]:
        """With ``rollout.deterministic`` one batch per engine, in fixed order; else small batches.

        Args:
            alone: whether every group gets a batch of its own, so that none waits for another
        """
        numbers = range(len(groups))
        if self._deterministic:
            engines = range(min(len(self.engines), len(groups)))
            shares: list[tuple[range, int | None]] = [
                (numbers[engine :: len(engines)], engine) for engine in engines
            ]
        else:
            size = 1 if alone else max(1, REQUESTS_PER_CALL // len(groups[0]))
            shares = [(numbers[i : i + size], None) for i in numbers[::size]]
        return [
            RequestBatch(share, [request for i in share for request in groups[i]], engine)
            for share, engine in shares
        ]


def make_requests(
    problems: Sequence[Prompt], num_samples: int, run_seed: int, step: int, round: int = 0
) -> list[list[Request]]:
    """Per problem one request for each sample. No two have the same seed, even where a problem
    comes twice in a step.

    Args:
        round: of the step's rounds of generation, each of as many problems
    """
    occurrences: Counter[str] = Counter()
    groups = []
    for problem in problems:
        first = (round * len(problems) + occurrences[problem.id]) * num_samples
        occurrences[problem.id] += 1
        groups.append(
            [
                Request(
                    prompt_tokens=tuple(problem.prompt_tokens),
                    seed=request_seed(run_seed, step, problem.id, sample),
                    prompt_id=problem.id,
                    sample_index=sample,
                )
                for sample in range(first, first + num_samples)
            ]
        )
    return groups


def build_batch(rollouts: Sequence[Rollout], group_size: int) -> Batch:
    """Sequences end to end, in the order of the rollouts; each ``group_size`` in a row are a group.

    ``rollout_logprobs`` is 0 at prompt tokens, and where an environment spoke. Routes are present
    on all rollouts or on none.
    """
    if not rollouts or len(rollouts) % group_size:
        raise ValueError(f"expected groups of {group_size} rollouts, found {len(rollouts)} in all")
    prompt_lens = torch.tensor([len(r.prompt_tokens) for r in rollouts])
    response_lens = torch.tensor([len(r.response_tokens) for r in rollouts])
    seq_lens = prompt_lens + response_lens
    for rollout in rollouts:
        if rollout.logprobs is None or len(rollout.logprobs) != len(rollout.response_tokens):
            count = "none" if rollout.logprobs is None else len(rollout.logprobs)
            raise ValueError(
                f"expected {len(rollout.response_tokens)} log-probabilities, found {count}: sample "
                "training rollouts with logprobs=True"
            )
    logprobs = [(repeat(0.0, len(r.prompt_tokens)), r.logprobs or ()) for r in rollouts]
    tokens = [(r.prompt_tokens, r.response_tokens) for r in rollouts]
    # Prompt and response lengths in turn, and whether each stretch was sampled.
    stretches = torch.stack([prompt_lens, response_lens], dim=1).flatten()
    sampled = torch.tensor([False, True]).repeat(len(rollouts))
    batch = Batch(
        tokens=torch.from_numpy(_end_to_end(tokens, np.int64)),
        seq_lens=seq_lens,
        response_mask=_without_observations(sampled.repeat_interleave(stretches), rollouts),
        rollout_logprobs=torch.from_numpy(_end_to_end(logprobs, np.float32)),
        group_ids=torch.arange(len(rollouts)) // group_size,
        weight_version=torch.tensor([r.weight_version for r in rollouts]),
        token_versions=_token_versions(rollouts),
        truncated=torch.tensor([r.finish_reason == "length" for r in rollouts]),
    )
    return _with_routes(batch, rollouts)


def _without_observations(mask: torch.Tensor, rollouts: Sequence[Rollout]) -> torch.Tensor:
    """True on sampled tokens alone."""
    offset = 0
    for rollout in rollouts:
        offset += len(rollout.prompt_tokens)
        for begin, end in rollout.observations:
            mask[offset + begin : offset + end] = False
        offset += len(rollout.response_tokens)
    return mask


def _end_to_end(parts: Iterable[Iterable[Iterable[float]]], dtype: type) -> np.ndarray[Any, Any]:
    """All numbers of all parts in one array; several times faster than from a list."""
    return np.fromiter(chain.from_iterable(chain.from_iterable(parts)), dtype)


def _token_versions(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """The weight version that sampled each token; a prompt has the first of its response.  # [N]"""
    versions, lengths = [], []
    for rollout in rollouts:
        spans = rollout.weight_spans or ((0, rollout.weight_version),)
        begins = [-len(rollout.prompt_tokens), *(begin for begin, _ in spans[1:])]
        ends = [*begins[1:], len(rollout.response_tokens)]
        versions += [version for _, version in spans]
        lengths += [end - begin for begin, end in zip(begins, ends, strict=True)]
    return torch.tensor(versions).repeat_interleave(torch.tensor(lengths))


def _with_routes(batch: Batch, rollouts: Sequence[Rollout]) -> Batch:
    if not any(rollout.routes for rollout in rollouts):
        return batch
    for length, rollout in zip(batch.seq_lens.tolist(), rollouts, strict=True):
        ends = list(accumulate((ref.rows for ref in rollout.routes), initial=0))
        if [ref.first_row for ref in rollout.routes] != ends[:-1] or ends[-1] != length - 1:
            found = [(ref.first_row, ref.rows) for ref in rollout.routes]
            raise ValueError(
                f"expected routes with tokens - 1 = {length - 1} rows, each turn's after those of "
                f"the turn before, found (first row, rows) {found}"
            )
    route_mask = ~last_rows(batch.seq_lens)
    for offset, rollout in zip(batch.offsets.tolist(), rollouts, strict=False):
        for start, end in (span for ref in rollout.routes for span in ref.missing):
            route_mask[offset + start : offset + end] = False
    routes = tuple(rollout.routes for rollout in rollouts)
    return batch.with_fields(route_mask=route_mask, rollout_expert_indices=routes)
