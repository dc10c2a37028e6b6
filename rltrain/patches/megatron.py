"""Patches of errors in Megatron-core that every worker process needs, on CPU or GPU.

`rltrain.patches.megatron_cpu` has the ones for CPU workers.
"""

from typing import Any

import torch

from rltrain.patches.registry import Patch, apply
from rltrain.routing.expert_groups import BEST_OF_GROUP, score_groups, within_groups

MEGATRON = (("megatron-core",), "==0.16.1")
"""The package, and the version that the patches were read against."""


def _router_linear(original: Any) -> Any:
    def router_gating_linear(
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        router_dtype: torch.dtype,
    ) -> torch.Tensor:
        bias = None if bias is None else bias.to(router_dtype)
        return torch.nn.functional.linear(inp.to(router_dtype), weight.to(router_dtype), bias)

    return router_gating_linear


def _no_fp8(original: Any) -> Any:
    def __init__(self: Any, fp8: Any = False) -> None:
        original(self, fp8)
        self.fp8 = bool(fp8)

    return __init__


def _clone_step_tensors(original: Any) -> Any:
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    return load_state_dict


def _keep_step(original: Any) -> Any:
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        kept = {"step": state["step"]} if "step" in state else {}
        original(self, model_param, {**kept, **tensors})

    return _set_main_param_and_optimizer_states


class _GroupLimitedTopK:
    """Takes the place of a router's replay, and gives it the right group-limited top-k.

    Without a replay it is the top-k itself.
    """

    def __init__(self, best: int, replay: Any) -> None:
        self.best = best
        self.replay = replay

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, _: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.replay is None:
            return self._topk(scores, topk, num_groups, group_topk)
        replayed: tuple[torch.Tensor, torch.Tensor] = self.replay.get_replay_topk(
            scores, topk, num_groups, group_topk, self._topk
        )
        return replayed

    def _topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group_scores = score_groups(scores, num_groups, self.best)
        values, experts = within_groups(scores, group_scores, group_topk).topk(topk, dim=1)
        return values, experts


def _score_by_best(original: Any) -> Any:
    def topk_routing_with_score_function(
        logits: torch.Tensor,
        topk: int,
        *,
        group_topk: int | None = None,
        score_function: str = "softmax",
        router_replay: Any = None,
        **kwargs: Any,
    ) -> Any:
        if group_topk:
            router_replay = _GroupLimitedTopK(BEST_OF_GROUP[score_function], router_replay)
        return original(
            logits,
            topk,
            group_topk=group_topk,
            score_function=score_function,
            router_replay=router_replay,
            **kwargs,
        )

    return topk_routing_with_score_function


CHECKPOINT_WITHOUT_TE = Patch(
    *MEGATRON,
    "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
    ("self", "fp8"),
    "takes its default fp8=False for FP8, and FP8GlobalStateManager is an undefined name where "
    "Transformer Engine is not installed: recomputing layernorm or moe_act is a NameError",
    "CheckpointWithoutOutput tells False from None",
    _no_fp8,
)

ROUTER_WITHOUT_TE = Patch(
    *MEGATRON,
    "megatron.core.transformer.moe.router:router_gating_linear",
    ("inp", "weight", "bias", "router_dtype"),
    "te_general_gemm is an undefined name where Transformer Engine is not installed",
    "moe_utils defines te_general_gemm without Transformer Engine",
    _router_linear,
)

GROUPS = Patch(
    *MEGATRON,
    "megatron.core.transformer.moe.router:topk_routing_with_score_function",
    (
        "logits",
        "topk",
        "use_pre_softmax",
        "num_groups",
        "group_topk",
        "scaling_factor",
        "score_function",
        "expert_bias",
        "fused",
        "router_replay",
    ),
    "scores a group by its best topk // group_topk experts. DeepSeek-V2 scores it by the best one "
    "and V3 by the best two, whatever that quotient is (V2: 6 experts of 3 groups)",
    "the number of experts that score a group is an option",
    _score_by_best,
)

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
TORCH_ADAM_PATCHES = (
    Patch(
        *MEGATRON,
        f"{_OPTIMIZER}.load_state_dict",
        ("self", "state_dict"),
        "all states of torch's Adam share one step tensor after loading, which then counts every "
        "parameter as a step: wrong bias correction, no error",
        "load_state_dict makes a step tensor per state",
        _clone_step_tensors,
    ),
    Patch(
        *MEGATRON,
        f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
        ("self", "model_param", "tensors"),
        "it reads the step of torch's Adam from a checkpoint that keeps it elsewhere: KeyError",
        "keys that the checkpoint lacks are skipped",
        _keep_step,
    ),
)


def patch_megatron() -> None:
    """Apply the patches that every worker process needs. The first one imports Megatron."""
    # Imported here: actors import this module before they may load Megatron.
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        apply(ROUTER_WITHOUT_TE)
        apply(CHECKPOINT_WITHOUT_TE)
    for patch in (GROUPS, *TORCH_ADAM_PATCHES):
        apply(patch)
