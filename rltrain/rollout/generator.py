"""Prompts in, batch out: spreads a step's requests over the engines."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
import torch

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.rollout.types import Prompt, Request, Rollout, SamplingParams, request_seed
from rltrain.routing.align import last_rows


class Generator:
    """Generates on a set of started engines.

    Args:
        engines: handles of ``RolloutEngine`` actors.
    """

    def __init__(self, engines: Sequence[Any], cfg: Config) -> None:
        self.engines = list(engines)
        self._run_seed = cfg.trainer.seed
        self._timeout_s = cfg.cluster.call_timeout_s
        self._sampling = SamplingParams(
            temperature=cfg.rollout.temperature,
            max_tokens=cfg.rollout.max_response_tokens,
            num_samples=cfg.algorithm.group_size,
            capture_routes=cfg.routing_replay.capture,
        )
        self._greedy = SamplingParams(
            temperature=cfg.rollout.temperature,
            max_tokens=cfg.rollout.max_response_tokens,
            greedy=True,
            logprobs=False,
        )

    def generate(
        self, problems: Sequence[Prompt], step: int, round: int = 0
    ) -> tuple[Batch, list[Rollout], list[str]]:
        """G responses to each problem: sequence ``i * G + s`` is sample s of problem i.

        Args:
            round: of the step's rounds of generation; a problem that comes in two of them gets
                other samples

        Returns:
            The batch, the rollouts, and how an error names each of them.
        """
        groups = make_requests(
            problems, self._sampling.num_samples, self._run_seed, step, round=round
        )
        rollouts = self._run(groups, self._sampling, step)
        names = [str(request) for group in groups for request in group]
        return build_batch(rollouts, self._sampling.num_samples), rollouts, names

    def greedy(self, problems: Sequence[Prompt]) -> list[Rollout]:
        """The greedy response to each problem, without log-probabilities or routes."""
        groups = make_requests(problems, self._greedy.num_samples, self._run_seed, step=0)
        return self._run(groups, self._greedy, step=0)

    def _run(
        self, groups: Sequence[Sequence[Request]], sampling: SamplingParams, step: int
    ) -> list[Rollout]:
        # A group stays on one engine, where its samples share the cached prompt.
        engines = self.engines[: len(groups)]
        shares = [groups[i :: len(engines)] for i in range(len(engines))]
        pending = [
            engine.generate.remote([request for group in share for request in group], sampling)
            for engine, share in zip(engines, shares, strict=True)
        ]
        by_group: list[list[Rollout]] = [[] for _ in groups]
        for engine, (share, result) in enumerate(zip(shares, pending, strict=True)):
            rollouts = self._wait(result, engine, step)
            for i in range(len(share)):
                start = i * sampling.num_samples
                by_group[engine + i * len(engines)] = rollouts[start : start + sampling.num_samples]
        return [rollout for group in by_group for rollout in group]

    def _wait(self, result: Any, engine: int, step: int) -> list[Rollout]:
        try:
            return ray.get(result, timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise RuntimeError(
                f"rollout engine {engine} did not answer within {self._timeout_s:g} s in step "
                f"{step}: raise cluster.call_timeout_s, or look for a hang in its log"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(
                f"rollout engine {engine} died in step {step}, out of memory perhaps; its log and "
                "the kernel's (dmesg) say more"
            ) from error


def make_requests(
    problems: Sequence[Prompt], num_samples: int, run_seed: int, step: int, round: int = 0
) -> list[list[Request]]:
    """Per problem one request for each sample. No two have the same seed, even where a problem
    comes twice in a step.

    Args:
        round: of the step's rounds of generation, each of as many problems
    """
    seen: Counter[str] = Counter()
    groups = []
    for problem in problems:
        first = (round * len(problems) + seen[problem.id]) * num_samples
        seen[problem.id] += 1
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

    ``rollout_logprobs`` is 0 at prompt tokens. Routes are present on all rollouts or on none.
    """
    if not rollouts or len(rollouts) % group_size:
        raise ValueError(f"expected groups of {group_size} rollouts, found {len(rollouts)} in all")
    prompt_lens = torch.tensor([len(r.prompt_tokens) for r in rollouts])
    response_lens = torch.tensor([len(r.response_tokens) for r in rollouts])
    seq_lens = prompt_lens + response_lens
    logprobs: list[float] = []
    for rollout in rollouts:
        if rollout.logprobs is None or len(rollout.logprobs) != len(rollout.response_tokens):
            found = "none" if rollout.logprobs is None else len(rollout.logprobs)
            raise ValueError(
                f"expected {len(rollout.response_tokens)} log-probabilities, found {found}: sample "
                "training rollouts with logprobs=True"
            )
        logprobs += [0.0] * len(rollout.prompt_tokens) + list(rollout.logprobs)
    # Prompt and response lengths in turn, and whether each stretch was sampled.
    stretches = torch.stack([prompt_lens, response_lens], dim=1).flatten()
    sampled = torch.tensor([False, True]).repeat(len(rollouts))
    batch = Batch(
        tokens=torch.tensor([t for r in rollouts for t in (*r.prompt_tokens, *r.response_tokens)]),
        seq_lens=seq_lens,
        response_mask=sampled.repeat_interleave(stretches),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        group_ids=torch.arange(len(rollouts)) // group_size,
        weight_version=torch.tensor([r.weight_version for r in rollouts]),
        truncated=torch.tensor([r.finish_reason == "length" for r in rollouts]),
    )
    return _with_routes(batch, rollouts)


def _with_routes(batch: Batch, rollouts: Sequence[Rollout]) -> Batch:
    routes = tuple(r.routes for r in rollouts if r.routes is not None)
    if not routes:
        return batch
    covered = [(route.first_row, route.rows) for route in routes]
    if covered != [(0, length - 1) for length in batch.seq_lens.tolist()]:
        raise ValueError(
            f"expected routes with tokens - 1 rows on each of {len(rollouts)} rollouts, found "
            f"{len(routes)} with {sum(n for _, n in covered)} rows for {batch.num_tokens} tokens"
        )
    route_mask = ~last_rows(batch.seq_lens)
    for offset, route in zip(batch.offsets.tolist(), routes, strict=False):
        for start, end in route.missing:
            route_mask[offset + start : offset + end] = False
    return batch.with_fields(route_mask=route_mask, rollout_expert_indices=routes)
