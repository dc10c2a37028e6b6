"""Megatron's distributed checkpoint format, ``torch_dist``, written and read in one process.

    common.pt          plain values, by torch.save
    metadata.json      which format this is
    *.distcp           tensors and objects one after another, each by torch.save
    .metadata          a pickle: which tensor has which chunk at which place of which file

Megatron writes and reads such a folder with all ranks at once, each holding its share of the model
(megatron/core/dist_checkpointing/strategies/torch.py, over torch.distributed.checkpoint). Here
torch.distributed.checkpoint is given the chunks of one file after another, and reads one alone.
Nothing in it can run code (`plain_checkpoint`), unless the folder is trusted.
"""

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rltrain.weights.huggingface.new_folder import split_by_bytes
from rltrain.weights.huggingface.plain_checkpoint import read_metadata
from rltrain.weights.huggingface.stored_model import Chunk, StoredModel


def write_torch_dist(
    folder: Path, tensors: Iterable[tuple[Chunk, Tensor]], stored: StoredModel, max_file_bytes: int
) -> None:
    """Write a checkpoint to the empty ``folder``: all chunks of ``stored``, a file at a time.

    Raises:
        ValueError: chunks that Megatron keeps as one tensor have different dtypes.
        OSError: the disk is full, say.
    """
    writer = _Writer(folder, per_thread_copy_ahead=0)
    written = [writer.put(0, [(_object(key), [None]) for key in stored.objects])]
    dtypes: dict[str, torch.dtype] = {}
    for number, shard in enumerate(split_by_bytes(tensors, max_file_bytes), start=1):
        pieces = []
        for chunk, tensor in shard:
            known = dtypes.setdefault(chunk.key, tensor.dtype)
            if known != tensor.dtype:
                raise ValueError(
                    f"{chunk.key}: expected one dtype, found {known} and {tensor.dtype}; "
                    "Megatron keeps these tensors as one"
                )
            pieces.append((_item(chunk, known), tensor.contiguous().view(chunk.shape)))
        written.append(writer.put(number, pieces))
        del pieces
    plans, results = zip(*written, strict=True)
    # It checks that every tensor is complete.
    _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(list(plans))
    writer.finish(metadata, list(results))
    torch.save({"content_metadata": stored.content}, folder / "common.pt")
    versions = {"sharded_backend_version": 1, "common_backend": "torch"}
    config = {"sharded_backend": "torch_dist", **versions, "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))


def _object(key: str) -> WriteItem:
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, BytesIOWriteData(0))


def _item(chunk: Chunk, dtype: torch.dtype) -> WriteItem:
    data = TensorWriteData(_box(chunk), TensorProperties(dtype=dtype), torch.Size(chunk.whole))
    index = MetadataIndex(chunk.key, chunk.offset)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _box(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))


class _Writer(FileSystemWriter):
    def put(self, number: int, pieces: list[tuple[WriteItem, Any]]) -> Any:
        """Write one file; returns its plan and its write results."""
        plan = SavePlan([item for item, _ in pieces], storage_data=_StoragePrefix(f"__{number}_"))
        values = _FileValues({item.index: value for item, value in pieces})
        try:
            return plan, self.write_data(plan, values).wait()
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch.save replaces it by its own
                raise error.__context__ from None
            raise

    def storage_meta(self) -> None:
        """Without random numbers and folder names, so that the same weights give the same bytes."""


class _FileValues(DefaultSavePlanner):
    """A save plan of one file, with its values by their index in the checkpoint."""

    def __init__(self, values: dict[MetadataIndex, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self.values = values

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.values[index]


class TorchDistReader:
    """Reads chunks of a checkpoint.

    Args:
        trust: open it with `pickle`, whatever it holds

    Raises:
        ValueError: the folder is no ``torch_dist`` checkpoint, or could run code.
    """

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        self.folder = folder
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata() if trust else read_metadata(folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def dtype(self, chunk: Chunk) -> torch.dtype:
        return self._stored(chunk).properties.dtype

    def read(self, chunk: Chunk, dtype: torch.dtype | None = None) -> Tensor:
        """The elements of the chunk, from all files that hold some of it; as stored or cast."""
        result = torch.empty(chunk.shape, dtype=dtype or self.dtype(chunk))
        items = create_read_items_for_chunk_list(chunk.key, self._stored(chunk), [_box(chunk)])
        stored = sum(prod(item.lengths) for item in items)
        if stored != result.numel():
            raise ValueError(
                f"{self.folder}: {chunk.key} has {stored} of the {result.numel()} elements at "
                f"{list(chunk.offset)}; expected a checkpoint of the whole model"
            )
        self._reader.read_data(LoadPlan(items), _ReadInto(result)).wait()
        return result

    def _stored(self, chunk: Chunk) -> TensorStorageMetadata:
        metadata = self._metadata.state_dict_metadata.get(chunk.key)
        if not isinstance(metadata, TensorStorageMetadata):
            raise ValueError(
                f"{self.folder}: expected a tensor {chunk.key}, found none: the checkpoint is of "
                "another model than its config.json says"
            )
        return metadata


class _ReadInto(DefaultLoadPlanner):
    """A load plan whose only tensor is ``target``."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.target
