"""A pickle that runs code, planted in each file of a checkpoint, is refused and does not run."""

import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from rltrain.policy import model_checkpoint
from rltrain.weights.huggingface.plain_checkpoint import check_runs_no_code, read_metadata
from rltrain.weights.huggingface.stored_model import Chunk, StoredModel
from rltrain.weights.huggingface.torch_dist import TorchDistReader, write_torch_dist

CHUNK = Chunk("a", (0, 0), (2, 4), (2, 4))
EXTRA = "layer._extra_state/shard_0_1"
STORED = StoredModel({"a": (CHUNK,)}, (EXTRA,), {"kind": "test"})
OBJECT = MetadataIndex(EXTRA)


class Boom:
    """Makes a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.canary,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint = tmp_path / "policy"
    checkpoint.mkdir()
    write_torch_dist(checkpoint, [(CHUNK, torch.ones(2, 4))], STORED, 10**6)
    check_runs_no_code(checkpoint)
    return checkpoint


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


def saved(value: Any) -> bytes:
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def change(folder: Path, what: Callable[[Metadata], None]) -> None:
    metadata = read_metadata(folder)
    what(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_object(folder: Path, data: bytes, key: MetadataIndex = OBJECT) -> None:
    """Behind what a file holds, and found there instead of the object ``key``."""
    file = next(folder.glob("*.distcp"))
    start = file.stat().st_size
    file.write_bytes(file.read_bytes() + data)

    def point(metadata: Metadata) -> None:
        info = next(info for index, info in metadata.storage_data.items() if index == OBJECT)
        metadata.storage_data[key] = replace(
            info, relative_path=file.name, offset=start, length=len(data)
        )
        metadata.state_dict_metadata.setdefault(key.fqn, BytesStorageMetadata())

    change(folder, point)


def in_planner_data(folder: Path, boom: Boom) -> None:
    change(folder, lambda metadata: setattr(metadata, "planner_data", {"x": [boom]}))


PLANTS: dict[str, Callable[[Path, Boom], object]] = {
    ".metadata": lambda at, boom: (at / ".metadata").write_bytes(pickle.dumps(boom)),
    ".metadata, within": in_planner_data,
    ".metadata, old protocol": lambda at, boom: (at / ".metadata").write_bytes(
        pickle.dumps(boom, protocol=0)
    ),
    "common.pt": lambda at, boom: torch.save({"content_metadata": boom}, at / "common.pt"),
    "common.pt, bare": lambda at, boom: (at / "common.pt").write_bytes(pickle.dumps(boom)),
    "an object": lambda at, boom: plant_object(at, saved([boom])),
    "an object of another key": lambda at, boom: plant_object(
        at, saved(boom), MetadataIndex("rng/shard_0_1")
    ),
    "an object, bare": lambda at, boom: plant_object(at, pickle.dumps(boom)),
    "extra state": lambda at, boom: plant_object(
        at, saved([torch.frombuffer(bytearray(pickle.dumps(boom)), dtype=torch.uint8)])
    ),
    "another file": lambda at, boom: torch.save(boom, at / "rng.pt"),
    "metadata of a rank": lambda at, boom: (at / "__0.metadata").write_bytes(pickle.dumps(boom)),
}


@pytest.mark.parametrize("place", PLANTS)
def test_planted_code_does_not_run(place: str, folder: Path, canary: Path) -> None:
    PLANTS[place](folder, Boom(canary))
    with pytest.raises(ValueError, match=r"what could run code.*\[RL7008\]"):
        check_runs_no_code(folder)
    nothing: Any = None
    with pytest.raises(ValueError, match="RL7008"):
        model_checkpoint.load_model(str(folder), [], nothing, nothing, nothing)
    with pytest.raises(ValueError, match="RL7008"):
        model_checkpoint.load_weights(str(folder), [], nothing)
    if place.startswith(".metadata"):
        with pytest.raises(ValueError, match="RL7008"):
            TorchDistReader(folder)
    else:
        assert TorchDistReader(folder).read(CHUNK).sum() == 8  # it opens tensors alone
    assert not canary.exists()


def test_the_planted_code_is_real(folder: Path, canary: Path) -> None:
    """Whoever trusts the folder runs it."""
    in_planner_data(folder, Boom(canary))
    TorchDistReader(folder, trust=True)
    assert canary.exists()


def test_a_tensor_is_no_pickle(folder: Path, canary: Path) -> None:
    def point(metadata: Metadata) -> None:
        (tensor,) = (index for index in metadata.storage_data if index.fqn == "a")
        metadata.storage_data[tensor] = metadata.storage_data[OBJECT]

    plant_object(folder, saved(Boom(canary)))
    change(folder, point)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        TorchDistReader(folder).read(CHUNK)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("name", "module"), [("system", "os"), ("__init__.__globals__", "torch.serialization")]
)
def test_only_names_of_the_list_are_made(name: str, module: str, folder: Path) -> None:
    code = b"\x80\x04" + b"".join(
        b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)
    )
    (folder / ".metadata").write_bytes(code + b"\x93.")
    with pytest.raises(ValueError, match=rf"it names {module}\.{name}"):
        read_metadata(folder)


def test_files_of_other_folders_are_not_opened(folder: Path) -> None:
    info = next(iter(read_metadata(folder).storage_data.values()))
    for path in ("../secret.distcp", "/etc/passwd", "x.pt"):
        moved = replace(info, relative_path=path)
        change(folder, lambda found, moved=moved: found.storage_data.update({OBJECT: moved}))  # type: ignore[misc]
        with pytest.raises(ValueError, match=r"which is no file of this folder"):
            check_runs_no_code(folder)


def test_another_format_is_refused(folder: Path) -> None:
    config = json.loads((folder / "metadata.json").read_text())
    for text in (json.dumps(config | {"sharded_backend": "zarr"}), "[" * 10**5, "[]"):
        (folder / "metadata.json").write_text(text)
        with pytest.raises(ValueError, match="RL7008"):
            check_runs_no_code(folder)


def test_metadata_without_its_fields_is_refused(folder: Path) -> None:
    change(folder, lambda found: delattr(found, "state_dict_metadata"))
    with pytest.raises(ValueError, match=r"\.metadata.*state_dict_metadata.*RL7008"):
        check_runs_no_code(folder)


def test_a_torn_file_is_refused(folder: Path) -> None:
    whole = (folder / ".metadata").read_bytes()
    for size in range(0, len(whole), 97):
        (folder / ".metadata").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="RL7008"):
            read_metadata(folder)


def test_what_torch_reads_is_what_was_looked_at(folder: Path) -> None:
    assert FileSystemReader(folder).read_metadata().state_dict_metadata == (
        read_metadata(folder).state_dict_metadata
    )
    assert zipfile.is_zipfile(folder / "common.pt")
