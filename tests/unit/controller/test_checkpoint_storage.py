"""Checkpoints of ranks on several nodes, on disks that are shared or not, and below a URL.

A node is a folder here, in which it finds the paths of all nodes. tests/hosts has real ones.
"""

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from rltrain.actors import node_files
from rltrain.config import Config
from rltrain.config.errors import ConfigError, validate
from rltrain.config.trainer import CheckpointConfig
from rltrain.controller.checkpoint_storage import (
    Storage,
    check_choice,
    check_no_records,
    gather_records,
)
from rltrain.controller.cluster import disks
from rltrain.controller.cluster.disks import Disks
from rltrain.controller.cluster.model_folders import check_imported_weights, share_folder
from rltrain.controller.find_checkpoint import examine
from rltrain.controller.remote_records import begin_remote, check_url, remove_remote_leftovers
from rltrain.controller.restore_checkpoint import restore
from rltrain.controller.run_checkpoint import checkpoints, last_weights, read_state
from rltrain.controller.save_checkpoint import save, save_last
from rltrain.weights.huggingface.manifest import MANIFEST, ManifestEntry, entries_of, write_manifest
from rltrain.weights.huggingface.remote_folder import RemoteFolder

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


@dataclass(frozen=True)
class Hosts(Disks):
    """Runs in this process what a node is to do, in the folder that stands for its disk."""

    roots: dict[str, Path] = field(default_factory=dict)
    crash: tuple[str, Callable[..., Any]] | None = None
    """On which node, before what, the controller is killed."""

    @property
    def nodes(self) -> list[str]:
        return list(self.roots)

    def at(self, node: str, path: Path) -> Path:
        return path if node == self.driver else self.roots[node] / path.relative_to("/")

    def start(self, node: str, function: Callable[..., Any], *args: Any) -> Any:
        if not self.roots[node].is_dir():
            raise RuntimeError(f"node {node} was lost [RL4020]")
        if (node, function) == self.crash:
            raise KeyboardInterrupt
        return super().start(
            node, function, *(self.at(node, arg) if isinstance(arg, Path) else arg for arg in args)
        )


@dataclass
class Group:
    """A rank on each node; every rank writes its number and reads those of all."""

    hosts: Hosts
    nodes: list[str]
    value: str = ""
    error: Exception | None = None
    folders: tuple[str, ...] = ("policy",)

    def save(self, checkpoint: Path) -> list[dict[str, ManifestEntry]]:
        written = []
        for rank, node in enumerate(self.nodes):
            folder = self.hosts.at(node, checkpoint)
            (folder / "policy").mkdir(parents=True, exist_ok=True)
            name = f"policy/__{rank}_0.distcp"
            (folder / name).write_text(f"{self.value} of {rank}")
            written.append(entries_of(folder, [name]))
        if self.error is not None:
            raise self.error
        return written

    save_weights = save

    def upload(self, checkpoint: Path, url: str, written: list[dict[str, ManifestEntry]]) -> None:
        for node, files in zip(self.nodes, written, strict=True):
            folder = self.hosts.at(node, checkpoint)
            RemoteFolder(url).put({name: folder / name for name in files})

    def load(self, checkpoint: Path) -> None:
        read = set()
        for node in self.nodes:
            folder = self.hosts.at(node, checkpoint) / "policy"
            texts = [path.read_text() for path in sorted(folder.iterdir())]
            read.add(" and ".join(texts))
        (self.value,) = read


@dataclass
class Run:
    storage: Storage
    hosts: Hosts

    def save(self, step: int, nodes: list[str], **group: Any) -> Path:
        group = {"value": f"step {step}", **group}
        return save(self.storage, step, [Group(self.hosts, nodes, **group)], {})  # type: ignore[list-item]

    def load(self, nodes: list[str]) -> str:
        group = Group(self.hosts, nodes)
        record = examine(self.storage, checkpoints(self.storage.run_dir)[-1])
        restore(self.storage, record, [group])  # type: ignore[list-item]
        return group.value

    def files(self, node: str) -> list[str]:
        """Of all checkpoints, with neither records nor links."""
        folder = self.hosts.at(node, self.storage.folder)
        found = [p for p in folder.rglob("*") if p.is_file() and "distcp" in p.name]
        return sorted(str(p.relative_to(folder)) for p in found)


def start(tmp_path: Path, nodes: tuple[str, ...] = (A, B, C), **settings: Any) -> Run:
    """The controller is on A, whose disk is this machine's."""
    roots = {node: tmp_path / "disks" / node for node in nodes}
    for root in roots.values():
        root.mkdir(parents=True, exist_ok=True)
    hosts = Hosts(A, roots=roots)
    run_dir = tmp_path / "run"
    disk_of = hosts.shared(run_dir / "checkpoints")
    return Run(Storage(run_dir, CheckpointConfig(**settings), hosts, disk_of), hosts)


