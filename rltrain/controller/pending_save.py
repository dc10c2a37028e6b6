"""A checkpoint that is begun, and not there yet: written beside the old one, proven by a manifest,
and swapped in by rename.

Every rank writes its files into the folder of its own node and takes their hashes. The controller
reads none of them: it commits the manifest, last. Until then there are the older checkpoints alone.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.actors import node_files
from rltrain.config.durable import write_durably
from rltrain.controller.checkpoint_record import SHOWN
from rltrain.controller.checkpoint_space import DiskFull, amount, check_free, is_full
from rltrain.controller.checkpoint_storage import Storage
from rltrain.controller.remote_records import begin_remote, commit_remote, remove_remote
from rltrain.controller.run_checkpoint import STATE
from rltrain.weights.huggingface.manifest import (
    MANIFEST,
    ManifestEntry,
    entries_of,
    write_manifest,
)
from rltrain.weights.huggingface.remote_folder import RemoteFolder

if TYPE_CHECKING:
    from rltrain.controller.cluster.worker_group import WorkerGroup, Written

Entries = dict[str, ManifestEntry]
ANSWER_S = 30.0
"""After an error of the run, how long a rank may take to say that it still works."""


@dataclass(frozen=True)
class Part:
    """What one group of ranks writes into a folder."""

    group: "WorkerGroup[Any]"
    end: Callable[[Path], Sequence["Written"]]
    """Returns once all is written."""
    begin: Callable[[Path], None] | None = None
    """None: ``end`` does it all."""


def whole(group: "WorkerGroup[Any]", *, in_background: bool) -> Part:
    """All that a checkpoint to resume from has of a group."""
    if in_background:
        return Part(group, lambda _: group.end_save(), group.begin_save)
    return Part(group, group.save)


@dataclass(frozen=True)
class PendingSave:
    """Fills a folder beside the one called ``name``, and swaps it in.

    Args:
        state: what is in ``state.json``
        needed: bytes by disk
    """

    storage: Storage
    name: str
    state: Mapping[str, Any]
    parts: Sequence[Part]
    needed: Mapping[str, int]

    @property
    def step(self) -> int:
        step: int = self.state["step"]
        return step

    @property
    def target(self) -> Path:
        return self.storage.folder / self.name

    @property
    def partial(self) -> Path:
        return self.target.with_name(f".{self.name}{node_files.PARTIAL}")

    @property
    def remote(self) -> RemoteFolder | None:
        return None if self.storage.remote is None else self.storage.remote / self.name

    def begin(self) -> None:
        """After this the models may change, if they are written in the background.

        Raises:
            DiskFull: a disk is, or has too little room; nothing was changed.
            RuntimeError: a disk cannot be written; the older checkpoints are untouched.
        """
        storage, state = self.storage, json.dumps(dict(self.state))
        with self._all_or_nothing():
            storage.on_disks(storage.all_disks, node_files.make_ready, storage.folder)
            what = f"checkpoint of step {self.step}"
            check_free(storage.disks, storage.folder, self.needed, what)
            self.partial.mkdir()
            if self.remote is not None:
                begin_remote(self.remote)
            write_durably(self.partial / STATE, state)
            for part in self.parts:
                if part.begin is not None:
                    part.begin(self.partial)

    def is_written(self, limit_s: float | None = None) -> bool:
        """Whether `finish` need not wait for a disk of a rank.

        Raises:
            RuntimeError: a rank is dead or does not answer, within ``limit_s`` where that is given.
        """
        begun = [part.group for part in self.parts if part.begin is not None]
        return all(group.is_written(limit_s) for group in begun)

    def finish(self) -> Path:
        """The checkpoint is there when this returns. Raises as `begin`."""
        entries: Entries = {}
        with self._all_or_nothing():
            for part in self.parts:
                written = part.end(self.partial)
                if self.remote is not None:
                    part.group.upload(self.partial, self.remote.url, written)
                for node, files in zip(part.group.nodes, written, strict=True):
                    url = None if self.remote is None else self.remote.url
                    entries |= _placed(files, self.storage.place(node) if url is None else url)
            entries |= entries_of(self.partial, [STATE])
            if self.remote is not None:
                _commit_remote(self.remote, self.partial, entries)
            _commit(self.storage, self.partial, self.target, entries)
        return self.target

    def drop(self) -> None:
        """It is not finished: nothing of it is left, on the disks that answer."""
        had_begun = self.partial.is_dir()
        self.storage.discard(self.partial)
        if self.remote is not None and had_begun:
            with suppress(RuntimeError):  # the next start removes it
                remove_remote(self.remote)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # a worker's error is an `ActorFailed`
            self.drop()
            full = is_full(error)
            if full:  # and so the ranks are usable
                for part in self.parts:
                    if part.begin is not None:
                        part.group.drop_save()
            raise (DiskFull if full else RuntimeError)(
                f"checkpoint of step {self.step} not written to {self.target}: {error}\n"
                f"It takes {amount(sum(self.needed.values()))}. {self.storage.free()} Older "
                "checkpoints are untouched; go on from the newest with trainer.resume=auto"
                " [RL6005]"
            ) from error


def _placed(files: "Written", place: str | None) -> Entries:
    if place is None:
        return dict(files)
    return {name: {**entry, "place": place} for name, entry in files.items()}


def _commit(storage: Storage, partial: Path, target: Path, entries: Entries) -> None:
    """Other nodes first: once the controller's node has the manifest, all of it is there."""
    write_manifest(partial, entries)
    storage.on_disks([storage.driver], node_files.remove, target)
    if storage.remote is None:
        storage.on_disks(storage.others, node_files.rename_unfinished, partial, target)
    else:  # what was uploaded
        storage.on_disks(storage.others, node_files.remove, partial)
        node_files.keep_only(partial, [STATE, MANIFEST])
    storage.on_disks([storage.driver], node_files.rename, partial, target)
    record = node_files.read_files(target, [STATE, MANIFEST])
    storage.on_disks(storage.others, node_files.finish, target, record)


def _commit_remote(remote: RemoteFolder, partial: Path, entries: Entries) -> None:
    """The manifest last. There it names no places: everything is beside it.

    Raises:
        RuntimeError: what the ranks uploaded is not all there.
    """
    remote.put({STATE: partial / STATE})
    sizes = remote.sizes()
    if lacking := [name for name, e in entries.items() if sizes.get(name) != e["bytes"]]:
        raise RuntimeError(
            f"{remote.url}: expected all {len(entries)} files that the ranks uploaded, found "
            f"{len(entries) - len(lacking)}; missing: {', '.join(lacking[:SHOWN])}. Use a URL that "
            "all nodes share [RL6012]"
        )
    bare = {
        name: ManifestEntry(bytes=e["bytes"], sha256=e["sha256"]) for name, e in entries.items()
    }
    write_manifest(partial, bare)
    commit_remote(remote, partial / MANIFEST)
