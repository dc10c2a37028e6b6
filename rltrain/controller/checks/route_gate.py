"""The gate on routes that are well-formed and wrong: judged by margin, on sampled steps. Pure."""

from collections.abc import Mapping

import numpy as np

from rltrain.batch import Batch
from rltrain.policy.types import Agreement
from rltrain.routing.flips import WideFlips, judged_rows
from rltrain.routing.margin_gate import HEALTHY_SHARE, Finding, JudgedStep, systematic
from rltrain.routing.noise import last_narrow_bin, noise_scale

NAMED = 3  # other cells that a message lists


def noise_scales(agreement: Agreement) -> dict[int, float]:
    """By layer, the noise between engine and trainer; see `rltrain.routing.noise`."""
    return {layer: noise_scale(flips.runners_up) for layer, flips in agreement.flips.items()}


def narrow_bins(agreement: Agreement, noise: Mapping[int, float]) -> dict[int, int]:
    """By layer, how wide a flip rounding may make; ``noise`` is that of `noise_scales`."""
    return {
        layer: last_narrow_bin(flips, noise[layer], agreement.num_judged)
        for layer, flips in agreement.flips.items()
    }


def flip_metrics(
    agreement: Agreement, noise: Mapping[int, float], flips: WideFlips
) -> dict[str, float]:
    """Share of rows with a wide flip, by layer, and the noise that they are wide against."""
    rows, layers = agreement.num_judged, list(agreement.flips)
    if rows == 0 or not layers:
        return {}
    pairs = np.unique(np.stack([flips.rows, flips.layers]), axis=1)
    wide = {layer: int((pairs[1] == layer).sum()) / rows for layer in layers}
    known = {layer: scale for layer, scale in noise.items() if np.isfinite(scale)}
    return {
        "routing/judged_fraction": rows / max(1, agreement.num_rows),
        "routing/wide_flip_fraction": sum(wide.values()) / len(layers),
        **{f"routing/wide_flip_fraction/layer_{layer}": share for layer, share in wide.items()},
        **{f"routing/flip_noise/layer_{layer}": scale for layer, scale in known.items()},
    }


def wrong_routes(
    batch: Batch, agreement: Agreement, flips: WideFlips, experts_per_token: int
) -> str | None:
    """What is systematically wrong with the rollout's routes, for people; None where nothing is."""
    (mask,) = batch.require("route_mask")
    case = JudgedStep(
        tokens=batch.tokens.numpy(),
        seq_lens=batch.seq_lens.numpy(),
        judged=judged_rows(mask, batch.seq_lens).numpy(),
        layers=tuple(sorted(agreement.flips)),
        experts_per_token=experts_per_token,
        uses={layer: layer_flips.uses for layer, layer_flips in agreement.flips.items()},
    )
    findings = systematic(flips, case)
    return _message(findings, flips, case) if findings else None


def _message(findings: list[Finding], flips: WideFlips, case: JudgedStep) -> str:
    best, others = findings[0], findings[1:]
    layers = np.unique(flips.layers[best.inside]).tolist()
    first = int(np.flatnonzero(best.inside)[0])
    ends = np.cumsum(case.seq_lens)
    sample = int(np.searchsorted(ends, flips.rows[first], side="right"))
    row = int(flips.rows[first] - ends[sample] + case.seq_lens[sample])
    named = "; ".join(f"{other.where}: {other.share:.1%}" for other in others[:NAMED])
    more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
    return (
        f"the rollout's routes are systematically wrong. {best.where}: in {best.share:.1%} of the "
        "routes there an expert lies far below the trainer's own choice, and rounding explains "
        f"{HEALTHY_SHARE:.1%} at most. Layers: {_ranges(layers)}. The first: sample {sample}, row "
        f"{row}, layer {flips.layers[first]}, column {flips.columns[first]}, expert "
        f"{flips.experts[first]}."
        + (f" Also: {named}{more}." if named else "")
        + " The routes there are not those of these tokens, this layer or these weights: with "
        "routing_replay.trace=true the run tells whether they changed on their way from the engine"
    )


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    edges = np.flatnonzero(np.diff(numbers) != 1)
    starts, ends = [0, *(edges + 1)], [*edges, len(numbers) - 1]
    spans = [(numbers[start], numbers[end]) for start, end in zip(starts, ends, strict=True)]
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in spans)
