"""The checkpoint that a run goes on from is found and proven whole before any engine is loaded.

Megatron's format holds pickles, which run code when opened. So a checkpoint is opened only if every
file is what its manifest says and it is this run's own, or ``checkpoint.trust`` is set. Only what
is below a URL is read later, as it is fetched (`restore_checkpoint`).

Nothing is removed: what is wrong with a newer checkpoint is said, and it is set aside once an older
one is proven whole (`checkpoint_storage.set_aside`).
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rltrain.actors import node_files
from rltrain.config import Config
from rltrain.controller.checkpoint_record import (
    SHOWN,
    Entries,
    Record,
    Sizes,
    check_found,
    find_sources,
    read_record,
)
from rltrain.controller.checkpoint_storage import Storage, candidates, set_aside
from rltrain.controller.checks.model_checks import read_model
from rltrain.controller.choose_checkpoint import changes_of, choose, require
from rltrain.controller.resume_changes import Changes, check_changes
from rltrain.controller.run_checkpoint import check_model, model_of
from rltrain.weights.huggingface.identity import ModelIdentity
from rltrain.weights.huggingface.manifest import ManifestEntry, check_files
from rltrain.weights.huggingface.remote_folder import RemoteFolder, is_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """What a run starts from."""

    model: ModelIdentity
    record: Record | None = None
    """Of the checkpoint; None in a fresh run."""
    changes: Changes = field(default_factory=dict)
    """Of the configuration, since that checkpoint."""


def find_checkpoint(config: Config, storage: Storage) -> Found:
    """What the run of ``config`` goes on from, as `search` finds it; what is newer is set aside.

    So a run that is started again, or killed before its first step, goes on from there, too.
    """
    found = search(config, storage)
    if found.record is not None:
        set_aside(storage, found.record.step)
    return found


def search(config: Config, storage: Storage) -> Found:
    """What the run of ``config`` goes on from, on whatever disks its files are.

    Raises:
        ValueError: no checkpoint is whole, the one to go on from is of another model or not
            trusted, or keys were changed that change what it means.
    """
    model = model_of(config, read_model(config))
    if not config.trainer.resumes:
        return Found(model)
    choice = choose(config, candidates(storage), partial(examine, storage))
    require(config, choice)
    if (record := choice.record) is None:
        return Found(model)
    for fault in choice.faults:
        logger.warning("PASSED OVER, IT IS NOT WHOLE: %s", fault)
    if choice.faults:
        logger.warning("going on from the checkpoint of step %d instead", record.step)
    check_model(record.path, model, trust=config.checkpoint.trust)
    changes = changes_of(config, record)
    check_changes(changes, config, record.step)
    return Found(model, record, changes)


def examine(storage: Storage, path: Path) -> Record:
    """The record of a checkpoint, all files of which are what its manifest says.

    Raises:
        ValueError: one is not, it is not from this run and not trusted, or a node that has files of
            it is gone.
        RuntimeError: a disk or URL cannot be read.
    """
    record = read_record(path)
    check_own(storage, record)
    sizes = sizes_on_disks(storage, record)
    somewhere = {name for names in sizes.values() for name in names}
    absent = [name for name in record.entries if name not in somewhere]
    for url, names in find_sources(path, record.entries, sizes, absent).items():
        check_remote(RemoteFolder(url), record.entries, names)
    verify(storage, record, sizes)
    return record


def check_own(storage: Storage, record: Record) -> None:
    """Raise ValueError unless the checkpoint is this run's own, or trusted."""
    if storage.config.trust:
        return
    path, strange = record.path, None
    if storage.folder.resolve() not in path.resolve().parents:
        strange = f"{path} is not from this run's folder {storage.run_dir}"
    own = storage.config.url
    for url in {e.get("place", "") for e in record.entries.values()}:
        if is_url(url) and (own is None or not url.startswith(f"{own.rstrip('/')}/")):
            strange = f"{path} has its files in {url}, which is not below checkpoint.url={own}"
    if strange is not None:
        raise ValueError(
            f"{strange}. A checkpoint holds pickles, which "
            "can run any code: set checkpoint.trust=true only if you know who wrote it"
            " [RL6007]"
        )


def sizes_on_disks(storage: Storage, record: Record) -> Sizes:
    """What each disk has of a checkpoint.

    Raises:
        ValueError: as `check_found`.
    """
    disks = dict.fromkeys(storage.all_disks, (record.path,))
    found = storage.disks.call_each(node_files.sizes_of, disks)
    sizes = {disk: names or {} for disk, names in found.items()}
    check_found(record.path, record.entries, sizes)
    return sizes


def check_remote(remote: RemoteFolder, entries: Entries, names: Sequence[str]) -> None:
    """Raise ValueError unless these files are below the URL, with their sizes."""
    sizes = remote.sizes()
    if bad := [name for name in names if sizes.get(name) != entries[name]["bytes"]]:
        raise ValueError(
            f"{remote.url}: its manifest and its files differ: missing or of another size "
            f"{bad[:SHOWN]}. It was copied in part or changed; use another checkpoint [RL6004]"
        )


def verify(storage: Storage, record: Record, sizes: Sizes) -> None:
    """Each disk's files are what the manifest says: the nodes that see them check a share each."""
    shares: dict[str, dict[str, ManifestEntry]] = defaultdict(dict)
    for disk in storage.all_disks:
        nodes = sorted(node for node, seen in storage.disk_of.items() if seen == disk)
        here = [name for name in record.entries if name in sizes[disk]]
        for name in sorted(here, key=lambda name: -record.entries[name]["bytes"]):
            least = min(nodes, key=lambda node: sum(e["bytes"] for e in shares[node].values()))
            shares[least][name] = record.entries[name]
    storage.disks.call_each(
        check_files, {node: (record.path, share) for node, share in shares.items()}
    )
