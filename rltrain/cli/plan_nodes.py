"""The nodes that ``rltrain plan`` plans for: those of the command line, or of a live cluster."""

import re
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

from rltrain.config import Config
from rltrain.planning.machine import GPUS_OF_A_NODE
from rltrain.planning.nodes import Node, planned_nodes

AUTO = "auto"
_ADDRESS = re.compile(r"auto|[^=+]+:\d+")
_NODES = re.compile(r"(\d+)(?:x(\d+))?")


class PlanCommand(TyperCommand):
    """Its ``--cluster`` may stand without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = []
        for word, following in zip(args, [*args[1:], ""], strict=True):
            alone = word == "--cluster" and not _ADDRESS.fullmatch(following)
            words.append(f"--cluster={AUTO}" if alone else word)
        return super().parse_args(ctx, words)


@dataclass(frozen=True)
class AskedNodes:
    """What the options say."""

    gpus: int | None = None
    nodes: str | None = None
    cluster: str | None = None

    def read(self, config: Config) -> tuple[tuple[Node, ...] | None, str | None]:
        """The nodes, None where nothing is said of them, and that of the driver where it is known.

        Raises:
            ValueError: options contradict each other or cannot be read.
            RuntimeError: the cluster cannot be joined.
        """
        if self.cluster is not None:
            if self.gpus is not None or self.nodes is not None:
                raise ValueError(
                    "--cluster plans on the nodes that are there, and --gpus and --nodes on "
                    "others: drop one of them [RL1002]"
                )
            return _live(config, self.cluster)
        if self.nodes is not None:
            return self._listed(on_cpus=config.cluster.device == "cpu"), None
        if self.gpus is not None:
            return tuple(planned_nodes(self.gpus, GPUS_OF_A_NODE)), None
        return None, None

    def _listed(self, *, on_cpus: bool) -> tuple[Node, ...]:
        assert self.nodes is not None
        sizes: list[int] = []
        for part in self.nodes.split(","):
            found = _NODES.fullmatch(part.strip())
            if found is None or not int(found[1]) or (found[2] and self.gpus is not None):
                raise ValueError(
                    f"--nodes {self.nodes}: expected a number of nodes, with --gpus on each "
                    f"(default {GPUS_OF_A_NODE}), or how many of which size, as in 4x8 or 4x8,2x4"
                    " [RL1002]"
                )
            each = int(found[2]) if found[2] else self.gpus or GPUS_OF_A_NODE
            sizes += [each] * int(found[1])
        names = [f"node-{n}" for n in range(len(sizes))]
        if on_cpus:
            return tuple(
                Node(name, cpus=size, total_cpus=size)
                for name, size in zip(names, sizes, strict=True)
            )
        return tuple(
            Node(name, gpus=size, total_gpus=size) for name, size in zip(names, sizes, strict=True)
        )


def _live(config: Config, address: str) -> tuple[tuple[Node, ...], str]:
    from rltrain.controller.cluster.ray_nodes import read_nodes
    from rltrain.controller.cluster.running_ray import running_ray

    if address == AUTO:
        address = config.cluster.address or AUTO
    with running_ray(address):
        found = read_nodes()
    return found.nodes, found.driver
