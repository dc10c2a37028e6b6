"""Opens the safetensors files of a Hugging Face folder: all tensors by name, none read.

A folder has one file, or an index that says which tensor is in which. Files may be links, as in
the cache of huggingface_hub.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rltrain.config.bounded_files import MOST_OF_TABLES, load_json
from rltrain.weights.architecture.quantization_config import Quantization, quantization
from rltrain.weights.huggingface.quantized import (
    MXFP4_BLOCK,
    BlockFP8Tensor,
    MXFP4Tensor,
    SliceReader,
    quantized_suffixes,
    scale_shape,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GIT_LFS = b"version https://git-lfs"
"""How the small file begins that stands for a large one in a repository."""
_PLAIN = {"F32", "F16", "BF16"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, and the file that holds it or its values."""

    file: Path
    data: SliceReader


def open_folder(path: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name. Quantised tensors read as plain ones.

    Raises:
        ValueError: naming file and tensor, when files are missing, cut off or contradict their
            index, or when tensors are stored in a way that ``config.json`` does not declare.
    """
    folder = Path(path).expanduser()
    stored = stored_quantization(folder)
    tensors = _open_files(folder)
    if stored is not None:
        tensors = _joined(tensors, stored)
    for name, tensor in tensors.items():
        if (dtype := tensor.data.get_dtype()) not in _PLAIN:
            raise ValueError(f"{tensor.file}: {name} is {dtype}; {_remedy(dtype, stored)} [RL3009]")
    return tensors


def stored_quantization(folder: Path) -> Quantization | None:
    """The storage format of the weights, from the folder's ``config.json``."""
    file = folder / "config.json"
    return quantization(load_json(file), str(file)) if file.is_file() else None


def _remedy(dtype: str, stored: Quantization | None) -> str:
    wanted = f"only {', '.join(sorted(_PLAIN))} are read as they are"
    if stored is None:
        return f"{wanted}, and config.json declares no quantization_config"
    first, second = quantized_suffixes(stored)
    return (
        f"{wanted}. By quantization_config in config.json a quantised tensor is stored as "
        f"NAME{first} and NAME{second}, and here one of the two is missing"
    )


def _joined(tensors: Mapping[str, StoredTensor], stored: Quantization) -> dict[str, StoredTensor]:
    """The two halves of each quantised tensor joined. A half without the other is kept."""
    joined = dict(tensors)
    first, second = quantized_suffixes(stored)
    for name in tensors:
        whole = name.removesuffix(second)
        if whole == name or whole + first not in tensors:
            continue
        values, scales = joined.pop(whole + first), joined.pop(name)
        join = _block_fp8 if first == "" else _mxfp4
        joined[whole] = StoredTensor(values.file, join(whole, values, scales))
    return joined


def _block_fp8(name: str, values: StoredTensor, scales: StoredTensor) -> SliceReader:
    shape = _shape(values, name, least=2)
    _expect(values, name, {"F8_E4M3"}, shape)
    _expect(scales, f"{name}_scale_inv", {"F32", "BF16", "F8_E8M0"}, scale_shape(shape))
    return BlockFP8Tensor(values.data, scales.data)


def _mxfp4(name: str, values: StoredTensor, scales: StoredTensor) -> SliceReader:
    groups = _shape(scales, f"{name}_scales", least=3)
    _expect(values, f"{name}_blocks", {"U8"}, (*groups, MXFP4_BLOCK // 2))
    _expect(scales, f"{name}_scales", {"U8"}, groups)
    return MXFP4Tensor(values.data, scales.data)


def _shape(tensor: StoredTensor, name: str, least: int) -> tuple[int, ...]:
    shape = tensor.data.get_shape()
    if len(shape) < least:
        raise ValueError(
            f"{tensor.file}: {name} has shape {shape}, expected a matrix"
            f"{' of each expert' if least > 2 else ''}: nothing else is quantized"
            " [RL3009]"
        )
    return tuple(shape)


def _expect(tensor: StoredTensor, name: str, dtypes: set[str], shape: tuple[int, ...]) -> None:
    shape_in_file, dtype = tensor.data.get_shape(), tensor.data.get_dtype()
    if dtype not in dtypes or tuple(shape_in_file) != shape:
        raise ValueError(
            f"{tensor.file}: {name} is {dtype} of shape {shape_in_file}; by quantization_config in "
            f"config.json it must be {' or '.join(sorted(dtypes))} of shape {list(shape)}"
            " [RL3009]"
        )


def _open_files(folder: Path) -> dict[str, StoredTensor]:
    declared = declared_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(declared.values())):
        handle = _open(file)
        for name in handle.keys():  # noqa: SIM118
            if name in tensors:
                raise ValueError(
                    f"{file}: {name} is in {tensors[name].file}, too, and only one of the two can "
                    "be meant: keep one"
                    " [RL3003]"
                )
            tensors[name] = StoredTensor(file, handle.get_slice(name))
    for name, file in declared.items():
        if name and (name not in tensors or tensors[name].file != file):
            raise ValueError(
                f"{folder / INDEX} says that {name} is in {file}, and it is not there [RL3003]"
            )
    return tensors


def declared_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index; a folder with a single file has no names here."""
    if (folder / SINGLE).is_file():
        return {"": folder / SINGLE}
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}: weights are read from safetensors only"
            " [RL3003]"
        )
    try:
        weight_map = load_json(index, MOST_OF_TABLES)["weight_map"]
        files = {str(name): Path(str(file)) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is not an index of safetensors files: {error!r} [RL3003]"
        ) from error
    for name, file in files.items():
        if file.is_absolute() or ".." in file.parts:
            raise ValueError(
                f"{index} says that {name} is in {file}, outside of the folder: a model is read "
                "from its own folder only"
                " [RL3003]"
            )
        if not (folder / file).is_file():
            raise ValueError(
                f"{folder / file} is missing; {index} says that it holds {name} [RL3003]"
            )
    return {name: folder / file for name, file in files.items()}


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(GIT_LFS)) == GIT_LFS
        what = "it is a pointer of Git LFS: git lfs pull" if is_pointer else "it may be truncated"
        raise ValueError(
            f"{file} is not a whole safetensors file ({error}): {what}; fetch it again [RL3003]"
        ) from error
