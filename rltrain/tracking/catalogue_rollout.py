"""Metrics of rollout, routing and mismatch: formula, denominator and unit of each."""

from functools import partial

from rltrain.tracking.catalogue_metric import (
    COMPARED,
    CORRECTED,
    CORRECTED_SEQUENCES,
    RESPONSE_TOKENS,
    ROWS,
    SEQUENCES,
    Metric,
    When,
)


def _mismatch(area: str, whose: str, when: When) -> tuple[Metric, ...]:
    """The mismatch metrics under ``area``; rho = exp(d)."""

    metric = partial(Metric, section="mismatch", when=when, unit="nat", better="lower")
    tokens, sequences = f"{RESPONSE_TOKENS}, {whose}", f"{COMPARED}, {whose}"
    ratio = partial(metric, unit="1", better="neither")
    return (
        metric(
            f"{area}/k1", "E[-d]: KL(rollout || train), can be negative", tokens, better="neither"
        ),
        metric(f"{area}/k3", "E[exp(d) - d - 1]: the same KL, never negative", tokens),
        metric(
            f"{area}/reverse_k3",
            "E[exp(-d) + d - 1]: k3 with the policies exchanged; one token that the trainer finds "
            "improbable rules it",
            tokens,
        ),
        metric(
            f"{area}/js",
            "E[rho d - (1 + rho) log((1 + rho) / 2)] / 2: the Jensen-Shannon divergence",
            tokens,
        ),
        metric(f"{area}/abs_diff_mean", "E[|d|]", tokens),
        metric(f"{area}/abs_diff_std", "standard deviation of |d|", tokens),
        metric(f"{area}/abs_diff_p99", "the smallest |d| that 99 % do not exceed", tokens),
        metric(f"{area}/abs_diff_max", "max |d|", "-"),
        metric(f"{area}/abs_diff_median_flipped", "median |d|", "flipped tokens", when="sampled"),
        metric(f"{area}/mult_prob_error", "E[exp(|d|)]; 1 is no error", tokens, unit="1"),
        ratio(f"{area}/rho_mean", "E[rho]; 1 where the mismatch has no bias", tokens),
        metric(f"{area}/chi2_token", "E[rho^2] - 1", tokens, unit="1"),
        metric(
            f"{area}/chi2_sequence",
            "E[(product of rho)^2] - 1, the log of the product clamped",
            sequences,
            unit="1",
        ),
        metric(f"{area}/prob_diff_mean", "E[|pi_train - pi_rollout|]", tokens, unit="1"),
        metric(f"{area}/prob_diff_std", "standard deviation of the same", tokens, unit="1"),
        metric(f"{area}/prob_diff_max", "max |pi_train - pi_rollout|", "-", unit="1"),
        metric(
            f"{area}/prob_correlation",
            "Pearson's correlation of pi_train and pi_rollout; left out where either is constant",
            tokens,
            unit="1",
            better="higher",
        ),
        ratio(f"{area}/ppl", "E[exp(-mean of log pi_train over the response)]", sequences),
        ratio(f"{area}/rollout_ppl", "E[exp(-mean of log pi_rollout)]", sequences),
        ratio(f"{area}/log_ppl", "E[-mean of log pi_train]", sequences, unit="nat"),
        ratio(f"{area}/rollout_log_ppl", "E[-mean of log pi_rollout]", sequences, unit="nat"),
        ratio(f"{area}/ppl_ratio", "E[exp(-mean of d)]", sequences),
        ratio(f"{area}/log_ppl_diff_mean", "E[-mean of d]", sequences, unit="nat"),
        metric(f"{area}/log_ppl_diff_abs_mean", "E[|mean of d|]", sequences),
        ratio(f"{area}/log_ppl_diff_max", "max of -mean of d", "-", unit="nat"),
        ratio(f"{area}/log_ppl_diff_min", "min of -mean of d", "-", unit="nat"),
        ratio(f"{area}/worst_sequence", "the response of the batch of largest mean |d|", "-"),
        metric(f"{area}/worst_sequence_abs_diff", "its mean |d|", "its response tokens"),
        ratio(f"{area}/num_tokens", "response tokens", "-", unit="tokens"),
        ratio(f"{area}/num_flipped", "flipped response tokens", "-", unit="tokens", when="sampled"),
    )


