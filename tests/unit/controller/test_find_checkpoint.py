"""A run goes on from the newest checkpoint that is whole, says what is wrong with others, and
removes none of them."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rltrain.actors import node_files
from rltrain.config import Config
from rltrain.config.saved_config import save_config
from rltrain.controller.checkpoint_storage import Storage, gather_records, set_aside
from rltrain.controller.checks.model_checks import read_model
from rltrain.controller.choose_checkpoint import check_resumed, keep_earlier_config
from rltrain.controller.find_checkpoint import Found, find_checkpoint, search
from rltrain.controller.remote_records import check_url, remove_remote_leftovers
from rltrain.controller.resume_changes import settings_of
from rltrain.controller.run_checkpoint import checkpoints, model_of
from rltrain.controller.run_loop import resume
from rltrain.controller.save_checkpoint import save
from rltrain.data.loader import PromptLoader
from rltrain.data.problem import Problem
from rltrain.tracking.jsonl import JsonlWriter, read_jsonl
from rltrain.weights.huggingface.manifest import MANIFEST
from rltrain.weights.huggingface.remote_folder import RemoteFolder
from tests.unit.config.test_schema import nested
from tests.unit.controller import test_checkpoint_storage as nodes
from tests.unit.controller.test_checkpoint_storage import A, B, C, Run, start
from tests.unit.controller.test_run_checkpoint import Group, names, storage

Damage = Callable[[Path], Any]


def config_of(run: Path, resume: str = "auto", **values: Any) -> Config:
    """Keys have two underscores for a dot."""
    tiny = {"num_layers": 1, "hidden_size": 32, "expert_size": 16, "num_experts": 4}
    sizes = {f"model.tiny.{key}": value for key, value in tiny.items()}
    dotted = {key.replace("__", "."): value for key, value in values.items()}
    trainer = {"trainer.output_dir": str(run), "trainer.resume": resume}
    return Config.model_validate(nested(sizes | trainer | dotted))


def loader(number: int = 8) -> PromptLoader:
    return PromptLoader([Problem((1,), str(n), "") for n in range(number)], 2, 0)


def state_of(config: Config) -> dict[str, Any]:
    model, prompts = model_of(config, read_model(config)), loader()
    next(prompts)
    about = {"model": model, "config": settings_of(config), "kl_coef": 0.5}
    return {**about, "prompts": prompts.state_dict()}


def leave(run: Path, *steps: int) -> list[Path]:
    """The checkpoints of a run."""
    state = state_of(config_of(run))
    return [save(storage(run, keep=9), step, [Group(step)], state) for step in steps]  # type: ignore[list-item]


def find(run: Path, resume: str = "auto", **values: Any) -> Found:
    config = config_of(run, resume, **values)
    check_resumed(config, read_model(config))
    return search(config, storage(run))


def step_found(found: Found) -> int:
    assert found.record is not None
    return found.record.step


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def cut(name: str) -> Damage:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-1])


def flipped(name: str) -> Damage:
    def flip(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)

    return flip


def lost(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def name_in_manifest(path: Path, name: str) -> None:
    """It is to be fetched, as files of other nodes are."""
    entries = json.loads((path / MANIFEST).read_text())
    entries[name] = {"bytes": 1, "sha256": "0" * 64, "place": "file:///nowhere"}
    (path / MANIFEST).write_text(json.dumps(entries))


VALUE = "policy/value.distcp"
ALL = (VALUE, "state.json", MANIFEST)
DAMAGES = {
    **{f"{name} {how.__name__}": how(name) for name in ALL for how in (cut, flipped, lost)},
    "manifest empty": lambda path: (path / MANIFEST).write_text("{}"),
    "manifest no object": lambda path: (path / MANIFEST).write_text("[1]"),
    "entry without size": lambda path: (path / MANIFEST).write_text('{"state.json": {}}'),
    "a name that no disk has": lambda path: name_in_manifest(path, "policy/\ud800"),
    "a name with a NUL": lambda path: name_in_manifest(path, "policy/a\0b"),
    "all files lost": lambda path: (shutil.rmtree(path), path.mkdir()),
    "a file more": lambda path: (path / "policy/more.distcp").write_text("1"),
    "renamed": lambda path: (
        shutil.rmtree(path),
        shutil.copytree(path.with_name("step_000001"), path),
    ),
}
SEEN_LATER = {f"{VALUE} flipped"}
"""What only shows when the file is read."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_falls_back_to_the_one_before_and_says_why(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path, 1, 2)
    DAMAGES[damage](tmp_path / "checkpoints/step_000002")
    before = files_of(tmp_path)
    gather_records(storage(tmp_path))
    found = find(tmp_path)
    assert step_found(found) == 1
    assert files_of(tmp_path) == before
    assert "PASSED OVER, IT IS NOT WHOLE" in caplog.text and "step_000002" in caplog.text
    assert "going on from the checkpoint of step 1 instead" in caplog.text
    set_aside(storage(tmp_path), 1)
    assert names(tmp_path) == ["set_aside", "step_000001"]
    aside = files_of(tmp_path / "checkpoints/set_aside/step_000002")
    assert aside == {n[24:]: data for n, data in before.items() if "step_000002" in n}