def test_each_node_keeps_what_its_ranks_wrote_and_brings_the_rest(tmp_path: Path) -> None:
    run = start(tmp_path)
    assert run.storage.disk_of == {A: A, B: B, C: C}
    path = run.save(7, [B, C, B])
    assert run.files(A) == []
    assert [name[-10:] for name in run.files(B)] == ["0_0.distcp", "2_0.distcp"]
    places = {n: e.get("place") for n, e in json.loads((path / MANIFEST).read_text()).items()}
    assert list(places.values()) == [B, C, B, None]  # the last is state.json
    whole = "step 7 of 0 and step 7 of 1 and step 7 of 2"
    assert run.load([B, C]) == whole
    assert run.load([C]) == run.load([A]) == whole  # ranks on other nodes
    assert run.files(A) == [] and len(run.files(B)) == 2 and len(run.files(C)) == 1


def test_the_newest_are_kept_on_every_node(tmp_path: Path) -> None:
    run = start(tmp_path, keep=2)
    for step in (1, 2, 3):
        run.save(step, [B, C])
    assert [path.name for path in checkpoints(run.storage.run_dir)] == [
        "step_000002",
        "step_000003",
    ]
    for node in (B, C):
        assert {name.split("/")[0] for name in run.files(node)} == {"step_000002", "step_000003"}
    save_last(run.storage, 3, Group(run.hosts, [B, C]), {})  # type: ignore[arg-type]
    for node in (A, B, C):
        last = run.hosts.at(node, run.storage.folder / "last")
        assert last.is_symlink() and (last / MANIFEST).is_file()


def test_the_last_weights_alone_stay_on_their_nodes(tmp_path: Path) -> None:
    run = start(tmp_path)
    save_last(run.storage, 3, Group(run.hosts, [B, C], "weights"), {})  # type: ignore[arg-type]
    last = last_weights(run.storage.run_dir)
    assert last is not None and read_state(last)["step"] == 3
    assert run.files(B) == ["last/policy/__0_0.distcp"]


def test_a_node_that_is_gone_is_named_with_its_files(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.save(7, [B, C])
    left = replace(run.hosts, roots={n: run.hosts.roots[n] for n in (A, B)})
    storage = replace(run.storage, disks=left, disk_of={A: A, B: B})
    with pytest.raises(ValueError, match=rf"1 of its 3 files are on node {C}.*__1_0\.distcp"):
        Run(storage, left).load([B])


def test_a_full_disk_is_named_and_leaves_the_older_ones(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.save(1, [B, C])
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RuntimeError, match=rf"step 2 not written.*\n.*GiB on {B}.*Older checkp"):
        run.save(2, [B, C], error=full)
    assert [path.name for path in checkpoints(run.storage.run_dir)] == ["step_000001"]
    for node in (A, B, C):
        folder = run.hosts.at(node, run.storage.folder)
        assert [path.name for path in folder.iterdir()] == ["step_000001"]
    assert run.load([B, C]) == "step 1 of 0 and step 1 of 1"


def rename_at(node: str) -> Callable[..., Any]:
    return node_files.rename if node == A else node_files.rename_unfinished


@pytest.mark.parametrize("at", [B, C, A])
def test_a_crash_between_the_nodes_leaves_the_older_checkpoint(at: str, tmp_path: Path) -> None:
    """Some nodes have renamed theirs, the controller has not."""
    run = start(tmp_path)
    run.save(1, [B, C])
    crashing = replace(run.hosts, crash=(at, rename_at(at)))
    with pytest.raises(KeyboardInterrupt):
        Run(replace(run.storage, disks=crashing), crashing).save(2, [B, C])
    if at == A:
        assert "step_000002/policy/__0_0.distcp" in run.files(B)
    gather_records(run.storage)
    assert run.files(B) == ["step_000001/policy/__0_0.distcp"]
    assert run.load([B, C]) == "step 1 of 0 and step 1 of 1"
    assert [path.name for path in run.storage.folder.iterdir()] == ["step_000001"]


def test_a_controller_on_another_node_goes_on(tmp_path: Path) -> None:
    """The old one's disk is lost, and with it no rank's files."""
    run = start(tmp_path)
    run.save(1, [B, C])
    run.save(2, [B, C])
    shutil.rmtree(run.storage.folder)
    assert checkpoints(run.storage.run_dir) == []
    gather_records(run.storage)
    assert run.load([C, A]) == "step 2 of 0 and step 2 of 1"


def test_a_fresh_run_does_not_meet_an_earlier_one_on_a_node(tmp_path: Path) -> None:
    run = start(tmp_path)
    check_no_records(run.storage)
    run.save(1, [B, C])
    with pytest.raises(ValueError, match=rf"earlier run on {B}: step_000001"):
        check_no_records(run.storage)


def damaged(node: str, change: Callable[[Path], Any]) -> Callable[[Run], None]:
    def damage(run: Run) -> None:
        folder = run.hosts.at(node, run.storage.folder) / "step_000007/policy"
        change(folder / f"__{[B, C].index(node)}_0.distcp")

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damaged(B, lambda path: path.write_text("step 8 of 0")), rf"on node {B}.*its content"),
        (damaged(C, lambda path: path.write_text("step 8 of 1")), r"__1_0.*its content is not"),
        (damaged(B, lambda path: path.write_text("")), rf"on {B}/.*its content is not"),
        (damaged(B, lambda path: path.unlink()), rf"on {B}: .* missing \['policy/__0_0"),
        (damaged(B, lambda path: path.with_name("x").write_text("1")), rf"on {B}: .* unknown"),
    ],
)
def test_nothing_damaged_is_opened_on_any_node(
    damage: Callable[[Run], None], said: str, tmp_path: Path
) -> None:
    run = start(tmp_path)
    run.save(7, [B, C])
    damage(run)
    with pytest.raises(ValueError, match=said):
        run.load([B])


