"""What a folder may say of how its weights are stored, and what is refused by name."""

import json
from typing import Any

import pytest
from transformers import FineGrainedFP8Config, Mxfp4Config

from rltrain.weights.architecture.quantization_config import MXFP4, BlockFP8, quantization

# As DeepSeek-V3 and Kimi-K2, Qwen3's FP8 models and gpt-oss are published.
DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
QWEN = {**DEEPSEEK, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}
GPT_OSS = {
    "modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"],
    "quant_method": "mxfp4",
}


def read(found: Any) -> Any:
    return quantization({"quantization_config": found}, "folder/config.json")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, None),
        (DEEPSEEK, BlockFP8()),
        (DEEPSEEK | {"scale_fmt": "ue8m0"}, BlockFP8()),
        (QWEN, BlockFP8()),
        (GPT_OSS, MXFP4()),
    ],
)
def test_published_formats(found: Any, expected: Any) -> None:
    assert read(found) == expected
    assert quantization({}, "") is None


def test_what_transformers_writes() -> None:
    for config, expected in (
        (FineGrainedFP8Config(weight_block_size=(128, 128)), BlockFP8()),
        (Mxfp4Config(), MXFP4()),
    ):
        assert read(json.loads(json.dumps(config.to_dict()))) == expected


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq'"),
        ({"quant_method": "awq"}, "quant_method='awq'"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'"),
        ({"quant_method": "compressed-tensors"}, "quant_method='compressed-tensors'"),
        ({"bits": 4}, "quant_method=None"),
        ({"quant_method": "fp8"}, "weight_block_size=None: expected [128, 128]"),
        (DEEPSEEK | {"weight_block_size": [64, 128]}, "weight_block_size=[64, 128]"),
        (DEEPSEEK | {"fmt": "e5m2"}, "fmt='e5m2': expected 'e4m3'"),
        (DEEPSEEK | {"activation_scheme": "static"}, "activation_scheme='static'"),
        (DEEPSEEK | {"rotation": "hadamard"}, "rotation='hadamard' is not known for fp8"),
        (GPT_OSS | {"weight_block_size": [128, 128]}, "weight_block_size=[128, 128] is not known"),
        ("fp8", "expected an object, found 'fp8'"),
    ],
)
def test_other_ways_are_refused_by_file_and_field(found: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        read(found)
    assert str(refused.value).startswith("folder/config.json: quantization_config")
    assert message in str(refused.value)


def test_the_older_name_of_compressed_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="compression_config"):
        quantization({"compression_config": {"format": "int-quantized"}}, "folder/config.json")