@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - {"renamed"}))
def test_where_none_is_whole_it_does_not_begin_anew(damage: str, tmp_path: Path) -> None:
    paths = leave(tmp_path, 1, 2)
    for path in paths:
        DAMAGES[damage](path)
    before = files_of(tmp_path)
    config = config_of(tmp_path)
    said = (
        r"(?s)auto: expected .* whole, found none:\n.*step_000002[^\n]*\n.*step_000001.*RL6014\]$"
    )
    if damage not in SEEN_LATER:
        with pytest.raises(ValueError, match=said):
            check_resumed(config, read_model(config))
    gather_records(storage(tmp_path))
    with pytest.raises(ValueError, match=said):
        search(config, storage(tmp_path))
    assert files_of(tmp_path) == before


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(ALL), st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_no_byte_of_a_checkpoint_can_change_unseen(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: int, byte: int, cuts: bool
) -> None:
    run = tmp_path_factory.mktemp("run")
    path = leave(run, 1, 2)[1] / name
    before = path.read_bytes()
    at %= len(before)
    after = before[:at] if cuts else before[:at] + bytes([byte]) + before[at + 1 :]
    path.write_bytes(after)
    same = after == before or (name == MANIFEST and parsed(after) == parsed(before))
    assert step_found(find(run)) == (2 if same else 1)
    shutil.rmtree(run)


def parsed(manifest: bytes) -> Any:
    """What a manifest says, in whatever white space."""
    try:
        return json.loads(manifest)
    except ValueError:
        return None


def test_a_step_can_be_chosen(tmp_path: Path) -> None:
    leave(tmp_path, 1, 2, 3)
    found = find(tmp_path, "step:2")
    assert step_found(found) == 2
    set_aside(storage(tmp_path), 2)
    assert names(tmp_path) == ["set_aside", "step_000001", "step_000002"]
    leave(tmp_path, 3)
    set_aside(storage(tmp_path), 2)  # a second time
    assert sorted(path.name for path in (tmp_path / "checkpoints/set_aside").iterdir()) == [
        "step_000003",
        "step_000003.2",
    ]


def test_the_step_that_is_chosen_is_the_one_or_none(tmp_path: Path) -> None:
    leave(tmp_path, 1, 2)
    lost(MANIFEST)(tmp_path / "checkpoints/step_000002")
    with pytest.raises(
        ValueError, match=r"found none:\n.*step_000002.*\n.*another one: steps \[1\]"
    ):
        find(tmp_path, "step:2")
    with pytest.raises(
        ValueError, match=r"a checkpoint of step 5, found those of steps \[2, 1\].*14"
    ):
        find(tmp_path, "step:5")
    with pytest.raises(ValueError, match=r"a checkpoint of step 5, found none"):
        find(tmp_path / "new", "step:5")


def test_what_is_named_otherwise_is_no_checkpoint(tmp_path: Path) -> None:
    [path] = leave(tmp_path, 1)
    for name in ("step_000009.bak", "step_x", "set_aside/step_000009"):
        shutil.copytree(path, path.parent / name)
    assert step_found(find(tmp_path)) == 1
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000001"]


