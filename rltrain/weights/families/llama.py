"""Llama 2, 3, 3.1 and 3.2: nothing but the usual dense decoder."""

from typing import Any

from rltrain.weights.architecture.config_json import Fields, decoder
from rltrain.weights.families.family import Family


def _read(fields: Fields) -> dict[str, Any]:
    fields.only("rope_interleaved", False)
    fields.ignore("is_llama_config")
    return decoder(fields, default_kv_heads=True, default_theta=1e4)


LLAMA = Family("llama", ("LlamaForCausalLM",), _read)
