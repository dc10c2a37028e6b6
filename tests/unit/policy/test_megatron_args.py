"""Every field of Megatron can be set, except those that rltrain sets itself."""

from typing import Any

import pytest

from rltrain.policy.megatron.megatron_args import ALWAYS_OURS, INSTEAD, MAY_CHANGE, megatron_config

OURS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "sequence_parallel": False,
    "calculate_per_token_loss": False,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}


def test_what_is_asked_for_reaches_megatron() -> None:
    config = megatron_config({"attention_softmax_in_fp32": True, "init_method_std": 0.5}, **OURS)
    assert config.attention_softmax_in_fp32 and config.init_method_std == 0.5
    assert config.hidden_size == 32


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"moe_router_fuson: .*did you mean moe_router_fusion\?"):
        megatron_config({"moe_router_fuson": True}, **OURS)
    with pytest.raises(ValueError, match=r"xyzzy: .*TransformerConfig"):
        megatron_config({"xyzzy": 1}, **OURS)
    with pytest.raises(ValueError, match="no such field"):
        megatron_config({"_cpu_offloading_context_": 1}, **OURS)


@pytest.mark.parametrize("value", [False, True])  # rltrain's own value is no reason to set it
def test_a_field_of_ours_is_refused_with_our_key(value: bool) -> None:
    with pytest.raises(ValueError, match=r"sequence_parallel: .*itself: set policy.parallel.tp"):
        megatron_config({"sequence_parallel": value}, **OURS)


def test_a_field_without_a_key_is_refused_too() -> None:
    """A loss that brings its own denominator is scaled wrongly under context parallelism."""
    with pytest.raises(ValueError, match=r"calculate_per_token_loss: .*leave it out"):
        megatron_config({"calculate_per_token_loss": True}, **OURS)


@pytest.mark.parametrize("name", sorted(ALWAYS_OURS))
def test_some_fields_are_ours_even_where_unset(name: str) -> None:
    ours = {key: value for key, value in OURS.items() if key != name}
    with pytest.raises(ValueError, match=rf"{name}: rltrain sets this field itself"):
        megatron_config({name: 2}, **ours)


def test_our_names_are_megatrons() -> None:
    config = megatron_config({}, **OURS)
    assert all(hasattr(config, name) for name in (*ALWAYS_OURS, *INSTEAD, *MAY_CHANGE))


def test_balancing_may_be_turned_on() -> None:
    asked = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    config = megatron_config(asked, **OURS)
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("aux_loss", 0.01)


def test_what_megatron_refuses_names_our_key() -> None:
    with pytest.raises(ValueError, match=r"policy.megatron_args=.*delay_wgrad_compute.*refuses"):
        megatron_config({"delay_wgrad_compute": True}, **OURS)
    with pytest.raises(ValueError, match=r"policy.megatron_args=.*distribute_saved.*refuses"):
        megatron_config(
            {"distribute_saved_activations": True}, **OURS | {"sequence_parallel": True}
        )


def test_our_own_mistakes_are_not_the_users() -> None:
    with pytest.raises(TypeError, match="no_such"):
        megatron_config({}, **OURS, no_such=1)
