"""Checkpoints: what is opened, what is kept, and what is left when writing fails.

A stand-in for the group of workers writes and reads a small file. Megatron's own checkpoints are
tested in tests/distributed and tests/integration.
"""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltrain.actors.failures import ActorFailed
from rltrain.config import Config
from rltrain.config.trainer import CheckpointConfig
from rltrain.controller.checkpoint_storage import Storage, local_storage
from rltrain.controller.checks.model_checks import read_model
from rltrain.controller.choose_checkpoint import check_resumed
from rltrain.controller.find_checkpoint import examine
from rltrain.controller.restore_checkpoint import restore
from rltrain.controller.run_checkpoint import (
    check_model,
    checkpoints,
    last_weights,
    model_of,
    read_state,
)
from rltrain.controller.save_checkpoint import save, save_last
from rltrain.data.tiny_model import save_tiny_model
from rltrain.weights.huggingface.export import write_safetensors
from rltrain.weights.huggingface.identity import (
    SAMPLE_BYTES,
    ModelIdentity,
    identity_differences,
    identity_of,
)
from rltrain.weights.huggingface.manifest import (
    MANIFEST,
    ManifestEntry,
    check_manifest,
    entries_of,
    write_manifest,
)

MODEL = ModelIdentity(architecture="tiny (1)", tokenizer="2", weights="3")
STATE = {"model": MODEL, "prompts": {"position": 5}}


class Group:
    """Stores one number in a file."""

    folders: ClassVar = ["policy"]
    nodes: ClassVar = ["127.0.0.1"]
    role: ClassVar = "policy"
    unmade: ClassVar[list[Any]] = []

    def __init__(self, value: int = 0, error: Exception | None = None) -> None:
        self.value, self.error = value, error

    def save(self, checkpoint: Path) -> list[dict[str, ManifestEntry]]:
        (checkpoint / "policy").mkdir()
        (checkpoint / "policy/value.distcp").write_text(str(self.value))
        if self.error is not None:
            raise self.error
        return [entries_of(checkpoint, ["policy/value.distcp"])]

    save_weights = save

    def nonfinite_state(self) -> dict[int, list[str]]:
        return {}

    def load(self, checkpoint: Path) -> None:
        self.value = int((checkpoint / "policy/value.distcp").read_text())


def storage(run: Path, **settings: Any) -> Storage:
    return local_storage(run, CheckpointConfig(**settings))


def written(run: Path, *steps: int, keep: int = 10) -> list[Path]:
    return [save(storage(run, keep=keep), step, [Group(step)], STATE) for step in steps]  # type: ignore[list-item]


def opened(path: Path, run: Path, *, trust: bool = False) -> int:
    group = Group()
    at = storage(run, trust=trust)
    restore(at, examine(at, path), [group])  # type: ignore[list-item]
    return group.value


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_was_saved_is_restored(tmp_path: Path) -> None:
    [path] = written(tmp_path, 7)
    assert opened(path, tmp_path) == 7
    assert read_state(path) == {"step": 7, **STATE}


