"""The objective: advantages, loss, KL and what is done about mismatch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section

Positive = Annotated[int, Field(gt=0)]


class KLConfig(Section):
    """KL to the reference, a frozen copy of the policy."""

    coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL; 0 builds no reference model."""
    estimator: Literal["k1", "k2", "k3", "k3_k2"] = "k3"
    """``k3_k2`` has k3's value and k2's gradient, which is the gradient of the KL itself. A reward
    takes k1 alone, and the loss all but k1: the others have not the gradient of a KL
    (docs/algorithms.md)."""
    where: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken from the reward of every token."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Adapt ``coef`` after every step so that the KL stays near this (arXiv:1909.08593)."""
    horizon: Positive = 10_000
    """Responses over which an adaptive ``coef`` moves by its error, which is clipped to 0.2."""
    refresh_every: Annotated[int, Field(ge=0)] = 0
    """Steps after which the reference becomes a copy of the policy anew; 0 never does."""

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
                "estimator=k1 with where=loss has a gradient of 0 in expectation, which is noise "
                "and no pull to the reference: use k2 or k3_k2, whose gradient is that of "
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
    """What is done about rho = pi_old / pi_rollout, the mismatch of trainer and rollout engine."""

    weight: Literal["none", "token", "sequence", "geometric"] = "none"
    """Importance weight of the policy loss: rho of the token, its product over the sequence, or
    its geometric mean over the sequence."""
    weight_min: Annotated[float, Field(ge=0)] = 0.0
    weight_max: Annotated[float, Field(gt=0)] = 2.0
    outside: Literal["truncate", "mask"] = "truncate"
    """What a weight out of ``[weight_min, weight_max]`` becomes: the bound (TIS), or 0 (MIS,
    IcePop)."""
    normalize: bool = False
    """Divide the weights by their mean over the step's response tokens."""
    reject: Literal["none", "token", "sequence", "geometric", "k3"] = "none"
    """Take out of the loss what lies out of ``[reject_min, reject_max]``: tokens by rho, or whole
    sequences by their product, their geometric mean or their mean of rho - 1 - log rho."""
    reject_min: Annotated[float, Field(ge=0)] = 0.5
    reject_max: Annotated[float, Field(gt=0)] = 2.0
    veto: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A sequence with one rho below this leaves the loss whole; 0 vetoes none."""

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
    """Groups whose rewards are all equal teach nothing (DAPO, arXiv:2503.14476, section 3.2)."""

    max_rounds: Annotated[int, Field(ge=0)] = 0
    """Rounds of generation a step may take to find ``prompts_per_step`` groups that teach; where
    they do not suffice it trains on fewer, with a warning. 0 trains on all groups as they are."""


class OverlongConfig(Section):
    """Responses that are cut at, or come near, ``rollout.max_response_tokens``."""

    mask: bool = False
    """A response that was cut stays in its group's baseline and leaves the loss."""
    buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Over the last so many tokens before the limit the reward falls linearly by ``penalty`` (DAPO,
    arXiv:2503.14476, equation 13). 0 takes nothing."""
    penalty: Annotated[float, Field(gt=0)] = 1.0


class AlgorithmConfig(Section):
    type: Literal["rl", "sft"] = "rl"
    group_size: Positive = 16
    """G, responses sampled per prompt."""
    advantage: str = "grpo"
    """A name of `rltrain.algorithms.advantages`, or one's own as ``package.module.name``."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward per token that it lies ahead (gae, reinforce_pp)."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """GAE's lambda."""
    loss: str = "ppo"
    """A name of `rltrain.algorithms.losses`, or one's own as ``package.module.name``."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped below at 1 - this."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative the loss is at most this times its size
    (arXiv:1912.09729)."""
    bypass_old_logprobs: bool = False
    """Take the rollout's log-probabilities for the old ones, and save the pass that computes them.
    The importance ratio then spans the mismatch of engine and trainer, too."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"
    ] = "token_mean"
    """Of per-token losses over the mini-batch: their mean; the mean over sequences of their mean or
    sum; or their sum over sequences x ``rollout.max_response_tokens`` (Dr. GRPO)."""
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
            found = ", ".join(f"{name}={value}" for name, value in changed.items())
            raise ValueError(f"loss=pg would ignore {found}: drop it, or use a loss that clips")
        return self

    @model_validator(mode="after")
    def a_group_of_one_has_no_spread(self) -> Self:
        if self.dynamic_sampling.max_rounds and self.group_size < 2:
            raise ValueError(
                "dynamic_sampling looks for groups whose rewards differ, and group_size=1 has "
                "none: use 2 or more, or set dynamic_sampling.max_rounds=0"
            )
        return self
