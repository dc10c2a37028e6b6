"""The checkpoints that a run writes, and which of the older ones go."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.actors import node_files
from rltrain.controller.checkpoint_space import needed_by_disk
from rltrain.controller.checkpoint_storage import Storage
from rltrain.controller.keep_best import staying
from rltrain.controller.pending_save import Part, PendingSave, whole
from rltrain.controller.remote_records import remove_remote
from rltrain.controller.run_checkpoint import LAST, checkpoints, step_of

if TYPE_CHECKING:
    from rltrain.controller.cluster.policy_group import PolicyGroup
    from rltrain.controller.cluster.worker_group import WorkerGroup
    from rltrain.weights.huggingface.identity import ModelIdentity


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
    pending = begin_save(storage, step, groups, state, least, in_background=False)
    return finish_save(pending, values)


def begin_save(
    storage: Storage,
    step: int,
    groups: Sequence["WorkerGroup[Any]"],
    state: Mapping[str, Any],
    least: int = 0,
    *,
    in_background: bool = True,
) -> PendingSave:
    """As `save`, which ends with `finish_save`. Until then there is no such checkpoint, and no
    other may be begun. In the background, the models may change meanwhile."""
    parts = [whole(group, in_background=in_background) for group in groups]
    needed = needed_by_disk(storage, [node for group in groups for node in group.nodes], least)
    kept = {"step": step, **state}
    pending = PendingSave(storage, f"step_{step:06d}", kept, parts, needed)
    pending.begin()
    return pending


def finish_save(pending: PendingSave, values: Mapping[int, float] | None = None) -> Path:
    """What `begin_save` began is a checkpoint. Arguments and errors as in `save`."""
    target, storage = pending.finish(), pending.storage
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
    saved = storage.folder / f"step_{step:06d}"
    if saved not in checkpoints(storage.run_dir):
        part = Part(policy, policy.save_weights)
        ranks = [storage.disk_of[node] for node in policy.nodes]
        needed = {disk: least * ranks.count(disk) // len(ranks) for disk in dict.fromkeys(ranks)}
        state = {"step": step, "model": model}
        pending = PendingSave(storage, LAST, state, [part], needed)
        pending.begin()
        return pending.finish()
    if storage.remote is not None:  # which has no links: the newest step is the last
        remove_remote(storage.remote / LAST)
    storage.on_disks(storage.all_disks, node_files.link, storage.folder, LAST, saved.name)
    return storage.folder / LAST