def test_a_run_without_any_begins_unless_its_metrics_say_that_it_had_some(tmp_path: Path) -> None:
    assert find(tmp_path, checkpoint__every=3).record is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    assert find(tmp_path, checkpoint__every=3).record is None  # killed before the first
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    assert find(tmp_path).record is None  # it saves none
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "checkpoint/skipped": 1}\n')
    assert find(tmp_path, checkpoint__every=3).record is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "checkpoint/skipped": 0}\n')
    with pytest.raises(ValueError, match=r"metrics go to step 3 and checkpoint\.every=3.*RL6014"):
        find(tmp_path, checkpoint__every=3)


def test_what_is_no_damage_ends_the_search(tmp_path: Path) -> None:
    """An older one would have it, too."""
    leave(tmp_path, 1, 2)
    with pytest.raises(ValueError, match=r"RL6003"):
        find(tmp_path, model__tiny__num_experts=8)
    shutil.move(tmp_path / "checkpoints/step_000002", tmp_path / "elsewhere")
    (tmp_path / "checkpoints/step_000002").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"RL6007"):
        find(tmp_path)


# What is resumed


def test_prompts_metrics_and_state_are_those_of_the_step(tmp_path: Path) -> None:
    leave(tmp_path, 1, 2)
    flipped(VALUE)(tmp_path / "checkpoints/step_000002")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(5)))
    group, prompts, config = Group(), loader(), config_of(tmp_path)
    found = find_checkpoint(config, storage(tmp_path))
    resumed = resume(config, storage(tmp_path), found, [group], prompts)  # type: ignore[list-item]
    assert (resumed.after, group.value, resumed.state["kl_coef"]) == (1, 1, 0.5)
    straight = loader()
    next(straight)
    assert next(prompts) == next(straight)
    assert names(tmp_path) == ["set_aside", "step_000001"]
    JsonlWriter(tmp_path / "metrics.jsonl", resumed.after + 1).close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1]
    assert step_found(find(tmp_path)) == 1


def test_changes_take_effect_only_where_they_are_meant(tmp_path: Path) -> None:
    leave(tmp_path, 1)
    changed: dict[str, Any] = {"algorithm__kl__coef": 0.25, "trainer__steps": 7}
    said = r"\n  algorithm\.kl\.coef: 0\.0 until step 1, 0\.25 now\nGo on .*RL6015\]$"
    with pytest.raises(ValueError, match=said):
        find(tmp_path, **changed)
    changed |= {"trainer__resume_with_changes": True}
    config = config_of(tmp_path, **changed)
    found = find(tmp_path, **changed)
    other = loader(9)
    resumed = resume(config, storage(tmp_path), found, [Group()], other)  # type: ignore[list-item]
    assert "kl_coef" not in resumed.state
    assert next(other) == next(loader(9))  # the first of the other data
    with pytest.raises(ValueError, match="RL6006"):
        resume(config_of(tmp_path), storage(tmp_path), found, [Group()], other)  # type: ignore[list-item]


def test_one_that_does_not_say_its_settings_had_those_of_config_yaml(tmp_path: Path) -> None:
    state = state_of(config_of(tmp_path))
    del state["config"]
    save(storage(tmp_path), 1, [Group(1)], state)  # type: ignore[list-item]
    assert step_found(find(tmp_path, optimizer__lr=0.5)) == 1  # nothing says with which
    save_config(config_of(tmp_path), "rl", [])
    with pytest.raises(ValueError, match=r"optimizer\.lr: 1e-06 until step 1, 0\.5 now"):
        find(tmp_path, optimizer__lr=0.5)


def test_every_earlier_configuration_is_kept(tmp_path: Path) -> None:
    def begin(**values: Any) -> list[str]:
        config = config_of(tmp_path, **values)
        keep_earlier_config(config)
        save_config(config, "rl", [])
        return sorted(path.name for path in tmp_path.glob("config*.yaml"))

    assert begin() == ["config.yaml"]
    leave(tmp_path, 4)
    assert begin() == begin(resume="step:4") == ["config.yaml"]  # nothing was changed
    first = (tmp_path / "config.yaml").read_bytes()
    assert begin(optimizer__lr=0.5) == ["config.step_4.yaml", "config.yaml"]
    assert (tmp_path / "config.step_4.yaml").read_bytes() == first
    assert begin(optimizer__lr=0.25) == [
        "config.step_4.2.yaml",
        "config.step_4.yaml",
        "config.yaml",
    ]
    assert len(begin(optimizer__lr=0.25)) == 3


