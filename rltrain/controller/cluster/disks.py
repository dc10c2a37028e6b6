"""The disks of a run's nodes: who shares a folder with whom, and files from one to another."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from rltrain.actors import node_files
from rltrain.actors.failures import FETCH_S
from rltrain.actors.run_nodes import lost_node
from rltrain.config import Config

if TYPE_CHECKING:
    from rltrain.controller.cluster.ray_cluster import Cluster

T = TypeVar("T")
PIECE_BYTES = 16 * 2**20
POLL_S = 2.0
IN_FLIGHT = 8
"""Pieces between two nodes at once; so many bytes wait in Ray's object store at most."""


def disks_of(config: Config, placed: "Cluster") -> "Disks":
    """Of the nodes that have ranks or engines, and of this one."""
    agents = {node: placed.on_nodes.agents[node] for node in placed.nodes if placed.on_nodes.agents}
    return Disks(placed.driver_node, agents, config.cluster.call_timeout_s)


@dataclass(frozen=True)
class Disks:
    """Runs functions on nodes: through their agents, and in this process on its own node.

    Args:
        driver: the node of this process
        agents: of the other nodes, and of this one where it has ranks
        timeout_s: of one call
    """

    driver: str
    agents: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 7200.0

    @property
    def nodes(self) -> list[str]:
        """The driver's first."""
        return [self.driver, *(node for node in self.agents if node != self.driver)]

    def call(self, node: str, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` on one node; see `call_each`."""
        return self.call_each(function, {node: args})[node]

    def call_each(
        self, function: Callable[..., T], args: Mapping[str, Sequence[Any]]
    ) -> dict[str, T]:
        """``function(*args[node])`` on these nodes at once; results by node.

        Raises:
            ValueError, RuntimeError: as the function raised it, with the name of the node; OSError
                becomes a RuntimeError. Or a node is dead or does not answer.
        """
        started = {node: self.start(node, function, *given) for node, given in args.items()}
        return {node: self.wait(node, answer) for node, answer in started.items()}

    def call_all(self, function: Callable[..., T], *args: Any) -> dict[str, T]:
        """The same on every node."""
        return self.call_each(function, dict.fromkeys(self.nodes, args))

    def start(self, node: str, function: Callable[..., Any], *args: Any) -> Any:
        """Begin a call; an argument may be what another call was begun with."""
        if node in self.agents:
            return self.agents[node].call.remote(function, *args)
        try:
            return function(*(self.wait(node, arg) for arg in args))
        except (OSError, ValueError, RuntimeError) as error:
            raise self._named(node, error) from error

    def wait(self, node: str, answer: Any) -> Any:
        """What a begun call returned."""
        if not isinstance(answer, ray.ObjectRef):
            return answer
        end = time.monotonic() + self.timeout_s
        while not ray.wait([answer], timeout=POLL_S)[0]:
            if lost := lost_node():
                raise RuntimeError(f"node {node}, files: {lost}")
            if time.monotonic() > end:
                raise RuntimeError(
                    f"node {node}: expected an answer about its files within {self.timeout_s:g} s; "
                    "see `ray status`, or raise cluster.call_timeout_s [RL4022]"
                )
        try:
            return ray.get(answer, timeout=FETCH_S)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise self._named(node, cause) from error
        except RayError as error:
            raise RuntimeError(f"node {node} was lost: {error} [RL4020]") from error

    def _named(self, node: str, error: Exception) -> Exception:
        if not isinstance(error, OSError | ValueError | RuntimeError):
            return error
        text = str(error) if len(self.nodes) == 1 else f"on node {node}: {error}"
        return ValueError(text) if isinstance(error, ValueError) else RuntimeError(text)

    # Which nodes share a disk

    def shared(self, folder: Path) -> dict[str, str]:
        """By node, the first of all nodes that has the same ``folder``: the one that stands for the
        disk. A token written on each is looked for on all. The folder is made.

        Raises:
            ValueError: a node cannot write there.
        """
        mark = secrets.token_hex(4)
        tokens = {
            node: f".node-{mark}-{n}{node_files.PARTIAL}" for n, node in enumerate(self.nodes)
        }
        written = self.call_each(
            node_files.write_token, {node: (folder, token) for node, token in tokens.items()}
        )
        if bad := {node: why for node, why in written.items() if why is not None}:
            node, why = next(iter(bad.items()))
            raise ValueError(
                f"{folder}: expected a folder that can be written on every node, found on {node}: "
                f"{why}. Choose a trainer.output_dir that all nodes can write [RL6001]"
            )
        seen = self.call_all(node_files.seen_tokens, folder, list(tokens.values()))
        self.call_each(
            node_files.remove_files, {node: (folder, [token]) for node, token in tokens.items()}
        )
        return {
            node: next(first for first in self.nodes if tokens[first] in seen[node])
            for node in self.nodes
        }

    # Files from node to node

    def copy(
        self, sizes: Mapping[str, int], source: str, source_folder: Path, to: str, folder: Path
    ) -> None:
        """Write files of ``source_folder`` on one node into ``folder`` on another.

        Args:
            sizes: bytes by name
        """
        waiting: list[Any] = []
        for name, size in sizes.items():
            for start in range(0, max(size, 1), PIECE_BYTES):
                read = (source_folder / name, start, min(PIECE_BYTES, size - start))
                piece = self.start(source, node_files.read_piece, *read)
                waiting.append(self.start(to, node_files.write_piece, folder / name, start, piece))
                if len(waiting) == IN_FLIGHT:
                    self.wait(to, waiting.pop(0))
        for answer in waiting:
            self.wait(to, answer)

    def copy_folder(self, folder: Path, source: str, targets: Sequence[str]) -> None:
        """Bring ``folder`` as it is on ``source`` to the same place on nodes that do not have it.

        It appears complete or not at all. What is on a node of the same name is not looked into.
        """
        missing = [n for n in targets if n != source and not self.call(n, Path.is_dir, folder)]
        if not missing:
            return
        sizes = self.call(source, node_files.sizes_of, folder)
        assert sizes is not None, f"{folder} was written on {source}"
        for node in missing:
            partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{node_files.PARTIAL}")
            self.copy(sizes, source, folder, node, partial)
            self.call(node, node_files.rename, partial, folder)
