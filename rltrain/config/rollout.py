"""The rollout engines and how they sample responses."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section

Positive = Annotated[int, Field(gt=0)]
Transport = Literal["ipc", "broadcast"]

OLDEST_VLLM = "0.26"
"""The first with routed experts, processed log-probabilities and the weight transfer API."""

# Engine options the trainer sets itself; setting them twice could contradict it in silence.
OWNED_ENGINE_ARGS = frozenset(
    {
        "model",
        "tokenizer",
        "dtype",
        "enable_return_routed_experts",
        "logprobs_mode",
        "weight_transfer_config",
        "worker_extension_cls",
        "seed",
        "max_model_len",
        "tensor_parallel_size",
        "enable_expert_parallel",
        "trust_remote_code",
        "generation_config",
        "quantization",
        "quantization_config",
        "load_format",
        "hf_overrides",
        "enable_sleep_mode",
    }
)

# Engine options with which tokens would be drawn from, or scored by, another distribution than the
# one the policy trains on. The log-probabilities that vLLM returns do not tell.
OTHER_DISTRIBUTIONS = {
    "logits_processors": "tokens would be drawn from logits the policy does not have",
    "override_generation_config": "its sampling defaults would not be those of rollout",
    "watermark_config": "a key and the tokens before would decide the next one, not chance",
    "diffusion_config": "tokens would not be drawn one after the other",
    "hf_config_path": "the engine would build another model than the policy",
    "model_class_overrides": "the engine would build another model than the policy",
    "worker_cls": "the engine could run any model and any sampler",
}


class RolloutConfig(Section):
    num_engines: Positive = 1
    tensor_parallel: Positive = 1
    expert_parallel: bool = False
    """Give each of the ``tensor_parallel`` ranks of an engine whole experts, instead of a slice of
    every expert. Only on GPUs."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    quantization: Literal["none", "fp8"] = "none"
    """``fp8`` keeps the matrices of the engine in FP8, in blocks of 128 x 128 with one scale each.
    The policy trains in its own precision. Every weight sync quantizes again and moves half the
    bytes. Embedding, output head, norms and routers keep ``dtype``. Only on GPUs."""
    head: Literal["auto", "fp32", "params"] = "auto"
    """Dtype of the output head's matrix product in the engine. ``policy.precision.head`` is that of
    the trainer. ``auto`` is fp32 if the installed vLLM supports it."""
    max_response_tokens: Positive = 4096
    stop: list[str] = Field(default_factory=list)
    """Strings that end a response, in training and in evaluation. The response ends with the token
    that completes the first of them. That token is in the loss. Reward functions get the text
    before the string."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Token ids that end a response, in addition to the end-of-sequence tokens of the model
    folder."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature. The minimum is 0.01: vLLM silently raises lower values to it."""
    deterministic: bool = False
    """Make two runs sample the same tokens, log-probabilities and routes. The engine gets the
    requests of a step as one batch, in a fixed order, with an empty prefix cache."""
    oversample: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Extra groups that a step starts, as a share of ``trainer.prompts_per_step``. The step trains
    on the groups that finish first and aborts the rest, so it does not wait for the slowest
    responses. This prefers short responses. Aborted prompts are skipped until the next epoch.
    Otherwise the slowest prompts would take the extra places of every step."""
    seeded: bool | None = None
    """Give every request its own seed, made from the seed of the run, step, prompt and sample.
    false: one seed per engine. null: true on CPUs and with ``deterministic``, else false. On GPUs
    seeded requests are slow, because vLLM samples them one after the other: 7 ms per token for 512
    requests, instead of 0.5 ms."""
    enforce_eager: bool | None = None
    """Run the engine without CUDA graphs. null: true only on CPUs. CUDA graphs make generation
    faster and the start of the engine about one minute longer."""
    weight_transfer: Literal["auto", Transport] = "auto"
    """Transport of the weights from policy to engines. ``ipc``: through the memory of the GPU that
    both use. ``broadcast``: from a rank of each pipeline stage to all engines, with NCCL on GPUs,
    with gloo and shared memory on CPUs. ``auto``: ipc if the engines
    share the GPUs of the policy, else broadcast."""
    update_in_flight: bool = False
    """Bring new weights into the engines in the midst of responses: requests are paused, and go on
    after it. Otherwise a weight sync waits for all responses. Needs ``trainer.max_staleness``
    (docs/asynchronous.md)."""
    kv_cache_on_update: Literal["keep", "recompute"] = "keep"
    """With ``update_in_flight``: what paused requests go on with. ``keep``: the KV cache that they
    have. ``recompute``: a new one, of all their tokens by the new weights, which costs a prefill of
    every running request. Routes and log-probabilities stay those that tokens were sampled with."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.9
    kv_cache_gib: Positive = 1
    """Memory of the KV cache in GiB. Only on CPUs."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of vLLM's AsyncEngineArgs."""

    @model_validator(mode="after")
    def stop_strings_can_appear(self) -> Self:
        """A lone surrogate is in no text, and U+FFFD stands for bytes that are no text yet."""
        for stop in self.stop:
            if not stop or re.search("[\ud800-\udfff\ufffd]", stop):
                raise ValueError(
                    f"stop={self.stop}: {stop!r} is in no text: expected strings of one character "
                    "or more, without surrogates and U+FFFD"
                )
        return self

    @model_validator(mode="after")
    def stop_strings_differ(self) -> Self:
        if len(set(self.stop)) < len(self.stop):
            raise ValueError(f"stop={self.stop}: a string stands there twice; leave one out")
        return self

    @model_validator(mode="after")
    def what_finishes_first_is_not_deterministic(self) -> Self:
        if self.oversample and self.deterministic:
            raise ValueError(
                f"oversample={self.oversample:g} keeps the groups that finish first, and two runs "
                "need not agree which these are: use oversample=0, or deterministic=false"
            )
        return self

    @model_validator(mode="after")
    def engine_args_leave_the_distribution_alone(self) -> Self:
        for name, why in OTHER_DISTRIBUTIONS.items():
            if self.engine_args.get(name):
                raise ValueError(
                    f"engine_args.{name}: {why}, and the importance ratio would not know: leave it "
                    "out"
                    " [RL1013]"
                )
        return self

    @model_validator(mode="after")
    def an_update_in_flight_has_no_fixed_place(self) -> Self:
        if self.update_in_flight and self.deterministic:
            raise ValueError(
                "update_in_flight=true: two runs need not agree at which token the weights change: "
                "use update_in_flight=false, or deterministic=false"
            )
        if self.kv_cache_on_update == "recompute" and not self.update_in_flight:
            raise ValueError(
                "kv_cache_on_update=recompute: with update_in_flight=false no request lives "
                "through a weight update: set update_in_flight=true, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def deterministic_requests_have_seeds(self) -> Self:
        if self.deterministic and self.seeded is False:
            raise ValueError(
                "deterministic=true: two runs sample the same only where every request has a seed; "
                "leave seeded out"
            )
        return self

    @model_validator(mode="after")
    def drafts_are_accepted_by_the_policys_odds(self) -> Self:
        """Rejection sampling makes speculative decoding exact; vLLM can also accept at a rate."""
        speculative = self.engine_args.get("speculative_config") or {}
        if speculative.get("rejection_sample_method") == "synthetic":
            raise ValueError(
                "engine_args.speculative_config.rejection_sample_method=synthetic accepts drafts "
                "whatever the policy gives them, and the importance ratio would not know: leave it "
                "out"
                " [RL1013]"
            )
        return self

    @model_validator(mode="after")
    def experts_are_shared_out_over_ranks(self) -> Self:
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "expert_parallel=true shares the experts out over tensor_parallel ranks, found 1: "
                "raise it, or leave expert_parallel out"
            )
        return self

    @model_validator(mode="after")
    def an_engine_has_one_copy_of_the_weights(self) -> Self:
        """vLLM calls all data-parallel ranks and returns what the first one answers
        (``DPLBAsyncMPClient.call_utility_async``)."""
        copies = self.engine_args.get("data_parallel_size") or 1
        if copies > 1:
            raise ValueError(
                f"engine_args.data_parallel_size={copies}: vLLM would answer for the first of its "
                "data-parallel ranks alone, so that nothing could tell whether weights reached "
                "the others, and would spread requests by load: use num_engines"
                " [RL1013]"
            )
        return self

    @model_validator(mode="after")
    def fp8_weights_multiply_in_bf16(self) -> Self:
        if self.quantization == "fp8" and self.dtype != "bfloat16":
            raise ValueError(
                f"quantization=fp8: vLLM multiplies FP8 weights in bf16 only, found dtype="
                f"{self.dtype}: use dtype=bfloat16, or quantization=none"
            )
        return self

    @model_validator(mode="after")
    def engine_args_leave_our_own_alone(self) -> Self:
        if owned := sorted(OWNED_ENGINE_ARGS & self.engine_args.keys()):
            raise ValueError(
                f"engine_args may not set {owned}: the trainer sets them from its own keys [RL1013]"
            )
        return self
