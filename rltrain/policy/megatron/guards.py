"""Rejects options with which Megatron would replay routes wrongly, or not at all.

The reasons were read in megatron-core 0.16.1, in ``megatron/core/transformer/moe``. Fields that
only later versions have are checked, too; a version without such a field passes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.specifiers import SpecifierSet
from packaging.version import Version

TESTED_MEGATRON = ">=0.16.1,<0.17"
"""The versions in which ``get_replay_topk`` and every field below were read."""

_log = logging.getLogger(__name__)

_AUXILIARY = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_GRAPHS_BESIDE_THE_ROUTER = {"attn", "mlp", "mamba"}  # mlp is a dense layer's


@dataclass(frozen=True)
class Guard:
    field: str
    breaks: Callable[[Any], bool]
    """Whether the field of this configuration breaks replay."""
    why: str
    remedy: str = "leave it out"


def _balances_otherwise(config: Any) -> bool:
    return not set(_listed(config.moe_router_load_balancing_type)) <= {"none", *_AUXILIARY}


def _graphs_the_router(config: Any) -> bool:
    """An empty scope is the whole layer. ``enable_cuda_graph`` sets ``cuda_graph_impl``."""
    scope = {getattr(part, "name", part) for part in config.cuda_graph_scope}
    return config.cuda_graph_impl != "none" and not (scope and scope <= _GRAPHS_BESIDE_THE_ROUTER)


GUARDS = (
    Guard(
        "moe_router_fusion",
        lambda config: config.moe_router_fusion,
        "the fused router returns before it asks for a replayed choice",
    ),
    Guard(
        "moe_router_load_balancing_type",
        _balances_otherwise,
        "sinkhorn and quantile balancing choose experts without asking for a replayed choice",
        "choose none, or aux_loss, seq_aux_loss or global_aux_loss",
    ),
    Guard(
        "moe_expert_capacity_factor",
        lambda config: config.moe_expert_capacity_factor is not None,
        "a replayed expert that is over its capacity is dropped after the choice (with "
        "moe_pad_expert_input_to_capacity, one that is under it takes tokens not sent to it)",
    ),
    Guard(
        "moe_router_force_load_balancing",
        lambda config: config.moe_router_force_load_balancing,
        "it routes by random numbers, so the gate weights of replayed experts are noise",
    ),
    Guard(
        "moe_router_force_biased",
        lambda config: config.moe_router_force_biased is not None,
        "it routes by random numbers, so the gate weights of replayed experts are noise",
    ),
    Guard(
        "moe_input_jitter_eps",
        lambda config: config.moe_input_jitter_eps is not None,
        "it adds noise to the router's input in every pass, so gate weights differ between the "
        "log-probability pass and the update on the same routes",
    ),
    Guard(
        "cuda_graph_impl",
        _graphs_the_router,
        "a graph that holds the router (enable_cuda_graph and external_cuda_graph make one too) "
        "reads the routes that were in memory when it was captured, in every later pass",
        "leave CUDA graphs out, or give cuda_graph_scope=attn",
    ),
    Guard(
        "overlap_moe_expert_parallel_comm",
        lambda config: config.overlap_moe_expert_parallel_comm,
        "combined 1F1B runs parts of one micro-batch's forward pass between parts of another's "
        "backward pass, where a router cannot tell which micro-batch's routes to replay",
        "leave it out, and delay_wgrad_compute with it",
    ),
    Guard(
        "hybrid_context_parallel",
        lambda config: config.hybrid_context_parallel,
        "its schedule moves sequences between ranks, so routes would not match their tokens",
    ),
    # Megatron would update the bias from counts that include padding rows. A padding mask cannot be
    # passed: `_apply_expert_bias` (up to 0.19.2) combines [T, E] with [T], which raises, or masks
    # experts in place of tokens where T equals E. With a rate of 0 the counts have no effect.
    Guard(
        "moe_router_bias_update_rate",
        lambda config: config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate,
        "the expert bias would follow counts that include padding rows, and rollout engines would "
        "keep the old one",
        "leave it at 0, which freezes the bias",
    ),
)


def check_schedule(config: TransformerConfig) -> None:
    """Reject pipelines that confuse messages and so compute wrong gradients, replayed or not.

    Raises:
        ValueError: interleaved stages with batched sends. With two stages, both neighbours are the
            same rank, and it takes a forward message for a backward one.
    """
    chunks = config.virtual_pipeline_model_parallel_size or 1
    if chunks > 1 and config.batch_p2p_comm:
        raise ValueError(
            f"batch_p2p_comm=True with {chunks} model chunks a pipeline stage: Megatron confuses "
            "forward with backward messages and computes wrong gradients without an error. Use "
            "overlap_p2p_comm=True and batch_p2p_comm=False"
            " [RL1014]"
        )


def check_replay_options(config: TransformerConfig, megatron_version: str) -> None:
    """Reject options that break replay, and warn of losses that use native routing.

    Raises:
        ValueError: a field breaks replay; the message names all such fields, why and what to do. Or
            the Megatron version is not a tested one.
    """
    if Version(megatron_version) not in SpecifierSet(TESTED_MEGATRON, prereleases=True):
        raise ValueError(
            f"routing replay was tested with megatron-core{TESTED_MEGATRON}, found "
            f"{megatron_version}: pip install 'megatron-core{TESTED_MEGATRON}'"
            " [RL4006]"
        )
    problems = [
        f"policy.megatron_args.{guard.field}={getattr(config, guard.field)!r} cannot be replayed: "
        f"{guard.why}. Remedy: {guard.remedy} [RL1014]"
        for guard in GUARDS
        if hasattr(config, guard.field) and guard.breaks(config)
    ]
    if problems:
        raise ValueError("\n".join(problems))
    for name in native_losses(config):
        _log.warning(
            "%s is on: it is computed from native routing (not replayed), and the update is not "
            "invariant to micro-batching",
            name,
        )


def native_losses(config: TransformerConfig) -> list[str]:
    """Router losses that are on, as ``name=coefficient``. They use native routing."""
    kinds = _listed(config.moe_router_load_balancing_type)
    coefficients = _listed(config.moe_aux_loss_coeff)
    if len(coefficients) == 1:
        coefficients *= len(kinds)
    losses = [
        (kind, value)
        for kind, value in zip(kinds, coefficients, strict=True)
        if kind in _AUXILIARY and value
    ]
    if config.moe_z_loss_coeff:
        losses.append(("moe_z_loss", config.moe_z_loss_coeff))
    return [f"{name}={value}" for name, value in losses]


def check_armed(routers: Mapping[int, TopKRouter], expected_layers: Sequence[int]) -> None:
    """Check that exactly the expected layers have a router, and that each can replay.

    Args:
        routers: of one chunk, by 0-based global layer
        expected_layers: the chunk's layers that have experts, by the architecture

    Raises:
        RuntimeError: layers differ, or Megatron built a router without ``RouterReplay``.
    """
    if sorted(routers) != sorted(expected_layers):
        raise RuntimeError(
            f"expected routers in layers {sorted(expected_layers)} by the architecture, found them "
            f"in {sorted(routers)}: routes would reach other layers"
            " [RL5007]"
        )
    if bare := sorted(layer for layer, router in routers.items() if router.router_replay is None):
        raise RuntimeError(
            f"layers {bare}: Megatron built these routers without RouterReplay, so they would "
            "route natively; build the model with moe_enable_routing_replay=True"
            " [RL5007]"
        )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
