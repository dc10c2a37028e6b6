"""Terms of a sum of memory, and how bytes are written. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Term:
    name: str
    formula: str
    """The arithmetic, with its numbers."""
    nbytes: int


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def total(terms: Iterable[Term]) -> int:
    return sum(term.nbytes for term in terms)
