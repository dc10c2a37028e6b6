"""The model's folder is on every node that has ranks or engines: checked, or brought there."""

from pathlib import Path
from typing import TYPE_CHECKING

from rltrain.actors import node_files
from rltrain.config import Config
from rltrain.config.model import ModelConfig
from rltrain.controller.cluster.disks import Disks
from rltrain.weights.huggingface.folder_digest import folder_digest
from rltrain.weights.huggingface.manifest import check_manifest

if TYPE_CHECKING:
    from rltrain.controller.cluster.policy_group import PolicyGroup

SHOWN = 3


def check_model_folders(config: Config, disks: Disks) -> None:
    """Every node has the files of ``model.path`` and ``model.weights`` as this one has them.

    Imported weights, which are pickles, are read and verified as a whole on each disk.

    Raises:
        ValueError: one has not; it is named.
    """
    if config.cluster.address is None or config.model.path is None:
        return  # the preflight has read them
    check_same(disks, "model.path", Path(config.model.path).expanduser().absolute())
    if (weights := _imported(config.model)) is not None:
        check_same(disks, "model.weights", weights)
        disks.call_all(check_manifest, weights)


def _imported(model: ModelConfig) -> Path | None:
    return None if model.weights is None else Path(model.weights).expanduser().absolute()


def check_same(disks: Disks, key: str, folder: Path) -> None:
    """All nodes have the same folder, by `folder_digest`."""
    digests = disks.call_all(folder_digest, folder)
    expected = digests[disks.driver]
    for node, found in digests.items():
        if not found:
            raise ValueError(
                f"{key}={folder}: expected this folder on every node that has ranks or engines, "
                f"found none on {node}. Copy it there, or put it on a disk that all nodes share "
                "[RL6013]"
            )
        names = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        if names:
            listed = "; ".join(
                f"{name}: {expected.get(name, 'absent')} on {disks.driver}, "
                f"{found.get(name, 'absent')} on {node}"
                for name in names[:SHOWN]
            )
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise ValueError(
                f"{key}={folder}: expected the same files on every node, found others on {node}: "
                f"{listed}{more}. Copy the folder to {node} again [RL6013]"
            )


def share_folder(disks: Disks, folder: Path) -> Path:
    """Bring a folder of this node, such as the tiny model's, to the nodes that lack it."""
    disks.copy_folder(folder.absolute(), disks.driver, disks.nodes)
    return folder


def export_here(policy: "PolicyGroup", disks: Disks, path: Path, dtype: str) -> None:
    """As `PolicyGroup.export`, on this node: rank 0 writes on its own."""
    path = path.absolute()
    policy.export(str(path), dtype)
    node = policy.nodes[0]
    if node == disks.driver or disks.shared(path.parent)[node] == disks.driver:
        return
    disks.copy_folder(path, node, [disks.driver])
    disks.call(node, node_files.remove, path)