# Several disks


def on_nodes(tmp_path: Path, *steps: int, **settings: Any) -> tuple[Run, Config]:
    url = {f"checkpoint__{key}": value for key, value in settings.items()}
    run = start(tmp_path, keep=9, **settings)
    config = config_of(run.storage.run_dir, cluster__address="auto", **url)
    for step in steps:
        group = nodes.Group(run.hosts, [B, C], f"step {step}")
        save(run.storage, step, [group], state_of(config))  # type: ignore[list-item]
    return run, config


def snapshot(run: Run) -> dict[str, dict[str, bytes]]:
    return {node: files_of(run.hosts.at(node, run.storage.folder)) for node in (A, B, C)}


@pytest.mark.parametrize("node", [B, C])
@pytest.mark.parametrize("change", [cut, flipped, lost])
def test_damage_on_any_node_is_passed_over(
    node: str, change: Callable[[str], Damage], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, config = on_nodes(tmp_path, 1, 2)
    file = f"policy/__{[B, C].index(node)}_0.distcp"
    at = run.hosts.at(node, run.storage.folder)
    change(file)(at / "step_000002")
    before = snapshot(run)
    gather_records(run.storage)
    assert step_found(search(config, run.storage)) == 1
    assert snapshot(run) == before
    assert file in caplog.text and node in caplog.text
    set_aside(run.storage, 1)
    for disk in (A, B, C):
        there = [path.name for path in run.hosts.at(disk, run.storage.folder).iterdir()]
        assert sorted(there) == ["set_aside", "step_000001"]
    assert run.load([B, C]) == "step 1 of 0 and step 1 of 1"


def test_a_node_that_is_not_there_is_no_damage(tmp_path: Path) -> None:
    """It may come back, and an older checkpoint would lose steps."""
    run, config = on_nodes(tmp_path, 1, 2)
    left = replace(run.hosts, roots={node: run.hosts.roots[node] for node in (A, B)})
    storage = replace(run.storage, disks=left, disk_of={A: A, B: B})
    with pytest.raises(ValueError, match=rf"on node {C} alone.*resume=step:N \[RL6011\]"):
        search(config, storage)


@pytest.mark.parametrize("kept", [True, False])
def test_where_all_manifests_are_lost_no_file_goes(kept: bool, tmp_path: Path) -> None:
    run, config = on_nodes(tmp_path, 1, 2)
    if not kept:
        shutil.rmtree(run.storage.folder)
        run.storage.folder.mkdir()
    for node in (A, B, C):
        for manifest in run.hosts.at(node, run.storage.folder).glob(f"*/{MANIFEST}"):
            manifest.unlink()
    before = snapshot(run)
    gather_records(run.storage)
    with pytest.raises(ValueError, match=r"(?s)step_000002.*\n.*step_000001.*RL6014"):
        search(config, run.storage)
    assert snapshot(run) == before


def test_a_record_is_brought_from_the_node_that_has_it(tmp_path: Path) -> None:
    run, config = on_nodes(tmp_path, 1, 2)
    lost(MANIFEST)(run.storage.folder / "step_000002")
    gather_records(run.storage)
    assert step_found(search(config, run.storage)) == 2
    shutil.rmtree(run.storage.folder)
    for node in (B, C):  # and there it is damaged, or not whole
        at = run.hosts.at(node, run.storage.folder)
        cut(MANIFEST)(at / "step_000002")
    lost("state.json")(run.hosts.at(B, run.storage.folder) / "step_000001")
    gather_records(run.storage)
    with pytest.raises(
        ValueError, match=r"(?s)step_000002.*cannot be read.*\n.*step_000001.*RL6014"
    ):
        search(config, run.storage)


def test_a_checkpoint_is_there_once_the_controller_has_its_manifest(tmp_path: Path) -> None:
    run, config = on_nodes(tmp_path, 1)
    crashing = replace(run.hosts, crash=(B, node_files.finish))
    with pytest.raises(KeyboardInterrupt):
        save(
            replace(run.storage, disks=crashing),
            2,
            [nodes.Group(crashing, [B, C], "step 2")],  # type: ignore[list-item]
            state_of(config),
        )
    at_b = run.hosts.at(B, run.storage.folder) / "step_000002"
    assert (at_b / node_files.UNFINISHED).is_file()
    gather_records(run.storage)
    assert step_found(search(config, run.storage)) == 2
    assert run.load([B, C]) == "step 2 of 0 and step 2 of 1"
    assert not (at_b / node_files.UNFINISHED).exists()


# URLs


@pytest.fixture
def at_url(tmp_path: Path) -> Iterator[tuple[Run, Config, Path]]:
    """And where its objects are on this disk."""
    run, config = on_nodes(tmp_path, 1, 2, url=f"file://{tmp_path}/bucket/run")
    yield run, config, tmp_path / "bucket/run"


def opened(run: Run, config: Config) -> Storage:
    """As a run begins, from the URL alone."""
    assert config.checkpoint.url is not None
    check_url(config)
    remove_remote_leftovers(RemoteFolder(config.checkpoint.url))
    gather_records(run.storage)
    return run.storage


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize(
    "damage", [lost(MANIFEST), cut(MANIFEST), lost("state.json"), cut("policy/__1_0.distcp")]
)
def test_damage_below_a_url_is_passed_over(
    damage: Damage, empty: bool, at_url: tuple[Run, Config, Path]
) -> None:
    run, config, bucket = at_url
    damage(bucket / "step_000002")
    if empty:
        shutil.rmtree(run.storage.run_dir)
    elif not (bucket / "step_000002/state.json").exists():
        lost("state.json")(run.storage.folder / "step_000002")  # else the record here has it
    before = files_of(bucket)
    storage = opened(run, config)
    assert step_found(search(config, storage)) == 1
    assert files_of(bucket) == before
    set_aside(storage, 1)
    kept = files_of(bucket)
    kept.pop("step_000002/set_aside.manifest.json")
    assert kept == {n: data for n, data in before.items() if n != "step_000002/manifest.json"}
    assert step_found(search(config, opened(run, config))) == 1
    group = nodes.Group(run.hosts, [B, C], "again")
    save(storage, 2, [group], state_of(config))  # type: ignore[list-item]
    assert step_found(search(config, opened(run, config))) == 2


def test_where_none_at_the_url_is_whole_none_goes(at_url: tuple[Run, Config, Path]) -> None:
    run, config, bucket = at_url
    for manifest in bucket.glob(f"*/{MANIFEST}"):
        manifest.unlink()
    before = files_of(bucket)
    with pytest.raises(ValueError, match=r"(?s)step_000002.*\n.*step_000001.*RL6014"):
        search(config, opened(run, config))
    assert files_of(bucket) == before
    fresh = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"resume": "never"})}
    )
    with pytest.raises(
        ValueError, match=r"found those of an earlier run: step_000001, step_000002"
    ):
        check_url(fresh)


