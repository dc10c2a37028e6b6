"""The objective: advantages, loss, KL, and the correction of train-inference mismatch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section

Positive = Annotated[int, Field(gt=0)]


class KLConfig(Section):
    """KL to the reference model, a frozen copy of the policy."""

    coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL. With 0 no reference model is built."""
    estimator: Literal["k1", "k2", "k3", "k3_k2"] = "k3"
    """Estimator of the KL. ``k3_k2`` has the value of k3 and the gradient of k2, which is the
    gradient of the KL itself. With ``where=reward`` use k1. With ``where=loss`` use any but k1.
    Other combinations do not have the gradient of a KL and are rejected (docs/algorithms.md)."""
    where: Literal["loss", "reward"] = "loss"
    """``loss`` adds the KL to the loss. ``reward`` subtracts it from the reward of every token."""
    target: Annotated[float, Field(gt=0)] | None = None
    """If set, ``coef`` is adapted after every step so that the KL stays near this value
    (arXiv:1909.08593)."""
    horizon: Positive = 10_000
    """Only with ``target``: responses over which ``coef`` changes by the relative error of the KL.
    The error is clipped to [-0.2, 0.2]."""
    refresh_every: Annotated[int, Field(ge=0)] = 0
    """The reference model is replaced by a copy of the policy every so many steps. 0: never."""

    @model_validator(mode="after")
    def a_reference_is_built_for_its_options(self) -> Self:
        if self.coef == 0 and (self.target is not None or self.refresh_every):
            raise ValueError(
                "coef=0 builds no reference: set algorithm.kl.coef above 0, or drop target and "
                "refresh_every"
            )
        return self

    @model_validator(mode="after")
    def its_gradient_is_that_of_a_kl(self) -> Self:
        if self.coef == 0:
            return self
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator=k1 with where=loss has a gradient of 0 in expectation, so it does not "
                "pull the policy to the reference: use k2 or k3_k2, whose gradient is that of "
                "KL(policy || reference), or where=reward"
            )
        if self.where == "reward" and self.estimator != "k1":
            raise ValueError(
                f"estimator={self.estimator} with where=reward is large on both sides of the "
                "reference, so it takes probability from tokens that are too improbable already: "
                "use k1, whose gradient there is that of KL(policy || reference), or where=loss"
            )
        return self


