"""What a card should give: how long a step's work takes it at its published limits. Pure.

Training is held against the card's arithmetic: model FLOPs utilization, MFU, as PaLM counts it
(arXiv:2204.02311, appendix B). Generation is held against its memory: a decoding step reads the
weights that its tokens need and the keys and values of all that they attend to.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TERA = 1e12

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Card:
    flops: float  # dense bf16 FLOP/s
    bandwidth: float  # of its memory, bytes/s


CARDS = {
    "NVIDIA A100-SXM4-40GB": Card(312 * TERA, 1.555 * TERA),
    "NVIDIA A100-SXM4-80GB": Card(312 * TERA, 2.039 * TERA),
    "NVIDIA A100 80GB PCIe": Card(312 * TERA, 1.935 * TERA),
    "NVIDIA H100 80GB HBM3": Card(989 * TERA, 3.35 * TERA),
    "NVIDIA H100 PCIe": Card(756 * TERA, 2.0 * TERA),
    "NVIDIA H100 NVL": Card(835 * TERA, 3.9 * TERA),
    "NVIDIA H200": Card(989 * TERA, 4.8 * TERA),
    "NVIDIA H200 NVL": Card(835 * TERA, 4.8 * TERA),
    "NVIDIA H20": Card(148 * TERA, 4.0 * TERA),
    "NVIDIA B200": Card(2250 * TERA, 8.0 * TERA),
    "NVIDIA L40S": Card(362 * TERA, 0.864 * TERA),
}
"""By the name that NVML gives it. From NVIDIA's data sheets of each card, whose FLOP/s are
with sparsity from H100 on: half of them. Those of H20, L40S, PCIe and NVL cards are from memory."""


@dataclass(frozen=True)
class Work:
    """What one model asks of a card."""

    active_parameters: int
    """That one token is multiplied with: K of E experts, the output head, no embedding."""
    attention_channels: int
    """Heads x (head size of keys + head size of values), over layers that attend to everything."""
    engine_bytes: int
    """Of the weights of one engine that every token needs, in the engine's format."""
    engine_expert_bytes: int
    """Of all its routed experts."""
    kv_bytes: int
    """Of a token's keys and values, over all layers and ranks of an engine."""
    num_experts: int = 0
    experts_per_token: int = 0
    window: int = 0
    window_channels: int = 0
    """As ``attention_channels``, over layers that attend to the last ``window`` tokens."""


def find_card(name: str) -> Card | None:
    """By the longest name in the table that ``name`` begins with, as whole words."""
    known = [card for card in CARDS if name == card or name.startswith(f"{card} ")]
    return CARDS[max(known, key=len)] if known else None


def forward_flops(work: Work, seq_lens: Sequence[int]) -> float:
    """Two FLOPs a token and parameter, and two a pair of tokens that attend and channel."""
    linear = 2.0 * work.active_parameters * sum(seq_lens)
    pairs = sum(n * (n + 1) / 2 for n in seq_lens)
    w = work.window
    in_window = sum(w * n - w * (w - 1) / 2 if n > w else n * (n + 1) / 2 for n in seq_lens)
    return linear + 2.0 * (work.attention_channels * pairs + work.window_channels * in_window)


def update_flops(work: Work, seq_lens: Sequence[int]) -> float:
    """The backward pass takes twice the forward pass; what is recomputed does not count."""
    return 3.0 * forward_flops(work, seq_lens)


def decoding_seconds(
    work: Work,
    card: Card,
    prompt_lens: Sequence[int],
    response_lens: Sequence[int],
    *,
    engines: int,
    gpus: int,
) -> float:
    """What the engines need at least to sample the responses, all at once and evenly shared out.

    Each step takes as long as memory or arithmetic does, whichever is longer. Experts are read as
    even routing touches them: routers that prefer some read fewer. Reading the prompts, which
    responses of a group share, counts nothing.

    Args:
        prompt_lens, response_lens: of every response
        engines: copies of the model; gpus: of all of them together
    """
    lens = sorted(zip(response_lens, prompt_lens, strict=True))
    bandwidth, flops = card.bandwidth * gpus / engines, card.flops * gpus / engines
    prompts = sum(prompt_lens)
    seconds, start = 0.0, 0
    for finished, (length, prompt) in enumerate(lens):
        steps = length - start
        if steps > 0:
            live = (len(lens) - finished) / engines
            context = prompts / engines + live * (start + (steps - 1) / 2)
            nbytes = _weights_read(work, max(1.0, live)) + context * work.kv_bytes
            attention = 2.0 * work.attention_channels * context
            arithmetic = 2.0 * work.active_parameters * live + attention
            seconds += steps * max(nbytes / bandwidth, arithmetic / flops)
            start = length
        prompts -= prompt
    return seconds


def _weights_read(work: Work, tokens: float) -> float:
    """Bytes of the weights that so many tokens touch in one pass."""
    if not work.num_experts:
        return float(work.engine_bytes)
    untouched: float = (1 - work.experts_per_token / work.num_experts) ** tokens
    return work.engine_bytes + work.engine_expert_bytes * (1 - untouched)


def describe_bottleneck(rows: Rows, card: str | None) -> str:
    """In which phases a run's steps spend their time, and how near its card is to its limits.

    Args:
        rows: of metrics.jsonl
        card: its name; None where no GPU was sampled

    Returns:
        One line; empty where no step was timed.
    """
    timed = [row for row in rows if row.get("time/step")]
    timed = timed[1:] or timed  # the first one compiles and warms up
    if not timed:
        return ""
    total = sum(row["time/step"] for row in timed)
    phases = {n for row in timed for n in row if n.startswith("time/") and n != "time/step"}
    shares = {n: sum(row.get(n) or 0.0 for row in timed) / total for n in phases}
    order = sorted(shares, key=lambda n: -shares[n])[:3]
    named = [f"{n.removeprefix('time/').replace('_', ' ')} {shares[n]:.0%}" for n in order]
    line = f"Where a step goes: {', '.join(named)}."
    speed = _median(timed, "throughput/tokens_per_second_per_gpu")
    if card is None:
        speed = _median(timed, "throughput/tokens_per_second")
        measured = "" if speed is None else f" {speed:,.0f} tokens/s."
        return f"{line}{measured} No GPU was sampled, so no utilization is reported."
    measured = "" if speed is None else f" {speed:,.0f} tokens/s per GPU."
    if find_card(card) is None:
        return f"{line}{measured} No limits of {card} are known (rltrain/planning/roofline.py)."
    bound = _median(timed, "throughput/bound_tokens_per_second_per_gpu")
    if bound is None:
        return line + measured
    reached = [
        f"{phase} at {value:.0%} of {limit}" if value >= 0.01 else f"{phase} under 1% of {limit}"
        for phase, limit, name in (
            ("generation", "its memory's bound", "throughput/generate_over_bound"),
            ("scoring", "its peak (MFU)", "throughput/mfu_scoring"),
            ("update", "its peak (MFU)", "throughput/mfu_update"),
        )
        if (value := _median(timed, name)) is not None
    ]
    return f"{line}{measured} At its limits {card} would give {bound:,.0f}: {', '.join(reached)}."


def _median(rows: Rows, name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else None
