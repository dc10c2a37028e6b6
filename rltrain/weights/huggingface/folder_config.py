"""Configuration and tokenizer of a Hugging Face folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from rltrain.config.bounded_files import load_json
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.huggingface.tensor_files import INDEX
from rltrain.weights.mapping.mtp import MTP_FIELDS
from rltrain.weights.sync.engine_fp8 import fp8_config

_COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}


def copy_config(
    source: Path, folder: Path, arch: Architecture, dtype: torch.dtype, *, fp8: bool = False
) -> None:
    """Copy configuration and tokenizer of ``source``, for weights of ``arch`` in ``dtype``."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _COPIED and file.name != INDEX:
            shutil.copy2(file, folder / file.name)
    source_config = load_json(source / "config.json")
    written = _config(source_config, arch, dtype, fp8=fp8)
    if written != source_config:
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def _config(
    source_config: dict[str, Any], arch: Architecture, dtype: torch.dtype, *, fp8: bool
) -> dict[str, Any]:
    """The source's config.json, changed to the dtype, format and MTP layers that are written."""
    written = {n: value for n, value in source_config.items() if n != "quantization_config"}
    key = "torch_dtype" if "torch_dtype" in source_config else "dtype"
    written[key] = str(dtype).removeprefix("torch.")
    for name in source_config.keys() & set(MTP_FIELDS):
        written[name] = arch.mtp_layers  # what was skipped is not in the exported folder
    if fp8:
        written["quantization_config"] = fp8_config(arch)
    return written