class CorrectionConfig(Section):
    """Correction of the mismatch between trainer and rollout engine, rho = pi_old / pi_rollout."""

    weight: Literal["none", "token", "sequence", "geometric"] = "none"
    """Importance weight of the policy loss. ``token``: rho of the token. ``sequence``: the product
    of rho over the sequence. ``geometric``: the geometric mean of rho over the sequence."""
    weight_min: Annotated[float, Field(ge=0)] = 0.0
    weight_max: Annotated[float, Field(gt=0)] = 2.0
    outside: Literal["truncate", "mask"] = "truncate"
    """What happens to a weight outside ``[weight_min, weight_max]``. ``truncate`` sets it to the
    nearest bound (TIS). ``mask`` sets it to 0 (MIS, IcePop)."""
    normalize: bool = False
    """Divide the weights by their mean over the response tokens of the step."""
    reject: Literal["none", "token", "sequence", "geometric", "k3"] = "none"
    """Remove from the loss what lies outside ``[reject_min, reject_max]``. ``token`` removes tokens
    by rho. The others remove whole sequences: ``sequence`` by the product of rho, ``geometric`` by
    its geometric mean, ``k3`` by the mean of rho - 1 - log rho."""
    reject_min: Annotated[float, Field(ge=0)] = 0.5
    reject_max: Annotated[float, Field(gt=0)] = 2.0
    veto: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Remove a whole sequence from the loss if rho of any of its tokens is below this. 0: remove
    none."""

    @property
    def active(self) -> bool:
        return self.weight != "none" or self.reject != "none" or self.veto > 0

    @model_validator(mode="after")
    def bounds_are_in_order(self) -> Self:
        for name, low, high in (
            ("weight", self.weight_min, self.weight_max),
            ("reject", self.reject_min, self.reject_max),
        ):
            if low >= high:
                raise ValueError(f"{name}_min={low} is not below {name}_max={high}")
        return self

    @model_validator(mode="after")
    def k3_has_no_lower_bound(self) -> Self:
        if self.reject == "k3" and self.reject_min > 0:
            raise ValueError(
                f"reject=k3 with reject_min={self.reject_min} takes out every sequence on which "
                "trainer and engine agree, for its k3 is 0: set reject_min=0 and reject_max to the "
                "largest k3 to train on"
            )
        return self


class DynamicSamplingConfig(Section):
    """Leaves out groups whose rewards are all equal, because their advantages are 0 (DAPO,
    arXiv:2503.14476, section 3.2)."""

    max_rounds: Annotated[int, Field(ge=0)] = 0
    """Maximum rounds of generation per step to find ``prompts_per_step`` groups whose rewards
    differ. If they do not suffice, the step trains on fewer groups and warns. 0 turns dynamic
    sampling off: the step trains on all groups."""


class OverlongConfig(Section):
    """Responses that reach, or nearly reach, ``rollout.max_response_tokens``."""

    mask: bool = False
    """Remove truncated responses from the loss. They still count in the baseline of their group."""
    buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """In the last ``buffer_tokens`` tokens before the length limit, the reward decreases linearly,
    by ``penalty`` in total (DAPO, arXiv:2503.14476, equation 13). 0: no penalty."""
    penalty: Annotated[float, Field(gt=0)] = 1.0


class AlgorithmConfig(Section):
    type: Literal["rl", "sft"] = "rl"
    group_size: Positive = 16
    """Responses sampled per prompt (G)."""
    advantage: str = "grpo"
    """Advantage estimator: a name from `rltrain.algorithms.advantages`, or your own as
    ``package.module.name``."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of rewards per token (gae, reinforce_pp)."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of GAE."""
    loss: str = "ppo"
    """Policy loss: a name from `rltrain.algorithms.losses`, or your own as
    ``package.module.name``."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower clip range: the importance ratio is clipped at 1 - ``clip_low``."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Upper clip range: the importance ratio is clipped at 1 + ``clip_high``."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative, the loss is at most ``dual_clip`` times the size of the
    advantage (arXiv:1912.09729)."""
    bypass_old_logprobs: bool = False
    """Use the log-probabilities of the rollout as the old ones, and skip the pass that recomputes
    them. The importance ratio then also contains the mismatch between engine and trainer."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"
    ] = "token_mean"
    """How per-token losses of a mini-batch are aggregated. ``token_mean``: mean over all tokens.
    ``sequence_mean_token_mean`` and ``sequence_mean_token_sum``: mean over sequences of the mean or
    sum over their tokens. ``constant``: sum divided by sequences x ``rollout.max_response_tokens``
    (Dr. GRPO)."""
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    overlong: OverlongConfig = OverlongConfig()

    @model_validator(mode="after")
    def correction_needs_the_pass_that_measures(self) -> Self:
        if self.bypass_old_logprobs and self.correction.active:
            raise ValueError(
                "bypass_old_logprobs=true leaves out the pass whose log-probabilities "
                "algorithm.correction compares with the rollout's; the ratio of the loss spans the "
                "mismatch then. Recompute them, or drop the correction"
            )
        return self

    @model_validator(mode="after")
    def only_ppo_has_a_dual_clip(self) -> Self:
        if self.dual_clip is not None and self.loss in ("gspo", "cispo", "pg"):
            raise ValueError(
                f"loss={self.loss} would ignore dual_clip={self.dual_clip}: drop it, or use "
                "loss=ppo"
            )
        return self

    @model_validator(mode="after")
    def plain_policy_gradient_clips_nothing(self) -> Self:
        fields = AlgorithmConfig.model_fields
        changed = {
            name: value
            for name, value in (("clip_low", self.clip_low), ("clip_high", self.clip_high))
            if value != fields[name].default
        }
        if self.loss == "pg" and changed:
            named = ", ".join(f"{name}={value}" for name, value in changed.items())
            raise ValueError(f"loss=pg would ignore {named}: drop it, or use a loss that clips")
        return self

    @model_validator(mode="after")
    def a_group_of_one_has_no_spread(self) -> Self:
        if self.dynamic_sampling.max_rounds and self.group_size < 2:
            raise ValueError(
                "dynamic_sampling looks for groups whose rewards differ, and group_size=1 has "
                "none: use 2 or more, or set dynamic_sampling.max_rounds=0"
            )
        return self
