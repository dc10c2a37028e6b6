"""The formulas of the papers once more: numpy, float64, loops over sequences and tokens.

Written from the papers, not from rltrain. A batch is what `tests.unit.algorithms.batches` makes:
sequences end to end on one token axis; ``tokens(batch)`` gives the masked places by sequence.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def tokens(batch) -> list[list[int]]:
    """The masked places of each sequence, in order."""
    ends = np.cumsum(batch.seq_lens)
    spans = zip(ends - batch.seq_lens, ends, strict=True)
    return [[t for t in range(start, end) if batch.mask[t]] for start, end in spans]


# Advantages


def group_advantages(batch, token_rewards: Array, kind: str) -> Array:
    """arXiv:2402.03300 4.1.2 (grpo), arXiv:2503.20783 3.2 (dr_grpo), arXiv:2402.14740 eq. 8 (rloo),
    arXiv:2501.03262 (reinforce_pp_baseline, before whitening)."""
    places, out = tokens(batch), np.zeros(len(batch.mask))
    scores = {i: sum(token_rewards[t] for t in own) for i, own in enumerate(places) if own}
    for i, score in scores.items():
        group = [s for j, s in scores.items() if batch.groups[j] == batch.groups[i]]
        others = [s for j, s in scores.items() if batch.groups[j] == batch.groups[i] and j != i]
        if kind == "rloo":
            advantage = score - np.mean(others) if others else 0.0
        else:
            advantage = score - np.mean(group)
        if kind == "grpo":
            advantage /= (np.std(group, ddof=1) if others else 0.0) + 1e-6
        for t in places[i]:
            out[t] = advantage
    return out


def returns_to_go(batch, token_rewards: Array, gamma: float) -> Array:
    """arXiv:2501.03262: G_t = sum of gamma^k r_(t+k), k counted in response tokens."""
    out = np.zeros(len(batch.mask))
    for own in tokens(batch):
        for i, t in enumerate(own):
            out[t] = sum(gamma**k * token_rewards[u] for k, u in enumerate(own[i:]))
    return out


def gae(batch, token_rewards: Array, values: Array, gamma: float, lam: float) -> Array:
    """arXiv:1506.02438 eq. 16 with the deltas of eq. 10; the value after the end is 0."""
    out = np.zeros(len(batch.mask))
    for own in filter(None, tokens(batch)):
        following = [values[t] for t in own[1:]] + [0.0]
        deltas = [
            token_rewards[t] + gamma * v - values[t] for t, v in zip(own, following, strict=True)
        ]
        for i, t in enumerate(own):
            out[t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
    return out


def whitened(batch, values: Array) -> Array:
    """Over all masked tokens; openai/lm-human-preferences core.whiten (biased, eps 1e-8)."""
    places = [t for own in tokens(batch) for t in own]
    out = np.zeros(len(batch.mask))
    if places:
        mean = sum(values[t] for t in places) / len(places)
        variance = sum((values[t] - mean) ** 2 for t in places) / len(places)
        for t in places:
            out[t] = (values[t] - mean) / math.sqrt(variance + 1e-8)
    return out


# Losses: (value, slope in the token's log-probability, clipped low, clipped high) of each token


def ppo(r: float, a: float, config) -> tuple[float, float, bool, bool, bool]:
    """arXiv:1707.06347 eq. 7, clip ranges of arXiv:2503.14476 eq. 10, dual clip of arXiv:1912.09729
    eq. 5; all to be maximized there, so negated here. r's slope is r."""
    clipped = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
    objective = min(r * a, clipped * a)
    slope = r * a if r * a <= clipped * a else 0.0
    dual = config.dual_clip is not None and a < 0 and objective < config.dual_clip * a
    if dual:
        objective, slope = config.dual_clip * a, 0.0
    return (
        -objective,
        -slope,
        r < 1 - config.clip_low and a < 0,
        r > 1 + config.clip_high and a > 0,
        dual,
    )


