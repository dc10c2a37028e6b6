"""The tensors of single experts inside one tensor of all experts of a layer. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StackedSlice:
    """Where an expert's tensor lies in one of all experts: ``[experts, rows, columns]``.

    A vector has no columns. Several tensors of an expert may share the rows (gate and up).
    """

    name: str
    part: tuple[int, int] = (0, 1)
    """Which of the rows: part i of n equal ones."""
    interleaved: bool = False
    """Part i is rows i, i + n, i + 2n and so on; otherwise it is the i-th block of rows."""
    transposed: bool = False
    """The tensor is ``[experts, columns, rows]``."""
    only: bool = False
    """No checkpoint of the family has a tensor per expert: all experts are sent together, too."""

    def shape(self, num_experts: int, own: tuple[int, ...]) -> tuple[int, ...]:
        """Of the whole, where one expert's tensor is ``own``."""
        whole = (self.part[1] * own[0], *own[1:])
        return (num_experts, *(reversed(whole) if self.transposed else whole))

    def read(
        self, stored: Any, expert: int, own: tuple[int, ...], dim: int, start: int, stop: int
    ) -> "Tensor":
        """Elements ``start`` to ``stop`` along ``dim`` of an expert's tensor of shape ``own``.

        ``stored`` is the whole, and is sliced once: it may be a file's.
        """
        index, count = self.part
        bounds = [(0, size) for size in own]
        bounds[dim] = (start, stop)
        first, last = bounds[0]
        if self.interleaved:
            rows = slice(count * first, count * last)
        else:
            rows = slice(index * own[0] + first, index * own[0] + last)
        slices = [rows, *(slice(*other) for other in bounds[1:])]
        found: Tensor = stored[(expert, *(reversed(slices) if self.transposed else slices))]
        if self.transposed:
            found = found.T
        return found[index::count] if self.interleaved else found

    def within(self, whole: "Tensor", expert: int) -> "Tensor":
        """The view of ``whole`` that the expert's tensor is."""
        index, count = self.part
        own = whole[expert].T if self.transposed else whole[expert]
        return own[index::count] if self.interleaved else own.chunk(count)[index]