def test_what_is_shared_is_found_by_tokens(tmp_path: Path) -> None:
    run = start(tmp_path)
    folder = run.hosts.roots[C] / str(run.storage.folder).lstrip("/")
    folder.parent.mkdir(parents=True, exist_ok=True)
    at_b = run.hosts.at(B, run.storage.folder)
    at_b.mkdir(parents=True)
    folder.symlink_to(at_b)
    shared = run.hosts.shared(run.storage.folder)
    assert shared == {A: A, B: B, C: B}
    run.storage = replace(run.storage, disk_of=shared)
    run.save(7, [B, C, C])
    assert len(run.files(B)) == 3
    assert run.load([B, C]).count("step 7") == 3
    assert list(run.storage.folder.glob("*token*")) == []


@pytest.mark.parametrize(
    ("storage", "disk_of", "refused"),
    [
        ("auto", {A: A, B: A}, False),
        ("auto", {A: A, B: B}, False),
        ("auto", {A: A, B: B, C: B}, True),
        ("shared", {A: A, B: A}, False),
        ("shared", {A: A, B: B}, True),
        ("local", {A: A, B: B, C: B}, False),
    ],
)
def test_the_choice(storage: Any, disk_of: dict[str, str], refused: bool, tmp_path: Path) -> None:
    config = CheckpointConfig(storage=storage)
    if refused:
        with pytest.raises(ValueError, match=rf"found: {A} has one; .*{B}"):
            check_choice(config, tmp_path, disk_of)
    else:
        check_choice(config, tmp_path, disk_of)


# Folders of models


def test_a_folder_goes_in_pieces_to_the_nodes_that_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "PIECE_BYTES", 16)
    hosts, folder = start(tmp_path).hosts, tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    content = {"config.json": b"{}", "empty": b"", "more/weights": bytes(range(200))}
    for name, data in content.items():
        (folder / name).write_bytes(data)
    kept = hosts.at(C, folder)
    kept.mkdir(parents=True)
    share_folder(hosts, folder)
    at_b = hosts.at(B, folder)
    assert {n: (at_b / n).read_bytes() for n in content} == content
    assert [path.name for path in at_b.parent.iterdir() if path.name.startswith(".")] == []
    assert list(kept.iterdir()) == []


def test_imported_weights_are_the_same_and_whole_on_every_node(tmp_path: Path) -> None:
    hosts, folder = start(tmp_path).hosts, tmp_path / "weights"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(bytes(100))
    write_manifest(folder)
    config = Config.model_validate(
        {"cluster": {"address": "auto"}, "model": {"path": str(tmp_path), "weights": str(folder)}}
    )
    with pytest.raises(ValueError, match=rf"on node {B}.*found none \[RL6004\]"):
        check_imported_weights(config, hosts)
    for node in (B, C):
        shutil.copytree(folder, hosts.at(node, folder))
    check_imported_weights(config, hosts)
    other = hosts.at(C, folder) / "__0_0.distcp"
    other.write_bytes(bytes(99) + b"1")
    with pytest.raises(ValueError, match=rf"on node {C}.*its content is not"):
        check_imported_weights(config, hosts)
    write_manifest(other.parent)
    with pytest.raises(ValueError, match=rf"another on {C} than on {hosts.driver}.*RL6013"):
        check_imported_weights(config, hosts)


