"""Checkpoint folders with damaged, missing, renamed and strange files: what is accepted is what was
written, byte for byte, and Megatron's files are opened only where they run no code."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rltrain.controller.checkpoint_record import read_record
from rltrain.controller.run_checkpoint import STATE, check_model
from rltrain.weights.huggingface.manifest import MANIFEST, check_files, write_manifest
from rltrain.weights.huggingface.plain_checkpoint import check_runs_no_code
from rltrain.weights.huggingface.stored_model import Chunk, StoredModel
from rltrain.weights.huggingface.torch_dist import write_torch_dist
from tests.reliability import mutations

STEP = 7
MODEL: dict[str, Any] = {"architecture": "a (1)", "tokenizer": "t", "weights": "w"}
STATE_OF_RUN = {"step": STEP, "model": MODEL, "config": {}, "prompts": {"loader": {}}, "kl": 0.1}
OUTSIDE = ("../x", "/etc/passwd", "a/../../b", "", ".", "a\x00b", "b" * 300, "\ud800")
NAMES = ("policy/__0_0.distcp", "policy/.metadata", "policy/common.pt", "critic/x.distcp", STATE)


def make_records(folder: Path) -> Callable[[random.Random], str]:
    """Manifest, ``state.json`` and the files beside them."""
    whole = folder / "whole" / f"step_{STEP:06d}"
    for name in NAMES:
        (whole / name).parent.mkdir(parents=True, exist_ok=True)
        (whole / name).write_bytes(random.Random(name).randbytes(120))
    (whole / STATE).write_text(json.dumps(STATE_OF_RUN))
    write_manifest(whole)
    content = contents(whole)
    path = folder / whole.name

    def try_one(dice: random.Random) -> str:
        shutil.copytree(whole, path)
        try:
            for _ in range(dice.choice([0, 1, 1, 1, 2, 3])):
                break_one(dice, path)
            return outcome(path, content)
        finally:
            shutil.rmtree(path)

    return try_one


def outcome(path: Path, content: dict[str, bytes]) -> str:
    try:
        record = read_record(path)
        check_files(path, record.entries)
        check_model(path, MODEL, trust=False)  # type: ignore[arg-type]  # a TypedDict
    except ValueError as error:
        assert "[RL" in str(error), f"no code: {error}"
        return "refused"
    found = contents(path)
    for name in found.keys() - {MANIFEST}:
        assert found[name] == content.get(name), f"accepted: {name} is another"
    if json.loads(found[MANIFEST]) == json.loads(content[MANIFEST]):
        assert found.keys() == content.keys(), f"accepted: {found.keys() ^ content.keys()}"
        return "accepted"
    # It lost both a file and its entry: nothing tells that it was there.
    assert record.entries.keys() == found.keys() - {MANIFEST}
    return "accepted by another manifest"


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def break_one(dice: random.Random, path: Path) -> None:
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    if not files:
        return
    file = dice.choice(files)
    kind = dice.randrange(9)
    if kind == 0:
        file.unlink()
    elif kind == 1:
        to = file.with_name(dice.choice(["x", ".hidden", MANIFEST, STATE, "common.pt"]))
        if not to.is_dir():
            file.rename(to)
    elif kind == 2:
        shutil.copy(file, file.with_name(f"{file.name}{dice.choice(['.1', '~', ' ', '.tmp'])}"))
    elif kind == 3:
        file.unlink()
        others = [file.mkdir, lambda: file.symlink_to("/nowhere"), file.touch]
        dice.choice(others)()
    elif kind in (4, 5):
        hostile_json(dice, path / dice.choice([MANIFEST, MANIFEST, STATE]))
    else:
        file.write_bytes(mutations.damaged(dice, file.read_bytes()))


def hostile_json(dice: random.Random, file: Path) -> None:
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if file.name == MANIFEST and isinstance(data, dict) and dice.random() < 0.3:
        name = dice.choice(OUTSIDE)
        place = dice.choice(["", "node-1", "s3://bucket/x", "file:///etc", "../x", 3])
        entry = {"bytes": dice.choice([0, 1, -1, True, 10**30]), "sha256": "0" * 64}
        data = data | {name: entry | dice.choice([{}, {"place": place}])}
    else:
        data = mutations.changed(dice, data)
    file.write_bytes(mutations.as_json(dice, data))


def make_tensors(folder: Path) -> Callable[[random.Random], str]:
    """Megatron's files as they are before it opens them: pickles and archives."""
    whole, path = folder / "whole", folder / "policy"
    whole.mkdir()
    chunk = Chunk("a", (0, 0), (2, 4), (2, 4))
    stored = StoredModel({"a": (chunk,)}, ("layer._extra_state/shard_0_1",), {"kind": "test"})
    write_torch_dist(whole, [(chunk, torch.ones(2, 4))], stored, 10**6)
    check_runs_no_code(whole)

    def try_one(dice: random.Random) -> str:
        shutil.copytree(whole, path)
        try:
            files = sorted(file for file in path.rglob("*") if file.is_file())
            file = dice.choice(files)
            file.write_bytes(mutations.damaged(dice, file.read_bytes()))
            check_runs_no_code(path)
        except ValueError:
            return "refused"
        finally:
            shutil.rmtree(path)
        return "runs no code"

    return try_one