_correction = partial(Metric, section="mismatch")


def _spread(name: str, quantity: str, denominator: str) -> tuple[Metric, ...]:
    return (
        _correction(f"{name}_mean", f"mean {quantity}", denominator),
        _correction(f"{name}_std", f"standard deviation of the {quantity}", denominator),
        _correction(f"{name}_min", f"smallest {quantity}", "-"),
        _correction(f"{name}_max", f"largest {quantity}", "-"),
    )


CORRECTION = (
    *_spread("correction/weight", "weight w of a token in the policy loss", CORRECTED),
    *_spread(
        "correction/sequence_weight", "mean of w over a response's tokens", CORRECTED_SEQUENCES
    ),
    _correction(
        "correction/sequence_weight_max_deviation", "max |mean of w over a response - 1|", "-"
    ),
    _correction(
        "correction/fraction_low", "weights below correction.weight_min before bounds", CORRECTED
    ),
    _correction(
        "correction/fraction_high", "weights above correction.weight_max before bounds", CORRECTED
    ),
    _correction("correction/normalization", "mean weight that all were divided by", CORRECTED),
    _correction(
        "correction/effective_sample_size",
        "E[w]^2 / E[w^2]: 1 where all are equal, 0 where all are 0",
        CORRECTED,
        better="higher",
    ),
    _correction("correction/reject_token_fraction", "rejected tokens", CORRECTED),
    _correction(
        "correction/reject_sequence_fraction",
        "responses with a rejected token",
        CORRECTED_SEQUENCES,
    ),
    _correction(
        "correction/veto_token_fraction", "tokens whose rho is below correction.veto", CORRECTED
    ),
    _correction(
        "correction/veto_sequence_fraction", "responses with such a token", CORRECTED_SEQUENCES
    ),
)

MISMATCH = (
    *_mismatch("mismatch", "scored as trained", "step"),
    Metric(
        "mismatch/k3/age_{age}",
        "mismatch/k3 of the tokens whose weights the policy is so many steps ahead of; with "
        "trainer.max_staleness",
        "response tokens of that age",
        "nat",
        section="mismatch",
        better="lower",
    ),
    *_mismatch("mismatch_native", "the same batch scored with native routing", "sampled"),
    *CORRECTION,
)


