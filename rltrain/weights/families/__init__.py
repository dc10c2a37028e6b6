"""The families of models that can be trained, one file each."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rltrain.config.error_codes import with_code
from rltrain.weights.architecture.config_json import Fields, read_json
from rltrain.weights.architecture.decoder import Architecture, FamilyName
from rltrain.weights.architecture.quantization_config import quantization
from rltrain.weights.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from rltrain.weights.families.family import Family
from rltrain.weights.families.glm import GLM4_MOE
from rltrain.weights.families.gpt_oss import GPT_OSS
from rltrain.weights.families.llama import LLAMA
from rltrain.weights.families.mixtral import MIXTRAL
from rltrain.weights.families.olmoe import OLMOE
from rltrain.weights.families.qwen2 import QWEN2, QWEN2_MOE
from rltrain.weights.families.qwen3 import QWEN3, QWEN3_MOE
from rltrain.weights.mapping.mtp import MTP, with_checkpoint_mtp
from rltrain.weights.mapping.parameters import ParameterSpec, expand_rules

FAMILIES: dict[FamilyName, Family] = {
    family.name: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        MIXTRAL,
        OLMOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GLM4_MOE,
        GPT_OSS,
    )
}
REFUSED = {
    "Qwen3NextForCausalLM": "Megatron's gated delta net takes no packed sequences, which every "
    "pass here is made of (megatron/core/ssm/gated_delta_net.py of megatron-core 0.16.1 raises "
    "NotImplementedError for them)",
}
"""Classes of transformers that are known and cannot be trained, and why."""
_CLASSES = {name: family for family in FAMILIES.values() for name in family.classes}


def read_architecture(path: str | Path, mtp: MTP = "hold") -> Architecture:
    """The architecture of the model in folder ``path``; ``ValueError`` when it is not supported.

    With ``mtp="skip"`` it has no layers that predict further tokens, whatever the folder has.
    """
    config, file = read_json(path)
    return with_checkpoint_mtp(architecture_from_config(config, str(file)), file.parent, mtp)


def architecture_from_config(config: Mapping[str, Any], where: str) -> Architecture:
    """As ``read_architecture``, from the parsed file; ``where`` stands in the errors."""
    family = _family(config, where)
    fields = Fields(config, where)
    settings = family.read(fields)
    fields.refuse_unread(family.name)
    quantization(config, where)  # not a part of the architecture, but readable it must be
    try:
        return Architecture(family=family.name, **settings)
    except ValueError as error:
        raise ValueError(with_code(f"{where}: {error}", "RL3002")) from error


def _family(config: Mapping[str, Any], where: str) -> Family:
    named = config.get("architectures") or []
    if len(named) == 1 and named[0] in REFUSED:
        raise ValueError(f"{where}: {named[0]} cannot be trained: {REFUSED[named[0]]} [RL3002]")
    if len(named) != 1 or named[0] not in _CLASSES:
        raise ValueError(
            f"{where}: architectures={named!r} is not supported; supported are "
            f"{', '.join(sorted(_CLASSES))}. docs/models.md says how to add a family"
            " [RL3002]"
        )
    return _CLASSES[named[0]]


@lru_cache(maxsize=8)
def model_parameters(arch: Architecture) -> tuple[ParameterSpec, ...]:
    """Every parameter and buffer of the model under its global Megatron name, in sending order."""
    parameters = expand_rules(FAMILIES[arch.family].rules(arch), arch)
    if arch.value_head:
        return parameters[:-1]
    if not arch.tie_embeddings:
        return parameters
    embedding, *_, head = parameters
    # A last pipeline stage of its own has an output layer, and it is the embedding once more.
    return (*parameters[:-1], replace(head, tensors=embedding.tensors, copy=True))
