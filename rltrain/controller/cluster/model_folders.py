"""What every node with ranks or engines reads of the model: checked, or brought there."""

from pathlib import Path
from typing import TYPE_CHECKING

from rltrain.actors import node_files
from rltrain.config import Config
from rltrain.controller.cluster.disks import Disks
from rltrain.weights.huggingface.manifest import check_manifest, read_manifest

if TYPE_CHECKING:
    from rltrain.controller.cluster.policy_group import PolicyGroup


def check_imported_weights(config: Config, disks: Disks) -> None:
    """Every node has the files of ``model.weights`` as this one has them: they are pickles, and so
    they are verified as a whole on each disk before any is read.

    The preflight compares the folder of ``model.path`` (`rltrain.controller.checks.node_facts`).

    Raises:
        ValueError: one has not; it is named.
    """
    if config.cluster.address is None or config.model.weights is None:
        return  # the preflight has read them
    weights = Path(config.model.weights).expanduser().absolute()
    manifests = disks.call_all(read_manifest, weights)
    expected = manifests[disks.driver]
    for node, found in manifests.items():
        if names := sorted(n for n in expected | found if expected.get(n) != found.get(n)):
            raise ValueError(
                f"model.weights={weights}: expected the same files on every node, found {names[0]} "
                f"({len(names)} in all) another on {node} than on {disks.driver}. Copy the folder "
                f"to {node} again [RL6013]"
            )
    disks.call_all(check_manifest, weights)


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