def test_the_newest_are_kept_by_number_not_by_name(tmp_path: Path) -> None:
    written(tmp_path, 999_998, 999_999, 1_000_000, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_999999", "step_1000000"]
    assert opened(checkpoints(tmp_path)[-1], tmp_path) == 1_000_000
    written(tmp_path, 1_000_001, keep=1)
    assert names(tmp_path) == ["step_1000001"]


def truncate(path: Path) -> None:
    (path / "policy/value.distcp").write_text("")


def flip(path: Path) -> None:
    (path / "policy/value.distcp").write_text("8")


def add(path: Path) -> None:
    (path / "policy/more.distcp").write_text("1")


def remove(path: Path) -> None:
    (path / "policy/value.distcp").unlink()


def change_state(path: Path) -> None:
    (path / "state.json").write_text(json.dumps({"step": 1}))


@pytest.mark.parametrize("damage", [truncate, flip, add, remove, change_state])
def test_a_damaged_checkpoint_is_not_opened(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """Not even a trusted one."""
    [path] = written(tmp_path, 7)
    damage(path)
    for trust in (False, True):
        with pytest.raises(ValueError, match=r"its content is not what|manifest and its files"):
            opened(path, tmp_path, trust=trust)


def test_only_this_runs_own_is_opened_unless_it_is_trusted(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    [path] = written(other, 7)
    written(run, 1)
    with pytest.raises(ValueError, match=r"checkpoint\.trust=true only if you know who wrote it"):
        opened(path, run)
    assert opened(path, run, trust=True) == 7
    (run / "checkpoints/step_000007").symlink_to(path)  # its own by name alone
    with pytest.raises(ValueError, match="not from this run's folder"):
        opened(checkpoints(run)[-1], run)


def test_a_folder_that_is_not_whole_is_no_checkpoint(tmp_path: Path) -> None:
    first, second = written(tmp_path, 1, 2)
    (second / MANIFEST).unlink()
    assert checkpoints(tmp_path) == [first]
    (tmp_path / "checkpoints/.step_000009.partial/policy").mkdir(parents=True)  # of a killed run
    written(tmp_path, 3)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000001", "step_000003"]
    assert ".step_000009.partial" not in names(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        ActorFailed("raised", "policy.save", "OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_full_disk_leaves_the_older_ones(error: Exception, tmp_path: Path) -> None:
    written(tmp_path, 1, keep=1)
    full = Group(2, error)
    with pytest.raises(RuntimeError, match=r"step 2 not written[^|]*No space left[^|]*GiB free"):
        save(storage(tmp_path, keep=1), 2, [full], STATE)  # type: ignore[list-item]
    assert names(tmp_path) == ["step_000001"]
    with pytest.raises(RuntimeError, match="step 2 not written"):
        save_last(storage(tmp_path), 2, full, MODEL)  # type: ignore[arg-type]
    assert names(tmp_path) == ["step_000001"]
    assert opened(checkpoints(tmp_path)[-1], tmp_path) == 1


def test_the_last_weights_are_a_link_where_the_checkpoint_is_there(tmp_path: Path) -> None:
    assert last_weights(tmp_path) is None
    for step in (1, 2):  # the second replaces the first
        save_last(storage(tmp_path), step, Group(step), MODEL)  # type: ignore[arg-type]
        found = last_weights(tmp_path)
        assert found is not None and not found.is_symlink()
        check_manifest(found)
        assert read_state(found) == {"step": step, "model": MODEL}
        assert (found / "policy/value.distcp").read_text() == str(step)
    for step in (3, 4):
        written(tmp_path, step, keep=1)
        save_last(storage(tmp_path), step, Group(0), MODEL)  # type: ignore[arg-type]
        found = last_weights(tmp_path)
        assert found is not None and found.resolve() == checkpoints(tmp_path)[-1].resolve()
    assert names(tmp_path) == ["last", "step_000004"]
    written(tmp_path, 5, keep=1)
    assert last_weights(tmp_path) is None  # what it led to is pruned
    save_last(storage(tmp_path), 5, Group(0), MODEL)  # type: ignore[arg-type]
    assert names(tmp_path) == ["last", "step_000005"]


# Which model it is of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(small().model.tiny, folder)
    return folder


def small(**model: Any) -> Config:
    sizes = {"num_layers": 1, "hidden_size": 32, "expert_size": 16, "num_experts": 4}
    return Config.model_validate({"model": {"tiny": sizes | {"experts_per_token": 2}, **model}})


def resuming(run: Path, **model: Any) -> Config:
    trainer = {"output_dir": str(run), "resume": "auto"}
    return Config.model_validate(small(**model).model_dump() | {"trainer": trainer})


def identity(folder: Path) -> ModelIdentity:
    config = small(path=str(folder))
    return model_of(config, read_model(config))


def test_the_same_model_elsewhere_and_in_other_files_is_the_same(
    tiny: Path, tmp_path: Path
) -> None:
    moved, cut = tmp_path / "moved", tmp_path / "cut"
    shutil.copytree(tiny, moved)
    shutil.copytree(tiny, cut)
    tensors = load_file(tiny / "model.safetensors")
    (cut / "model.safetensors").unlink()
    write_safetensors(cut, sorted(tensors.items()), 50_000)
    assert len(list(cut.glob("*.safetensors"))) > 2
    assert identity(moved) == identity(cut) == identity(tiny)


def trained(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed = {name: t * 1.001 for name, t in tensors.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})


def retokenized(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"+"', '"*"', 1))


def reshaped(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))


@pytest.mark.parametrize(
    ("change", "part"), [(trained, "weights"), (retokenized, "tokenizer"), (reshaped, "arch")]
)
def test_another_model_of_the_same_shape_is_refused_before_anything_starts(
    change: Callable[[Path], None], part: str, tiny: Path, tmp_path: Path
) -> None:
    folder, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(tiny, folder)
    save(storage(run), 1, [Group(1)], {"model": identity(tiny)})  # type: ignore[list-item]
    config = resuming(run, path=str(folder))
    check_resumed(config, read_model(config))
    change(folder)
    assert [
        line[: len(part)] for line in identity_differences(identity(tiny), identity(folder))
    ] == [part]
    config = resuming(run, path=str(folder))
    with pytest.raises(ValueError, match=rf"another model than model.path:\n  {part}.* in the che"):
        check_resumed(config, read_model(config))


def test_the_tiny_model_is_known_by_what_it_is_made_from(tmp_path: Path) -> None:
    config = resuming(tmp_path)
    model = model_of(config, read_model(config))
    save(storage(tmp_path), 1, [Group(1)], {"model": model})  # type: ignore[list-item]
    check_resumed(config, read_model(config))
    other = resuming(tmp_path)
    other.model.tiny.__dict__["seed"] = 1
    with pytest.raises(ValueError, match="another model"):
        check_resumed(other, read_model(other))


def test_imported_weights_are_known_by_their_manifest(tiny: Path, tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    (imported / "policy").mkdir(parents=True)
    arch = read_model(small(path=str(tiny)))
    found = []
    for value in ("1", "1", "2"):
        (imported / "policy/value").write_text(value)
        write_manifest(imported)
        found.append(identity_of(tiny, arch, imported)["weights"])
        shutil.move(imported, tmp_path / "moved")
        imported = tmp_path / "moved" if value == "2" else shutil.move(tmp_path / "moved", imported)
    assert found[0] == found[1] != found[2]
    assert found[0] != identity_of(tiny, arch)["weights"]


def test_one_that_does_not_say_is_refused_unless_it_is_trusted(tmp_path: Path) -> None:
    path = save(storage(tmp_path), 1, [Group(1)], {})  # type: ignore[list-item]
    with pytest.raises(ValueError, match="does not say which model"):
        check_model(path, MODEL, trust=False)
    check_model(path, MODEL, trust=True)
    (path / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state\.json cannot be read"):
        check_model(path, MODEL, trust=True)


def test_most_tensors_are_told_by_their_first_bytes(tmp_path: Path) -> None:
    """What is read of each is bounded: the identity of a large model is cheap."""
    assert SAMPLE_BYTES * 256 <= 2**20
    big = {"a": torch.zeros(SAMPLE_BYTES), "b": torch.zeros(4)}
    save_file(big, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    arch = read_model(small())
    before = identity_of(tmp_path, arch)
    save_file(big | {"b": torch.ones(4)}, tmp_path / "model.safetensors")
    assert identity_of(tmp_path, arch)["weights"] != before["weights"]