def token_losses(name: str, batch, logprobs, old, advantages, config) -> dict[str, Array]:
    found = {
        k: np.zeros(len(batch.mask)) for k in ("loss", "slope", "ratio", "low", "high", "dual")
    }
    for own in tokens(batch):
        log_ratios = {t: min(max(logprobs[t] - old[t], -20.0), 20.0) for t in own}
        moves = {t: float(abs(logprobs[t] - old[t]) <= 20) for t in own}
        for t in own:
            a, r, dual = advantages[t], math.exp(log_ratios[t]), False
            low, high = r < 1 - config.clip_low, r > 1 + config.clip_high
            if name == "ppo":
                loss, slope, low, high, dual = ppo(r, a, config)
                slope *= moves[t]
            elif name == "gspo":  # arXiv:2507.18071 eq. 14: value s_i, gradient of token t alone
                r = math.exp(sum(log_ratios.values()) / len(own))
                loss, slope, low, high, _ = ppo(r, a, config.model_copy(update={"dual_clip": None}))
            elif name == "cispo":  # arXiv:2506.13585 eq. 4 and 5
                weight = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
                loss, slope = -weight * a * logprobs[t], -weight * a
            else:  # REINFORCE
                loss, slope, low, high = -a * logprobs[t], -a, False, False
            for key, x in zip(found, (loss, slope, r, low, high, dual), strict=True):
                found[key][t] = x
    return found


def kl(logprob: float, ref: float, kind: str) -> tuple[float, float]:
    """Value and slope in ``logprob``; joschu.net/blog/kl-approx.html with r = ref / pi."""
    log_r = min(max(ref - logprob, -20.0), 20.0)
    r, moves = math.exp(log_r), float(abs(ref - logprob) <= 20)
    value = {"k1": -log_r, "k2": log_r**2 / 2}.get(kind, r - 1 - log_r)
    slope = {"k1": 1.0, "k3": 1 - r}.get(kind, -log_r)
    return value, slope * moves


def weights(batch, aggregation: str, max_response_tokens: int) -> Array:
    """arXiv:2503.14476 eq. 12 (token_mean), arXiv:2402.03300 eq. 3 (sequence_mean_token_mean), and
    arXiv:2503.20783 3.2 (constant)."""
    places, out = tokens(batch), np.zeros(len(batch.mask))
    present = [own for own in places if own]
    for own in present:
        for t in own:
            out[t] = {
                "token_mean": 1 / sum(map(len, present)),
                "sequence_mean_token_mean": 1 / len(own) / len(present),
                "sequence_mean_token_sum": 1 / len(present),
                "constant": 1 / (len(places) * max_response_tokens),
            }[aggregation]
    return out


# The rollout engine's log-probabilities against the trainer's


def log_rho(batch, train: Array, rollout: Array) -> list[list[float]]:
    return [[min(max(train[t] - rollout[t], -20.0), 20.0) for t in own] for own in tokens(batch)]


FORMS: dict[str, Callable[[list[float]], float]] = {
    "sequence": lambda d: math.exp(min(max(sum(d), -20.0), 20.0)),
    "geometric": lambda d: math.exp(sum(d) / len(d)),
    "k3": lambda d: sum(math.exp(x) - 1 - x for x in d) / len(d),
}


def correction(batch, old: Array, rollout: Array, config) -> tuple[Array, NDArray[np.bool_]]:
    """Weights and what is left of the mask; the configuration's own description, in loops."""
    out, kept, applied = np.ones(len(batch.mask)), np.array(batch.mask, dtype=bool), []
    for own, d in zip(tokens(batch), log_rho(batch, old, rollout), strict=True):
        for t, x in zip(own, d, strict=True):
            if config.weight != "none":
                w = FORMS.get(config.weight, lambda _, x=x: math.exp(x))(d)
                if not config.weight_min <= w <= config.weight_max:
                    bound = min(max(w, config.weight_min), config.weight_max)
                    w = bound if config.outside == "truncate" else 0.0
                out[t] = w
                applied.append(w)
            if config.reject != "none":
                measure = FORMS.get(config.reject, lambda _, x=x: math.exp(x))(d)
                kept[t] &= config.reject_min <= measure <= config.reject_max
            kept[t] &= all(math.exp(y) >= config.veto for y in d)
    if config.normalize and sum(applied) > 0:
        mean = sum(applied) / len(applied)
        out = np.where(batch.mask, out / mean, 1.0)
    return out, kept
