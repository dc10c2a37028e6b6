"""On which node each part of a layout is. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rltrain.config.policy import ParallelConfig


@dataclass(frozen=True)
class NodeLayout:
    """The ranks of a policy or critic, with their nodes."""

    parallel: ParallelConfig
    nodes: Sequence[str]
    """By rank."""

    @property
    def stage_size(self) -> int:
        return self.parallel.world_size // self.parallel.pp

    def stage(self, number: int) -> range:
        """The ranks of a pipeline stage."""
        return range(number * self.stage_size, (number + 1) * self.stage_size)

    def shard_nodes(self, stage: int, shard: int) -> set[str]:
        """Those that hold ranks of a data-parallel shard in a stage."""
        size = self.parallel.tp * self.parallel.cp
        return {self.nodes[rank] for rank in self.stage(stage)[shard * size : (shard + 1) * size]}

    def copies(self, stage: int, width: int) -> Iterator[range]:
        """Groups of ranks that hold the same parameters: every ``width``-th of a stage."""
        ranks = self.stage(stage)
        return (ranks[first::width] for first in range(width))

    def hops(self) -> Iterator[tuple[str, str]]:
        """(from, to) of each activation that moves on, by chunk, stage and rank of the stage."""
        size, world = self.stage_size, self.parallel.world_size
        for chunk in range(self.parallel.vpp):
            last = chunk == self.parallel.vpp - 1
            for rank in range(world - size if last else world):
                yield self.nodes[rank], self.nodes[(rank + size) % world]

    def crossing(self) -> list[str]:
        """Kinds of groups that should lie on one node each and do not, innermost first."""
        p = self.parallel
        blocks = {
            "tp": (p.tp, p.tp),
            "cp": (p.cp, p.tp * p.cp),
            "etp": (p.etp, p.etp),
            "ep": (p.ep, p.etp * p.ep),
        }
        return [
            name
            for name, (size, block) in blocks.items()
            if size > 1
            and any(
                len(set(self.nodes[first : first + block])) > 1
                for first in range(0, p.world_size, block)
            )
        ]
