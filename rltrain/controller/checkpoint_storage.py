"""Where the checkpoints of a run are: in a folder that all nodes share, on every node what its own
ranks wrote, or below a URL.

The controller's node has a record of each checkpoint, its manifest and `state.json`: a checkpoint
exists once that is there. The manifest says where the other files are, if not beside it. Other
nodes get a copy of the record, so that a run can go on with its controller elsewhere.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.actors import node_files
from rltrain.config import Config
from rltrain.config.trainer import CheckpointConfig
from rltrain.controller import run_checkpoint as checkpoint
from rltrain.controller.checkpoint_record import SHOWN
from rltrain.controller.cluster.disks import Disks, disks_of
from rltrain.controller.remote_records import (
    is_below,
    put_config,
    remote_steps,
    remove_remote,
    remove_remote_leftovers,
    set_aside_remote,
)
from rltrain.planning.memory_terms import gib
from rltrain.weights.huggingface.manifest import (
    MANIFEST,
    ManifestEntry,
    parse_manifest,
    read_manifest,
)
from rltrain.weights.huggingface.remote_folder import RemoteFolder

if TYPE_CHECKING:
    from rltrain.controller.cluster.ray_cluster import Cluster

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Storage:
    run_dir: Path
    config: CheckpointConfig
    disks: Disks
    disk_of: Mapping[str, str]
    """By node, the node that stands for its disk; see `Disks.shared`."""

    @property
    def folder(self) -> Path:
        """On every node."""
        return self.run_dir / checkpoint.FOLDER

    @property
    def driver(self) -> str:
        """The disk that has the records."""
        return self.disk_of[self.disks.driver]

    @property
    def all_disks(self) -> list[str]:
        """The driver's last: what is there says what exists."""
        return sorted(dict.fromkeys(self.disk_of.values()), key=lambda disk: disk == self.driver)

    @property
    def others(self) -> list[str]:
        return self.all_disks[:-1]

    @property
    def remote(self) -> RemoteFolder | None:
        return None if self.config.url is None else RemoteFolder(self.config.url)

    def on_disks(self, disks: list[str], function: Callable[..., Any], *args: Any) -> None:
        """The same on these disks at once."""
        self.disks.call_each(function, dict.fromkeys(disks, args))

    def place(self, node: str) -> str | None:
        """What a manifest calls the disk of a rank's node; None is the controller's."""
        disk = self.disk_of[node]
        return None if disk == self.driver else disk

    def remove(self, path: Path) -> None:
        """A checkpoint and its files, wherever they are."""
        urls = {url for e in read_manifest(path).values() if "://" in (url := e.get("place", ""))}
        for url in urls:
            remove_remote(RemoteFolder(url))
        self.on_disks([self.driver], node_files.remove, path)
        self.on_disks(self.others, node_files.remove, path)

    def discard(self, partial: Path) -> None:
        """What could not be finished. A node that is gone keeps its part until it is back."""
        for disk in self.all_disks:
            with suppress(RuntimeError):
                self.disks.call(disk, node_files.remove, partial)

    def free(self) -> str:
        """What is free on each disk, the fullest first."""
        found = {}
        for disk in self.all_disks:
            with suppress(RuntimeError):
                found[disk] = self.disks.call(disk, node_files.free_bytes, self.folder)
        if len(self.all_disks) == 1 and found:
            return f"The disk of {self.run_dir} has {gib(found[self.driver])} free."
        fullest = sorted(found, key=lambda disk: found[disk])[:SHOWN]
        listed = ", ".join(f"{gib(found[disk])} on {disk}" for disk in fullest)
        return f"The disks of {self.run_dir} have free: {listed}."


def candidates(storage: Storage) -> list[Path]:
    """The folders of its steps on any disk or below the URL, newest first, whatever is in them."""
    disks = dict.fromkeys(storage.all_disks, (storage.folder,))
    found = storage.disks.call_each(node_files.step_folders, disks)
    names = {name for there in found.values() for name in there}
    if storage.remote is not None:
        names |= remote_steps(storage.remote)
    return checkpoint.in_order(storage.run_dir, names)


def set_aside(storage: Storage, step: int) -> None:
    """The run goes on from ``step``: move what there is of later ones out of its way."""
    newer = [path.name for path in candidates(storage) if checkpoint.step_of(path) > step]
    if not newer:
        return
    if storage.remote is not None:
        set_aside_remote(storage.remote, newer)
    storage.on_disks(storage.all_disks, node_files.set_aside, storage.folder, newer)
    logger.warning(
        "set aside, in %s: %s. Remove them when you do not need them",
        storage.folder / node_files.ASIDE,
        ", ".join(newer),
    )


def local_storage(run_dir: Path, config: CheckpointConfig) -> Storage:
    """Of a run on one machine."""
    disks = Disks("127.0.0.1")
    return Storage(run_dir.absolute(), config, disks, {disks.driver: disks.driver})