# URLs


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Of an S3 server on this machine."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIA-of-a-test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
        fsspec.filesystem("s3").mkdir("rltrain-test")
        yield "s3://rltrain-test"
    fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "s3":
        yield f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    else:
        yield f"file://{tmp_path}/bucket/run"


def resuming(run: Run, url: str) -> Config:
    trainer = {"output_dir": str(run.storage.run_dir), "resume": "auto"}
    return Config.model_validate({"trainer": trainer, "checkpoint": {"url": url}})


def test_a_run_goes_on_from_a_url_on_empty_disks(url: str, tmp_path: Path) -> None:
    run = start(tmp_path, url=url, keep=2)
    for step in (1, 2, 3):
        run.save(step, [B, C])
    assert [run.files(node) for node in (A, B, C)] == [[], [], []]
    remote = RemoteFolder(url)
    assert {name.split("/")[0] for name in remote.sizes()} == {"step_000002", "step_000003"}
    begin_remote(remote / "step_000009")
    remote.write("step_000009/policy/__0_0.distcp", b"of a killed run")
    shutil.rmtree(run.storage.run_dir)
    shutil.rmtree(tmp_path / "disks")
    run = start(tmp_path, url=url)
    check_url(resuming(run, url))
    remove_remote_leftovers(remote)
    assert {name.split("/")[0] for name in remote.sizes()} == {"step_000002", "step_000003"}
    assert run.load([B, C]) == "step 3 of 0 and step 3 of 1"
    assert [run.files(node) for node in (A, B, C)] == [[], [], []]
    save_last(run.storage, 3, Group(run.hosts, [B]), {})  # type: ignore[arg-type]
    assert last_weights(run.storage.run_dir) is not None


def test_what_was_changed_at_the_url_is_not_opened(url: str, tmp_path: Path) -> None:
    run = start(tmp_path, url=url)
    run.save(3, [B, C])
    RemoteFolder(url).write("step_000003/policy/__1_0.distcp", b"step 4 of 1")
    with pytest.raises(ValueError, match=r"__1_0\.distcp: its content is not what"):
        run.load([B])
    assert run.files(B) == []


def test_only_the_runs_own_url_is_opened_unless_it_is_trusted(url: str, tmp_path: Path) -> None:
    run = start(tmp_path, url=url)
    run.save(3, [B, C])
    for other in (None, f"{url}2"):
        moved = replace(run.storage, config=CheckpointConfig(url=other))
        with pytest.raises(ValueError, match=r"not below checkpoint\.url=.*checkpoint\.trust=true"):
            Run(moved, run.hosts).load([B])
    moved = replace(run.storage, config=CheckpointConfig(url=f"{url}2", trust=True))
    assert Run(moved, run.hosts).load([B]) == "step 3 of 0 and step 3 of 1"


def test_a_fresh_run_does_not_write_over_another(url: str, tmp_path: Path) -> None:
    run = start(tmp_path, url=url)
    config = resuming(run, url)
    fresh = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"resume": "never"})}
    )
    check_url(fresh)
    run.save(3, [B, C])
    with pytest.raises(ValueError, match=r"expected no checkpoints there, found .*: step_000003"):
        check_url(fresh)


def test_an_upload_that_others_do_not_see_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with memory:// in a rank's own process."""
    run = start(tmp_path, url=f"file://{tmp_path}/bucket")
    monkeypatch.setattr(Group, "upload", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"all 3 files that the ranks uploaded, found 1; miss"):
        run.save(3, [B, C])
    assert checkpoints(run.storage.run_dir) == [] and run.files(B) == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("bucket/run", "expected a URL such as s3://"),
        ("s3://", "expected a URL such as s3://"),
        ("s3://AKIA:hush-hush@bucket/run", "without a user and password"),
        ("https://host/run?sig=hush-hush", r"without a \? or #"),
    ],
)
def test_a_url_holds_no_credentials(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        validate({"checkpoint": {"url": url}})
    assert "hush" not in str(refused.value)


def test_a_bucket_that_is_not_there_is_named(bucket: str, tmp_path: Path) -> None:
    run = start(tmp_path, url=f"{bucket}-2/run")
    with pytest.raises(RuntimeError, match=r"cannot write there: .*RL6012") as refused:
        check_url(resuming(run, f"{bucket}-2/run"))
    assert "hush" not in str(refused.value)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ValueError, match=r"gs://bucket/run: .* pip install gcsfs .*RL6012"):
        RemoteFolder("gs://bucket/run").sizes()
    with pytest.raises(ValueError, match=r"nosuch://.*use s3://"):
        RemoteFolder("nosuch://bucket").sizes()
