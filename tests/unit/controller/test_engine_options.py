"""Options of vLLM and Megatron are known without importing them."""

import dataclasses

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from rltrain.config import Config
from rltrain.controller.checks.engine_options import (
    MEGATRON,
    VLLM,
    check_engine_options,
    declared_fields,
)


@pytest.mark.parametrize(
    ("place", "kind"), [(VLLM, AsyncEngineArgs), (MEGATRON, MLATransformerConfig)]
)
def test_the_fields_that_are_read_are_those_that_the_class_has(place, kind):
    assert set(declared_fields(*place)) == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rollout": {"engine_args": {"max_num_seq": 4}}},
            r"rollout\.engine_args\.max_num_seq: .* vLLM has no .* mean max_num_seqs\? \[RL1013\]",
        ),
        (
            {"policy": {"megatron_args": {"moe_router_topk_scale": 1.0}}},
            r"policy\.megatron_args\.moe_router_topk_scale: .* Megatron has no .* \[RL1014\]",
        ),
    ],
)
def test_an_option_that_is_not_there_is_named_before_an_engine_starts(values, message):
    check_engine_options(Config.model_validate({"rollout": {"engine_args": {"max_num_seqs": 4}}}))
    with pytest.raises(ValueError, match=message):
        check_engine_options(Config.model_validate(values))


def test_a_package_that_is_not_there_or_that_changed_is_not_judged():
    assert declared_fields("no_such_package", ["a.py"], ["A"]) == ()
    assert declared_fields("vllm", ["engine/arg_utils.py"], ["NoSuchClass"]) == ()
