"""Tensors of single experts as slices of one tensor of all experts of a layer. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StackedSlice:
    """The place of an expert's tensor in one of all experts: ``[experts, rows, columns]``.

    A vector has no columns. Several tensors of an expert may share the rows (gate and up).
    """

    name: str
    part: tuple[int, int] = (0, 1)
    """(i, n): the tensor is part i of n equal parts of the rows."""
    interleaved: bool = False
    """Part i is rows i, i + n, i + 2n and so on; otherwise it is the i-th block of rows."""
    transposed: bool = False
    """The tensor is ``[experts, columns, rows]``."""
    only: bool = False
    """No checkpoint of the family has a tensor per expert, so all experts are sent together."""

    def shape(self, num_experts: int, expert_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor of all experts, from that of one expert's."""
        whole = (self.part[1] * expert_shape[0], *expert_shape[1:])
        return (num_experts, *(reversed(whole) if self.transposed else whole))

    def read(
        self, stored: Any, expert: int, shape: tuple[int, ...], dim: int, start: int, stop: int
    ) -> "Tensor":
        """Elements ``start`` to ``stop`` along ``dim`` of an expert's tensor of that ``shape``.

        ``stored`` is the tensor of all experts. It is sliced once, since it may be in a file.
        """
        index, count = self.part
        bounds = [(0, size) for size in shape]
        bounds[dim] = (start, stop)
        first, last = bounds[0]
        if self.interleaved:
            rows = slice(count * first, count * last)
        else:
            rows = slice(index * shape[0] + first, index * shape[0] + last)
        slices = [rows, *(slice(*other) for other in bounds[1:])]
        values: Tensor = stored[(expert, *(reversed(slices) if self.transposed else slices))]
        if self.transposed:
            values = values.T
        return values[index::count] if self.interleaved else values

    def within(self, whole: "Tensor", expert: int) -> "Tensor":
        """The expert's tensor as a view of ``whole``."""
        index, count = self.part
        matrix = whole[expert].T if self.transposed else whole[expert]
        return matrix[index::count] if self.interleaved else matrix.chunk(count)[index]
