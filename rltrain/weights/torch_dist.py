"""Megatron's distributed checkpoint format, ``torch_dist``, tensor by tensor in one process.

    common.pt          plain values, by torch.save
    metadata.json      which format this is
    *.distcp           tensors and objects one after another, each by torch.save
    .metadata          a pickle: which tensor has which chunk at which place of which file

Megatron writes and reads such a folder with all ranks at once, each holding its share of the model
(megatron/core/dist_checkpointing/strategies/torch.py, over torch.distributed.checkpoint). Here a
file is written from front to back and a chunk is read alone, so nobody holds more than a tensor.
``.metadata`` runs code when it is opened: open only a folder whose manifest verifies.
"""

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.utils.serialization import config as serialization

from rltrain.weights.stored import Chunk
from rltrain.weights.transport import tensor_bytes

SUFFIX = ".distcp"


class Stream(Protocol):
    """What is written to: `rltrain.weights.journal.PartFile`."""

    notes: list[Any]

    def write(self, data: Any, /) -> int: ...
    def tell(self) -> int: ...
    def flush(self) -> None: ...


def write_chunk(stream: Stream, chunk: Chunk, rows: Tensor) -> None:
    """Append a chunk's elements and note where they are."""
    start = stream.tell()
    # A storage of just these elements: torch.save writes the whole storage of a view.
    own = torch.frombuffer(tensor_bytes(rows), dtype=rows.dtype).view(chunk.shape)
    # The manifest's SHA-256 says more than a CRC, and PyTorch reads none.
    with serialization.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        torch.save(own, cast(IO[bytes], stream))
    note = {"dtype": _name(rows.dtype), "shape": chunk.shape, "whole": chunk.whole}
    stream.notes.append([chunk.key, chunk.offset, start, stream.tell() - start, note])


def write_object(stream: Stream, key: str) -> None:
    """Append an object whose value is None."""
    start = stream.tell()
    torch.save([None], cast(IO[bytes], stream))
    stream.notes.append([key, None, start, stream.tell() - start, None])


def write_metadata(
    folder: Path, notes: Iterable[tuple[str, list[Any]]], content: dict[str, Any]
) -> None:
    """Make a checkpoint of the files that are there.

    Args:
        notes: a file's name and what the functions above noted of it, for every file
        content: as in `rltrain.weights.stored`
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    objects: dict[str, BytesStorageMetadata] = {}
    places = []
    for file, items in notes:
        for key, offset, start, length, note in items:
            place = _StorageInfo(file, start, length)
            places.append(WriteResult(MetadataIndex(key, offset), length, place))
            if note is None:
                objects[key] = BytesStorageMetadata()
            else:
                _add_chunk(tensors, key, offset, note)
    for key, tensor in tensors.items():
        found = sum(prod(chunk.sizes) for chunk in tensor.chunks)
        assert found == prod(tensor.size), f"{key}: {found} of {list(tensor.size)} are written"
    _Writer(folder).finish(Metadata({**tensors, **objects}), [places])
    torch.save({"content_metadata": content}, folder / "common.pt")
    versions = {"sharded_backend_version": 1, "common_backend": "torch"}
    config = {"sharded_backend": "torch_dist", **versions, "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))


def _add_chunk(
    tensors: dict[str, TensorStorageMetadata], key: str, offset: list[int], note: dict[str, Any]
) -> None:
    properties = TensorProperties(dtype=getattr(torch, note["dtype"]))
    new = TensorStorageMetadata(properties, torch.Size(note["whole"]), [])
    tensor = tensors.setdefault(key, new)
    if tensor.properties.dtype != properties.dtype:
        raise ValueError(
            f"{key}: expected one dtype, found {_name(tensor.properties.dtype)} and "
            f"{note['dtype']}; Megatron keeps these tensors as one"
        )
    tensor.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(note["shape"])))


class _Writer(FileSystemWriter):
    def storage_meta(self) -> None:
        """No random number and no folder's name: the same weights make the same bytes."""


class Reader:
    """Reads chunks of an open checkpoint. Opens pickles: see above.

    Raises:
        ValueError: the folder is no ``torch_dist`` checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / ".metadata").is_file():
            raise ValueError(f"{folder}: expected Megatron's torch_dist format, found no .metadata")
        self._metadata = FileSystemReader(folder).read_metadata()

    def dtype(self, chunk: Chunk) -> torch.dtype:
        return self._stored(chunk).properties.dtype

    def read(self, chunk: Chunk) -> Tensor:
        """The elements of the chunk, from as many files as hold some of it."""
        result = torch.empty(chunk.shape, dtype=self.dtype(chunk))
        box = ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))
        found = 0
        for item in create_read_items_for_chunk_list(chunk.key, self._stored(chunk), [box]):
            saved = self._load(item.storage_index)
            source = _narrow(saved, item.storage_offsets, item.lengths)
            found += source.numel()
            if source.numel() == result.numel() == saved.numel() and source.dtype == result.dtype:
                return saved.view(chunk.shape)
            _narrow(result, item.dest_offsets, item.lengths).copy_(source)
        if found != result.numel():
            raise ValueError(
                f"{self.folder}: {chunk.key} has {found} of the {result.numel()} elements at "
                f"{list(chunk.offset)}; expected a checkpoint of the whole model"
            )
        return result

    def _stored(self, chunk: Chunk) -> TensorStorageMetadata:
        found = self._metadata.state_dict_metadata.get(chunk.key)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(
                f"{self.folder}: expected a tensor {chunk.key}, found none: the checkpoint is of "
                "another model than its config.json says"
            )
        return found

    def _load(self, index: MetadataIndex) -> Tensor:
        place = self._metadata.storage_data[index]
        with open(self.folder / place.relative_path, "rb") as file:
            item = _create_file_view(file, place.offset, place.length)
            tensor = torch.load(cast(IO[bytes], item), map_location="cpu", weights_only=True)
        assert isinstance(tensor, Tensor)
        return tensor


def _narrow(tensor: Tensor, starts: Iterable[int], lengths: Iterable[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
