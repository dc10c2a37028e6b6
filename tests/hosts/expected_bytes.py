"""What one step must move between three hosts, by formulas: each term is a row of a table.

The layout: stage 0 of the pipeline and engine 0 on B, stage 1 and engine 1 on C, driver on A. Two
ranks of a stage share its tokens (dp=2) and its experts (ep=2). What these exchange stays on their
host: the all-to-all of tokens among experts, and the reduction of gradients. Across the stages the
optimizer adds up one number, the norm. None of that is a term.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rltrain.rollout.requests import Request, Rollout

FLOAT = 4
STAGES = ("B", "C")
HOSTS = ("A", "B", "C")
# By field of `rltrain.batch.Batch`.
SHARD = {"tokens": 8, "response_mask": 1, "loss_mask": 1, "rollout_logprobs": 4, "route_mask": 1}
"""Fields that a rank gets before the passes, bytes a token."""
UPDATE = {"old_logprobs": 4, "advantages": 4, "loss_weights": 4}
"""Those that it gets for the update."""


@dataclass(frozen=True)
class Model:
    """What the formulas need of it."""

    hidden: int
    layers: int
    experts_per_token: int
    weights: Mapping[str, int]
    """Numbers in the tensors of each stage, by the host that has it."""

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any]) -> "Model":
        weights = dict.fromkeys(STAGES, 0)
        layers = int(config["num_hidden_layers"])
        with safe_open(folder / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                count = 1
                for size in file.get_slice(name).get_shape():
                    count *= size
                weights[_stage(name, layers)] += count
        return cls(config["hidden_size"], layers, config["num_experts_per_tok"], weights)


def _stage(tensor: str, layers: int) -> str:
    if tensor.startswith("model.layers."):
        return STAGES[int(tensor.split(".")[2]) >= layers // 2]
    return STAGES[0] if "embed_tokens" in tensor else STAGES[1]


@dataclass(frozen=True)
class Term:
    """Bytes that one host sends to another in the steps that are looked at."""

    what: str
    source: str
    target: str
    bytes: int


def expected(model: Model, steps: Sequence[Sequence[Mapping[str, Any]]], dtype: int) -> list[Term]:
    """
    Args:
        steps: the rows of rollouts.jsonl, all of each step
        dtype: bytes of a number of the weights, as the engines hold them
    """
    terms: list[Term] = []
    for rows in steps:
        terms += _of_step(model, rows, dtype)
    merged: dict[tuple[str, str, str], int] = {}
    for term in terms:
        key = term.what, term.source, term.target
        merged[key] = merged.get(key, 0) + term.bytes
    return [Term(*key, count) for key, count in merged.items()]


def _of_step(model: Model, rows: Sequence[Mapping[str, Any]], dtype: int) -> list[Term]:
    tokens = sum(map(length, rows))
    activation = tokens * model.hidden * FLOAT
    terms = [
        Term("activations, scoring: N x H x 4", "B", "C", activation),
        Term("activations, update: N x H x 4", "B", "C", activation),
        Term("their gradients: N x H x 4", "C", "B", activation),
        Term("log-probabilities: N x 4", "C", "A", tokens * FLOAT),
    ]
    fields = tokens * (sum(SHARD.values()) + sum(UPDATE.values()))
    for number, here in enumerate(STAGES):
        there = STAGES[1 - number]
        # With rollout.deterministic the groups go to the engines in turn. Of a sequence the last
        # token has no route.
        own = [row for row in rows if row["group"] % len(STAGES) == number]
        routed = sum(length(row) - 1 for row in own)
        moved = routed * (model.layers // 2) * model.experts_per_token
        terms += [
            Term("weights of the stage: P x dtype", here, there, model.weights[here] * dtype),
            Term("routes: rows x L/2 x K", here, there, moved),
            Term("batch: N x 27", "A", here, fields),
            Term("requests", "A", here, len(pickle.dumps([_request(row) for row in own], 5))),
            Term("responses", here, "A", len(pickle.dumps([_rollout(row) for row in own], 5))),
        ]
    return terms


def length(row: Mapping[str, Any]) -> int:
    """Tokens of a sequence: the tiny tokenizer makes one of each byte, and one that begins it."""
    return 1 + len(row["prompt"]) + len(row["tokens"])


def _request(row: Mapping[str, Any]) -> Request:
    return Request(_ids(1 + len(row["prompt"])), 1 << 62, "0" * 64, row["sample"])


def _rollout(row: Mapping[str, Any]) -> Rollout:
    prompt, response = _ids(1 + len(row["prompt"])), _ids(len(row["tokens"]))
    return Rollout(prompt, response, tuple(row["rollout_logprobs"]), "length", 1, None)


def _ids(count: int) -> tuple[int, ...]:
    """Token ids, most of which take two bytes and a kind in a pickle."""
    return tuple(range(256, 256 + count))


def table(
    terms: Sequence[Term],
    measured: Mapping[tuple[str, str], float],
    idle: Mapping[tuple[str, str], float],
) -> list[str]:
    """Lines: every term, and for each cable and direction the sum beside what was measured.

    Args:
        measured: by host and "sent" or "received"
        idle: likewise, what an idle cluster would have moved in that time
    """
    lines = [f"{'bytes':>12}  from to  what"]
    for term in sorted(terms, key=lambda t: (t.source, t.target, -t.bytes)):
        lines.append(f"{term.bytes:12,}  {term.source} -> {term.target}  {term.what}")
    lines.append(f"{'expected':>12} {'idle':>9} {'measured':>12} {'ratio':>6}  cable")
    for host in HOSTS:
        for way in ("sent", "received"):
            due, quiet = sum_of(terms, host, way), idle[host, way]
            found = measured[host, way]
            ratio = found / (due + quiet)
            lines.append(f"{due:12,} {quiet:9,.0f} {found:12,.0f} {ratio:6.3f}  {host} {way}")
    return lines


def sum_of(terms: Sequence[Term], host: str, way: str) -> int:
    """Bytes that a host sends or receives."""
    return sum(t.bytes for t in terms if (t.source if way == "sent" else t.target) == host)