_routing = partial(Metric, section="routing")
ROUTING = (
    _routing(
        "routing/coverage",
        "rows with a captured route; 1.0 when nothing was lost",
        "sum over samples of (tokens - 1)",
        better="higher",
    ),
    _routing(
        "routing/fallback_fraction",
        "rows of a replayed rollout without a usable route",
        "sum over samples of (tokens - 1)",
        better="lower",
    ),
    _routing(
        "routing/fallback_dropped_fraction",
        "loss tokens taken out because routes before them are missing",
        "loss tokens before that",
        better="lower",
    ),
    _routing(
        "routing/overlap",
        "|native top-k and captured top-k| / K",
        ROWS,
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/overlap_min", "smallest overlap of a layer", "-", when="sampled", better="higher"
    ),
    _routing(
        "routing/overlap/layer_{layer}",
        "the overlap of one layer, by global layer number",
        "captured rows",
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/flipped_token_fraction",
        "mismatch/num_flipped / mismatch/num_tokens",
        RESPONSE_TOKENS,
        when="sampled",
    ),
    _routing(
        "routing/overlap/part_{part}",
        "the overlap in one quarter of every sequence, counted from 0",
        "captured rows there",
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/gate_mass",
        "gate weight of the experts used over that of the native choice",
        ROWS,
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/gate_mass/layer_{layer}",
        "the gate mass of one layer, by global layer number",
        "captured rows",
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/wide_flip_fraction",
        "rows with an expert further below the trainer's own choice than rounding moves it",
        "judged rows x layers",
        when="sampled",
        better="lower",
    ),
    _routing(
        "routing/wide_flip_fraction/layer_{layer}",
        "the same of one layer, by global layer number",
        "judged rows",
        when="sampled",
        better="lower",
    ),
    _routing(
        "routing/flip_noise/layer_{layer}",
        "scale of the difference between engine and trainer, in the router's logits, from narrow "
        "flips; left out where too few rows were judged",
        "experts next to the native choice",
        when="sampled",
    ),
    _routing(
        "routing/judged_fraction",
        "rows whose sequence has a captured route in every row so far",
        "captured rows",
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/load_max",
        "max over layers and experts of share * E - 1, of the rollout's routes",
        "captured response rows of a layer",
        when="sampled",
        better="lower",
    ),
    _routing(
        "routing/load_max/layer_{layer}",
        "the same of one layer, by global layer number",
        "captured response rows",
        when="sampled",
        better="lower",
    ),
    _routing(
        "routing/load_min",
        "min over layers and experts of share * E - 1; -1 is an expert that nobody uses",
        "captured response rows of a layer",
        when="sampled",
    ),
    _routing(
        "routing/load_mean",
        "E[|share * E - 1|]",
        "experts x layers",
        when="sampled",
        better="lower",
    ),
    _routing(
        "routing/differing_row_fraction",
        "rows that native routing would send elsewhere in some layer",
        "captured rows",
        when="sampled",
    ),
    _routing(
        "routing/first_differing_layer",
        "the lowest layer in which a row differs, by global layer number",
        "differing rows",
        when="sampled",
    ),
    _routing(
        "routing/older_fraction",
        "rows whose routes were not replayed, since their weights are older than "
        "routing_replay.max_age",
        "captured rows",
    ),
    _routing(
        "routing/replaced_fraction",
        "experts of the rollout that were not replayed, since their gate is below "
        "routing_replay.min_gate_ratio",
        "captured rows x layers x K",
    ),
    _routing("routing/padded_fraction", "padding rows of an update", "rows that routers see"),
    _routing("routing/bytes_per_token", "bytes of captured routes", "captured rows", "B"),
    _routing("routing/host_bytes", "bytes of the step's routes in the object store", "-", "B"),
    _routing(
        "routing/bytes_between_nodes",
        "bytes of the objects that policy ranks read from stores of other nodes, each counted once "
        "for a node however many of its ranks read it; 0 where all is on one node",
        "-",
        "B",
        better="lower",
    ),
)


_rollout = partial(Metric, section="rollout")
ROLLOUT = (
    _rollout("rollout/response_length_mean", "mean response length", SEQUENCES, "tokens"),
    _rollout("rollout/response_length_max", "longest response", "-", "tokens"),
    _rollout("rollout/truncated_fraction", "responses cut at the limit", SEQUENCES, better="lower"),
    _rollout(
        "rollout/aborted_groups",
        "groups that were begun and given up, with rollout.oversample",
        "-",
        "groups",
    ),
    _rollout(
        "rollout/staleness",
        "mean age of the weights that sampled a token: how many steps the policy is ahead of them",
        "response tokens",
        "steps",
    ),
    _rollout("rollout/staleness_max", "the same of the oldest token", "-", "steps"),
    _rollout(
        "rollout/batches_ready",
        "batches of later steps that were finished when the step's own was taken; with "
        "trainer.max_staleness",
        "-",
        "batches",
    ),
    _rollout(
        "rollout/generate_seconds",
        "from the first request of the step's batch to its last response",
        "-",
        "s",
    ),
    _rollout(
        "rollout/engines_busy_fraction",
        "of the time since the step before took its batch, that in which an engine had requests of "
        "some batch",
        "-",
        better="higher",
    ),
    _rollout(
        "rollout/engine_restarts",
        "engines that died or hung and were started again alone, since the start of the run or "
        "its last resume",
        "-",
        "engines",
        better="lower",
    ),
    _rollout("rollout/num_tokens", "prompt and response tokens sampled", "-", "tokens"),
    _rollout("rollout/num_response_tokens", "response tokens sampled", "-", "tokens"),
    _rollout("rollout/weight_version", "smallest weight version among the rollouts", "-", "syncs"),
)
