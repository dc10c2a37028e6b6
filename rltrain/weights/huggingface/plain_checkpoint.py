"""Opens Megatron's ``torch_dist`` checkpoints without running code of theirs.

Three kinds of files in such a folder hold pickles, which can name any function and have it called:

    .metadata      torch opens it with `pickle`; here only the classes that torch writes are made
    common.pt      torch.load, which makes what `weights_only` allows
    *.distcp       tensors, which torch opens with `weights_only`, and objects, which it does not;
                   here every object is opened with `weights_only` first

A folder that names anything else is refused, and so is one with other files: whoever reads it may
know a way to open them.
"""

import os
import pickle
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from rltrain.config.bounded_files import load_json

METADATA, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
PLAIN = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.planner": {
        *("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    },
}
"""By module, what a ``.metadata`` may name beside dtypes. None of it does more than hold data."""


def read_metadata(folder: Path) -> Metadata:
    """The content of ``.metadata``.

    Raises:
        ValueError: it is not what torch writes, and could run code.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            found = _PlainUnpickler(file).load()
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder}: expected Megatron's torch_dist format, found no .metadata"
        ) from error
    except OSError:
        raise
    except Exception as error:  # a damaged or hostile pickle may raise anything
        _refuse(folder / METADATA, str(error), error)
    if not isinstance(found, Metadata):
        _refuse(folder / METADATA, f"it holds {type(found).__name__}, not Metadata")
    return found


def check_runs_no_code(folder: Path) -> None:
    """Raise ``ValueError`` if opening the checkpoint in ``folder`` with Megatron could run code."""
    for file in sorted(folder.iterdir()):
        if file.name not in (METADATA, COMMON, FORMAT) and file.suffix != ".distcp":
            _refuse(file, "it is no file of this format")
    metadata = read_metadata(folder)
    _check_format(folder / FORMAT)
    with (folder / COMMON).open("rb") as common:
        _open_plain(folder / COMMON, common)
    for key, file, data in _objects(folder, metadata):
        value = _open_plain(file, BytesIO(data))
        # Transformer Engine takes the elements of such a tensor for a pickle.
        if "_extra_state" in key and not all(map(_is_empty, _listed(value))):
            _refuse(file, f"{key} holds data, which Transformer Engine opens as a pickle")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise ValueError(f"it names {module}.{name}")


def _check_format(file: Path) -> None:
    expected = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    try:
        found = load_json(file)
        found = {name: found.get(name, expected[name]) for name in expected}
    except (OSError, ValueError, AttributeError) as error:
        _refuse(file, str(error), error)
    if found != expected:
        _refuse(file, f"expected {expected}, found {found}")


def _objects(folder: Path, metadata: Metadata) -> Iterator[tuple[str, Path, bytes]]:
    """Key, file and bytes of everything that is no tensor."""
    try:
        yield from _read_objects(folder, metadata)
    except (AttributeError, TypeError) as error:  # a pickle may lack fields, or have others in them
        _refuse(folder / METADATA, str(error), error)


def _read_objects(folder: Path, metadata: Metadata) -> Iterator[tuple[str, Path, bytes]]:
    for index, info in (metadata.storage_data or {}).items():
        path = PurePosixPath(info.relative_path)
        if len(path.parts) != 1 or path.suffix != ".distcp":
            _refuse(folder / METADATA, f"it names {path}, which is no file of this folder")
        if info.transform_descriptors:
            _refuse(folder / METADATA, f"{path} is transformed by {info.transform_descriptors}")
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            with (folder / path).open("rb") as file:
                end = os.fstat(file.fileno()).st_size
                if not 0 <= info.offset <= info.offset + info.length <= end:
                    _refuse(folder / path, f"{index.fqn} is outside of it")
                file.seek(info.offset)
                yield index.fqn, folder / path, file.read(info.length)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)


def _open_plain(path: Path, file: BinaryIO) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile pickle may raise anything
        _refuse(path, str(error).partition("\n")[0], error)


def _refuse(path: Path, why: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(
        f"{path}: expected plain data, as rltrain and Megatron write it, found what could run code "
        f"or is damaged: {why}. If you know who wrote it, set checkpoint.trust=true, or give "
        "rltrain export --trust [RL7008]"
    ) from cause
