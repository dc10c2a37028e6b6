"""Mixtral: every layer has a router, and an expert's three matrices have names of their own."""

from functools import partial
from typing import Any

from rltrain.weights.architecture.config_json import Fields, decoder, experts
from rltrain.weights.families.family import Family
from rltrain.weights.mapping.rules import ModuleNames, usual_rules

_NAMES = ModuleNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def _read(fields: Fields) -> dict[str, Any]:
    shared = decoder(fields)
    fields.ignore("router_jitter_noise")  # noise for pre-training, in no rollout engine
    _no_acting_window(fields, shared["max_positions"])
    return {
        **shared,
        **experts(fields, "num_local_experts", "num_experts"),
        "expert_size": shared["ffn_size"],
        "norm_topk_prob": True,
        "moe_layers": tuple(range(shared["num_layers"])),
    }


def _no_acting_window(fields: Fields, max_positions: int) -> None:
    window = fields.get("sliding_window")
    if window is not None and window < max_positions:
        raise ValueError(
            f"{fields.where}: sliding_window={window} is less than "
            f"max_position_embeddings={max_positions} and would act, which is not supported"
            " [RL3002]"
        )


MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), _read, partial(usual_rules, names=_NAMES))