def open_storage(config: Config, placed: "Cluster") -> Storage:
    """Find out which nodes share the run's folder, and tidy up what killed processes left.

    Raises:
        ValueError: it is not what ``checkpoint.storage`` says, or a node cannot write there.
        RuntimeError: a node cannot write to ``checkpoint.url``.
    """
    disks = disks_of(config, placed)
    run_dir = Path(config.trainer.output_dir).absolute()
    disk_of = {disks.driver: disks.driver}
    if len(disks.nodes) > 1:
        disk_of = disks.shared(run_dir / checkpoint.FOLDER)
        check_choice(config.checkpoint, run_dir, disk_of)
    storage = Storage(run_dir, config.checkpoint, disks, disk_of)
    if storage.remote is not None:
        check_remote_on_nodes(storage.remote, disks)
        put_config(storage.remote, run_dir)
        remove_remote_leftovers(storage.remote)
    if config.trainer.resumes:
        gather_records(storage)
    else:
        check_no_records(storage)
    return storage


def check_choice(config: CheckpointConfig, run_dir: Path, disk_of: Mapping[str, str]) -> None:
    """The nodes share the folder as ``checkpoint.storage`` says.

    Raises:
        ValueError: they do not.
    """
    nodes: dict[str, list[str]] = defaultdict(list)
    for node, disk in disk_of.items():
        nodes[disk].append(node)
    mixed = 1 < len(nodes) < len(disk_of)
    refused = (config.storage == "shared" and len(nodes) > 1) or (
        config.storage == "auto" and mixed
    )
    if config.url is not None or not refused:
        return
    groups = "; ".join(
        f"{', '.join(same)} {'share' if len(same) > 1 else 'has'} one" for same in nodes.values()
    )
    raise ValueError(
        f"checkpoint.storage={config.storage}: expected {run_dir} on a disk that all nodes share"
        f"{'' if config.storage == 'shared' else ', or on a disk of each node'}, found: {groups}. "
        "Mount the shared file system on every node, or set checkpoint.storage=local to keep each "
        "rank's files on its own node, or checkpoint.url [RL6010]"
    )


def check_remote_on_nodes(remote: RemoteFolder, disks: Disks) -> None:
    """Every node can write below the URL."""
    names = {node: f".node-{number}" for number, node in enumerate(disks.nodes)}
    disks.call_each(write_remote, {node: (remote.url, name) for node, name in names.items()})
    missing = set(names.values()) - remote.sizes().keys()
    remote.remove(names.values())
    if missing:
        lost = [node for node, name in names.items() if name in missing]
        raise ValueError(
            f"checkpoint.url={remote.url}: expected what each node writes there to be seen by all, "
            f"and what {', '.join(lost)} wrote is not: use a URL that all nodes share [RL6012]"
        )


def write_remote(url: str, name: str) -> None:
    RemoteFolder(url).write(name, b"1")


def check_no_records(storage: Storage) -> None:
    """A fresh run finds no checkpoints of another on any node."""
    found = storage.disks.call_each(
        node_files.records, dict.fromkeys(storage.others, (storage.folder,))
    )
    for node, names in found.items():
        if names:
            raise ValueError(
                f"trainer.output_dir={storage.run_dir}: expected a new or empty folder, found the "
                f"checkpoints of an earlier run on {node}: {', '.join(names)}. Set "
                "trainer.resume=auto to go on with it, or choose another folder [RL6002]"
            )


def gather_records(storage: Storage) -> None:
    """Give the controller's node the records of all checkpoints, and remove what was not committed.
    What has no record at all stays: a run does not go on as if it were not there."""
    found = storage.disks.call_each(
        node_files.records, dict.fromkeys(storage.all_disks, (storage.folder,))
    )
    known = sorted({name for names in found.values() for name in names})
    for name in known:
        path = storage.folder / name
        if name in found[storage.driver]:
            continue
        disk = next(disk for disk in storage.others if name in found[disk])
        names = [checkpoint.STATE, MANIFEST]
        record = storage.disks.call(disk, node_files.read_files, path, names)
        with suppress(ValueError):  # `find_checkpoint` says what is wrong with it
            entries = parse_manifest(record[MANIFEST], disk)
            if storage.remote is not None and is_below(storage.remote, entries):
                continue  # the URL alone says what is there
            record[MANIFEST] = moved(entries, disk)
        storage.disks.call(storage.driver, node_files.finish, path, record)
    storage.on_disks(storage.all_disks, node_files.remove_leftovers, storage.folder, known)


def moved(entries: Mapping[str, ManifestEntry], disk: str) -> bytes:
    """The manifest that was written by a controller on another node, of which only the record is
    left: `Storage` looks for the files on all nodes, and this names the node for an error."""
    placed = {name: {**entry, "place": entry.get("place", disk)} for name, entry in entries.items()}
    return json.dumps(placed).encode()