def test_another_url_is_no_new_run(at_url: tuple[Run, Config, Path]) -> None:
    run, config, bucket = at_url
    elsewhere = config.checkpoint.model_copy(update={"url": f"file://{bucket.parent}/other"})
    config = config.model_copy(update={"checkpoint": elsewhere})
    run.storage = replace(run.storage, config=elsewhere)
    with pytest.raises(ValueError, match=r"not below checkpoint\.url=.*RL6007"):
        search(config, opened(run, config))


def test_a_controller_that_comes_back_does_not_take_up_what_was_set_aside(
    at_url: tuple[Run, Config, Path], tmp_path: Path
) -> None:
    run, config, _ = at_url
    shutil.copytree(run.storage.run_dir, tmp_path / "old")
    set_aside(run.storage, 1)
    back = config_of(
        tmp_path / "old", cluster__address="auto", checkpoint__url=config.checkpoint.url
    )
    storage = replace(run.storage, run_dir=tmp_path / "old")
    assert step_found(search(back, opened(replace(run, storage=storage), back))) == 1


def test_what_is_wrong_is_logged_as_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path, 1, 2)
    lost(MANIFEST)(tmp_path / "checkpoints/step_000002")
    find(tmp_path)
    assert [record.levelno for record in caplog.records][:2] == [logging.WARNING] * 2
