"""A checkpoint is written beside the old one, proven by a manifest, and swapped in by rename.

Every rank writes its files into the folder of its own node and takes their hashes. The controller
reads none of them: it commits the manifest, last. Until then there are the older checkpoints alone.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.actors import node_files
from rltrain.config.durable import write_durably
from rltrain.controller.checkpoint_record import SHOWN
from rltrain.controller.checkpoint_space import (
    DiskFull,
    amount,
    check_free,
    is_full,
    needed_by_disk,
)
from rltrain.controller.checkpoint_storage import Storage
from rltrain.controller.keep_best import staying
from rltrain.controller.remote_records import begin_remote, commit_remote, remove_remote
from rltrain.controller.run_checkpoint import LAST, STATE, checkpoints, step_of
from rltrain.weights.huggingface.manifest import (
    MANIFEST,
    ManifestEntry,
    entries_of,
    write_manifest,
)
from rltrain.weights.huggingface.remote_folder import RemoteFolder

if TYPE_CHECKING:
    from rltrain.controller.cluster.policy_group import PolicyGroup
    from rltrain.controller.cluster.worker_group import WorkerGroup, Written
    from rltrain.weights.huggingface.identity import ModelIdentity

Entries = dict[str, ManifestEntry]


def save(
    storage: Storage,
    step: int,
    groups: Sequence["WorkerGroup[Any]"],
    state: Mapping[str, Any],
    least: int = 0,
    values: Mapping[int, float] | None = None,
) -> Path:
    """Write the checkpoint of ``step``. After it is there, those go that are neither among the
    ``checkpoint.keep`` newest nor among the ``checkpoint.keep_best`` best.

    Args:
        groups: each fills its ``folders``
        state: with the `model_of` the run
        least: bytes that it takes by the plan, of all ranks together
        values: of ``checkpoint.best_metric``, by step

    Raises:
        DiskFull: a disk is, or has too little room; nothing was changed.
        RuntimeError: a disk cannot be written; the older checkpoints are untouched.
    """
    parts = [_Part(group, group.save) for group in groups]
    needed = needed_by_disk(storage, [node for group in groups for node in group.nodes], least)
    target = _write(storage, f"step_{step:06d}", {"step": step, **state}, parts, needed)
    saved = {step_of(path): path for path in checkpoints(storage.run_dir)}
    for old in saved.keys() - set(staying(list(saved), values or {}, storage.config)):
        storage.remove(saved[old])
    return target


def save_last(
    storage: Storage, step: int, policy: "PolicyGroup", model: "ModelIdentity", least: int = 0
) -> Path:
    """Leave the weights after ``step``, the run's last, in ``checkpoints/last``.

    Where the checkpoint of that step is there, a link to it; else the policy's parameters alone,
    which can be exported and not resumed.

    Raises:
        RuntimeError: as `save`.
    """
    whole = storage.folder / f"step_{step:06d}"
    if whole not in checkpoints(storage.run_dir):
        part = _Part(policy, policy.save_weights)
        ranks = [storage.disk_of[node] for node in policy.nodes]
        needed = {disk: least * ranks.count(disk) // len(ranks) for disk in dict.fromkeys(ranks)}
        return _write(storage, LAST, {"step": step, "model": model}, [part], needed)
    if storage.remote is not None:  # which has no links: the newest step is the last
        remove_remote(storage.remote / LAST)
    storage.on_disks(storage.all_disks, node_files.link, storage.folder, LAST, whole.name)
    return storage.folder / LAST


@dataclass(frozen=True)
class _Part:
    """What one group of ranks writes into a folder."""

    group: "WorkerGroup[Any]"
    write: Callable[[Path], Sequence["Written"]]


def _write(
    storage: Storage,
    name: str,
    state: Mapping[str, Any],
    parts: Sequence[_Part],
    needed: Mapping[str, int],
) -> Path:
    """Fill a folder beside the one called ``name`` and swap it in.

    Args:
        needed: bytes by disk
    """
    target = storage.folder / name
    partial = target.with_name(f".{name}{node_files.PARTIAL}")
    remote = None if storage.remote is None else storage.remote / name
    try:
        storage.on_disks(storage.all_disks, node_files.make_ready, storage.folder)
        check_free(storage.disks, storage.folder, needed, f"checkpoint of step {state['step']}")
        partial.mkdir()
        if remote is not None:
            begin_remote(remote)
        entries: Entries = {}
        for part in parts:
            written = part.write(partial)
            if remote is not None:
                part.group.upload(partial, remote.url, written)
            for node, files in zip(part.group.nodes, written, strict=True):
                entries |= _placed(files, storage.place(node) if remote is None else remote.url)
        write_durably(partial / STATE, json.dumps(dict(state)))
        entries |= entries_of(partial, [STATE])
        if remote is not None:
            _commit_remote(remote, partial, entries)
        _commit(storage, partial, target, entries)
    except (OSError, RuntimeError) as error:  # a worker's error is an `ActorFailed`
        had_begun = partial.is_dir()
        storage.discard(partial)
        if remote is not None and had_begun:
            with suppress(RuntimeError):  # the next start removes it
                remove_remote(remote)
        kind = DiskFull if is_full(error) else RuntimeError
        raise kind(
            f"checkpoint of step {state['step']} not written to {target}: {error}\n"
            f"It takes {amount(sum(needed.values()))}. {storage.free()} Older checkpoints are "
            "untouched; go on from the newest with trainer.resume=auto"
            " [RL6005]"
        ) from error
    return target


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
