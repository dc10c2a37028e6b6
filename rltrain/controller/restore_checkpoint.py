"""A checkpoint is opened: its files are brought to the nodes that read them, and verified there.

Megatron's format holds pickles, which run code when opened. So a checkpoint is opened only if every
file is what its manifest says and it is this run's own, or ``checkpoint.trust`` is set.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.actors import node_files
from rltrain.controller.checkpoint_storage import SHOWN, Storage
from rltrain.controller.run_checkpoint import STATE, read_state
from rltrain.planning.memory_terms import gib
from rltrain.weights.huggingface.manifest import (
    MANIFEST,
    ManifestEntry,
    check_files,
    read_manifest,
)
from rltrain.weights.huggingface.remote_folder import is_url

if TYPE_CHECKING:
    from rltrain.controller.cluster.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

Entries = Mapping[str, ManifestEntry]


def restore(storage: Storage, path: Path, groups: Sequence["WorkerGroup[Any]"]) -> dict[str, Any]:
    """Load a checkpoint into the groups; returns the state that was saved with it.

    Raises:
        ValueError: it is not from this run and not trusted, a file is not what it was, it was saved
            without a folder of a group, or a node that has files of it is gone.
        RuntimeError: a node has no room for what it has to read.
    """
    check_own(storage, path)
    entries = read_manifest(path)
    for folder in (folder for group in groups for folder in group.folders):
        if not any(name.startswith(f"{folder}/") for name in entries):
            raise ValueError(
                f"{path} was saved by a run without a {folder}: go on with the configuration "
                "of that run, or start anew in another trainer.output_dir"
                " [RL6006]"
            )
    brought = bring(storage, path, entries, {node for group in groups for node in group.nodes})
    for group in groups:
        group.load(path)
    for disk, names in brought.items():
        storage.disks.call(disk, node_files.remove_files, path, names)
    state = read_state(path)
    logger.info("resumed after step %d from %s", state["step"], path)
    return state


def check_own(storage: Storage, path: Path) -> None:
    """Raise ValueError unless ``path`` is this run's own, or trusted."""
    if storage.config.trust:
        return
    strange = None
    if storage.folder.resolve() not in path.resolve().parents:
        strange = f"{path} is not from this run's folder {storage.run_dir}"
    own = storage.config.url
    for url in {e.get("place", "") for e in read_manifest(path).values()}:
        if is_url(url) and (own is None or not url.startswith(f"{own.rstrip('/')}/")):
            strange = f"{path} has its files in {url}, which is not below checkpoint.url={own}"
    if strange is not None:
        raise ValueError(
            f"{strange}. A checkpoint holds pickles, which "
            "can run any code: set checkpoint.trust=true only if you know who wrote it"
            " [RL6007]"
        )


def bring(
    storage: Storage, path: Path, entries: Entries, readers: Collection[str]
) -> dict[str, list[str]]:
    """Have all files on the disk of every reader, each as the manifest says.

    Returns:
        by disk, the names of those that were not there before
    """
    found = storage.disks.call_each(node_files.sizes_of, dict.fromkeys(storage.all_disks, (path,)))
    sizes = {disk: names or {} for disk, names in found.items()}
    check_found(path, entries, sizes)
    wanted = {name: entry for name, entry in entries.items() if name != STATE}
    missing = {
        disk: [name for name in wanted if name not in sizes[disk]]
        for disk in sorted({storage.disk_of[node] for node in readers})
    }
    sources = {disk: find_sources(path, entries, sizes, names) for disk, names in missing.items()}
    check_room(storage, path, entries, missing)
    verify(storage, path, entries, sizes, readers)
    with ThreadPoolExecutor(max(1, len(sources))) as pool:
        for done in [pool.submit(_fetch, storage, path, entries, *of) for of in sources.items()]:
            done.result()
    return {disk: names for disk, names in missing.items() if names}


def check_found(path: Path, entries: Entries, sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Raise ValueError if a disk has a file that is not of this checkpoint, or of another size."""
    for disk, names in sizes.items():
        at = path if len(sizes) == 1 else f"{path} on {disk}"
        if unknown := sorted(names.keys() - entries.keys() - {MANIFEST}):
            raise ValueError(
                f"{at}: its manifest and its files differ: unknown {unknown[:SHOWN]}. It was "
                "copied in part or changed; use another checkpoint [RL6004]"
            )
        for name, size in names.items():
            if name != MANIFEST and size != entries[name]["bytes"]:
                raise ValueError(
                    f"{at}/{name}: its content is not what {MANIFEST} says; use another "
                    "checkpoint [RL6004]"
                )


def find_sources(
    path: Path, entries: Entries, sizes: Mapping[str, Mapping[str, int]], names: Sequence[str]
) -> dict[str, list[str]]:
    """By the disk or URL that has them, the files that a disk lacks.

    Raises:
        ValueError: a file is nowhere.
    """
    sources, lost = defaultdict(list), defaultdict(list)
    for name in names:
        place = entries[name].get("place", "")
        disk = next((disk for disk, there in sizes.items() if name in there), None)
        if disk is not None:
            sources[disk].append(name)
        elif is_url(place):
            sources[place].append(name)
        else:
            lost[place].append(name)
    for place, files in lost.items():
        if not place:
            raise ValueError(
                f"{path}: its manifest and its files differ: missing {files[:SHOWN]}. It was "
                "copied in part or changed; use another checkpoint [RL6004]"
            )
        listed = ", ".join(files[:SHOWN]) + (", ..." if len(files) > SHOWN else "")
        raise ValueError(
            f"{path}: {len(files)} of its {len(entries)} files are on node {place} alone, and "
            f"no node of this run has them: {listed}. Bring {place} back, copy its {path} to "
            f"another node, or remove {path} to go on from an older checkpoint [RL6011]"
        )
    return dict(sources)


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


def verify(
    storage: Storage,
    path: Path,
    entries: Entries,
    sizes: Mapping[str, Mapping[str, int]],
    readers: Collection[str],
) -> None:
    """Each disk's files are what the manifest says: the nodes that read them check a share each."""
    shares: dict[str, dict[str, ManifestEntry]] = defaultdict(dict)
    for disk in {storage.disk_of[node] for node in readers}:
        nodes = sorted(node for node in set(readers) if storage.disk_of[node] == disk)
        here = [name for name in entries if name in sizes[disk]]
        for name in sorted(here, key=lambda name: -entries[name]["bytes"]):
            least = min(nodes, key=lambda node: sum(e["bytes"] for e in shares[node].values()))
            shares[least][name] = entries[name]
    storage.disks.call_each(check_files, {node: (path, share) for node, share in shares.items()})
    check_files(path, {STATE: entries[STATE]})  # which this process reads


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
