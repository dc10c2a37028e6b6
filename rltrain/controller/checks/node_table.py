"""A table that compares the nodes of a cluster with the driver. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["same", "differs", "refused"]
AMOUNTS = ("/dev/shm", "disk of the run", "temporary disk", "open files", "clock")
"""Rows in which no two nodes are equal."""


@dataclass(frozen=True)
class Row:
    what: str
    driver: str
    nodes: Mapping[str, str]
    """By node."""
    states: Mapping[str, State]
    remedy: str = ""

    @property
    def state(self) -> State:
        found = set(self.states.values())
        return "refused" if "refused" in found else "differs" if "differs" in found else "same"


def refusals(rows: Sequence[Row]) -> list[str]:
    """One line for each row that ends the run: what was expected and found, where, what to do."""
    lines = []
    for row in rows:
        for node, state in row.states.items():
            if state == "refused":
                lines.append(
                    f"{node}: {row.what}: expected {row.driver}, found {row.nodes[node]}: "
                    f"{row.remedy}"
                )
    return lines


def show(rows: Sequence[Row], nodes: Sequence[str], columns: int = 6) -> str:
    """The table as plain text. Nodes with equal columns are one, where there are many."""
    groups = _groups(rows, nodes) if len(nodes) > columns else [[node] for node in nodes]
    heads = ["", "driver", *(_head(group) for group in groups), ""]
    lines = [heads]
    for row in rows:
        mark = {"same": "", "differs": "differs", "refused": "REFUSED"}[row.state]
        lines.append([row.what, row.driver, *(row.nodes[group[0]] for group in groups), mark])
    widths = [max(len(line[n]) for line in lines) for n in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _groups(rows: Sequence[Row], nodes: Sequence[str]) -> list[list[str]]:
    """Nodes that no row tells apart. Amounts are told apart only where one is too small."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for node in nodes:
        key = tuple(
            (row.states[node], row.nodes[node] if row.what not in AMOUNTS else "") for row in rows
        )
        groups.setdefault(key, []).append(node)
    return list(groups.values())


def _head(group: Sequence[str]) -> str:
    return group[0] if len(group) == 1 else f"{group[0]} and {len(group) - 1} more"
