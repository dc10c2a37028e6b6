"""A rank's position in the process grid, on the axes that divide a model's weights."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class AxisPosition:
    """This rank's position on one axis. ``group`` is None if ``size`` is 1."""

    rank: int = 0
    size: int = 1
    group: "ProcessGroup | None" = field(default=None, compare=False)


class Grid(Protocol):
    """The part of `rltrain.policy.megatron.mesh.Mesh` that this package reads."""

    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def tp_group(self) -> "ProcessGroup": ...
    @property
    def etp_rank(self) -> int: ...
    @property
    def etp_size(self) -> int: ...
    @property
    def etp_group(self) -> "ProcessGroup": ...
    @property
    def ep_rank(self) -> int: ...
    @property
    def ep_size(self) -> int: ...
    @property
    def ep_group(self) -> "ProcessGroup": ...
    @property
    def pp_rank(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def pp_group(self) -> "ProcessGroup": ...


@dataclass(frozen=True)
class GridPosition:
    """This rank's position on the axes that divide a model; the default is a single process.

    Local expert i of expert-parallel rank r is the model's expert ``r * num_local + i``. Megatron's
    layers have global numbers, so pipeline stages need none here.
    """

    tp: AxisPosition = AxisPosition()
    etp: AxisPosition = AxisPosition()
    ep: AxisPosition = AxisPosition()
    pp: AxisPosition = AxisPosition()

    @classmethod
    def of(cls, mesh: Grid) -> "GridPosition":
        return cls(
            tp=AxisPosition(
                mesh.tp_rank, mesh.tp_size, mesh.tp_group if mesh.tp_size > 1 else None
            ),
            etp=AxisPosition(
                mesh.etp_rank, mesh.etp_size, mesh.etp_group if mesh.etp_size > 1 else None
            ),
            ep=AxisPosition(
                mesh.ep_rank, mesh.ep_size, mesh.ep_group if mesh.ep_size > 1 else None
            ),
            pp=AxisPosition(
                mesh.pp_rank, mesh.pp_size, mesh.pp_group if mesh.pp_size > 1 else None
            ),
        )
