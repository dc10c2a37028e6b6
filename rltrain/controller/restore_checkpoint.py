"""A checkpoint that was examined is opened: the nodes that read it get the files that they lack.

What is fetched is verified where it arrives; all else was before (`find_checkpoint`).
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.actors import node_files
from rltrain.controller.checkpoint_record import Entries, Record, find_sources
from rltrain.controller.checkpoint_storage import Storage
from rltrain.controller.find_checkpoint import sizes_on_disks
from rltrain.controller.run_checkpoint import STATE
from rltrain.planning.memory_terms import gib
from rltrain.weights.huggingface.remote_folder import is_url

if TYPE_CHECKING:
    from rltrain.controller.cluster.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


def restore(storage: Storage, record: Record, groups: Sequence["WorkerGroup[Any]"]) -> None:
    """Load a checkpoint into the groups.

    Args:
        record: as `examine` returned it

    Raises:
        ValueError: a file changed since, or it was saved without a folder of a group.
        RuntimeError: a node has no room for what it has to read.
    """
    path = record.path
    for folder in (folder for group in groups for folder in group.folders):
        if not any(name.startswith(f"{folder}/") for name in record.entries):
            raise ValueError(
                f"{path} was saved by a run without a {folder}: go on with the configuration "
                "of that run, or start anew in another trainer.output_dir"
                " [RL6006]"
            )
    brought = bring(storage, record, {node for group in groups for node in group.nodes})
    for group in groups:
        group.load(path)
    for disk, names in brought.items():
        storage.disks.call(disk, node_files.remove_files, path, names)
    logger.info("resumed after step %d from %s", record.step, path)


def bring(storage: Storage, record: Record, readers: Collection[str]) -> dict[str, list[str]]:
    """Have all files on the disk of every reader.

    Returns:
        by disk, the names of those that were not there before
    """
    path, entries = record.path, record.entries
    sizes = sizes_on_disks(storage, record)
    missing = {
        disk: [name for name in entries if name != STATE and name not in sizes[disk]]
        for disk in sorted({storage.disk_of[node] for node in readers})
    }
    sources = {disk: find_sources(path, entries, sizes, names) for disk, names in missing.items()}
    check_room(storage, path, entries, missing)
    with ThreadPoolExecutor(max(1, len(sources))) as pool:
        for done in [pool.submit(_fetch, storage, path, entries, *of) for of in sources.items()]:
            done.result()
    return {disk: names for disk, names in missing.items() if names}


def check_room(
    storage: Storage, path: Path, entries: Entries, missing: Mapping[str, Sequence[str]]
) -> None:
    for disk, names in missing.items():
        needed = sum(entries[name]["bytes"] for name in names)
        free = storage.disks.call(disk, node_files.free_bytes, path) if needed else 0
        if needed > free:
            raise RuntimeError(
                f"{path}: the ranks on {disk} read {gib(needed)} that are not there, and its disk "
                f"has {gib(free)} free: make room, or choose another trainer.output_dir [RL6005]"
            )


def _fetch(
    storage: Storage, path: Path, entries: Entries, disk: str, sources: Mapping[str, Sequence[str]]
) -> None:
    """Bring files to one disk; they are in place once their hashes are right."""
    if not sources:
        return
    incoming = path.with_name(f".{path.name}.incoming{node_files.PARTIAL}")
    wanted = {name: entries[name] for names in sources.values() for name in names}
    try:
        _receive(storage, path, entries, disk, sources, incoming)
        storage.disks.call(disk, node_files.take_in, incoming, path, wanted)
    except (RuntimeError, ValueError):
        with suppress(RuntimeError):  # its own error is the one to show
            storage.disks.call(disk, node_files.remove, incoming)
        raise


def _receive(
    storage: Storage,
    path: Path,
    entries: Entries,
    disk: str,
    sources: Mapping[str, Sequence[str]],
    incoming: Path,
) -> None:
    for source, names in sources.items():
        logger.info("%d files of %s come from %s to %s", len(names), path.name, source, disk)
        if is_url(source):
            storage.disks.call(disk, node_files.download, source, list(names), incoming)
        else:
            sizes = {name: entries[name]["bytes"] for name in names}
            storage.disks.copy(sizes, source, path, disk, incoming)
