"""The record of a checkpoint: its manifest and ``state.json``, and what they say is beside them.

What is not whole is a ``ValueError`` with the code `NOT_WHOLE`. Imports neither Ray nor torch.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.actors import node_files
from rltrain.controller.run_checkpoint import STATE, read_state, step_of
from rltrain.weights.huggingface.manifest import (
    MANIFEST,
    ManifestEntry,
    check_files,
    read_manifest,
)
from rltrain.weights.huggingface.remote_folder import is_url

NOT_WHOLE = "RL6004"
SHOWN = 5
"""Names in a message."""

Entries = Mapping[str, ManifestEntry]
Sizes = Mapping[str, Mapping[str, int]]
"""By disk, the bytes of the files of a checkpoint that are there."""


@dataclass(frozen=True)
class Record:
    """The manifest and ``state.json`` of a checkpoint, which belong together."""

    path: Path
    entries: Entries
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        return step_of(self.path)


def read_record(path: Path) -> Record:
    """The record in ``path``, beside which all is as its names and sizes say, as far as it is on
    this disk.

    Raises:
        ValueError: it is not.
    """
    entries = read_manifest(path)
    if STATE not in entries:
        raise ValueError(
            f"{path / MANIFEST} does not name {STATE}; use another checkpoint [RL6004]"
        )
    sizes = {"": node_files.sizes_of(path) or {}}
    check_found(path, entries, sizes)
    here = [name for name, entry in entries.items() if "place" not in entry]
    find_sources(path, entries, sizes, [name for name in here if name not in sizes[""]])
    check_files(path, {STATE: entries[STATE]})
    state = read_state(path)
    if state["step"] != step_of(path):
        raise ValueError(f"{path} is of step {state['step']}; use another checkpoint [RL6004]")
    return Record(path, entries, state)


def check_found(path: Path, entries: Entries, sizes: Sizes) -> None:
    """Raise ValueError if a disk has a file that is not of this checkpoint, or of another size."""
    for disk, names in sizes.items():
        at = path if len(sizes) == 1 else f"{path} on {disk}"
        if unknown := sorted(names.keys() - entries.keys() - {MANIFEST}):
            raise ValueError(
                f"{at}: its manifest and its files differ: unknown {unknown[:SHOWN]}. It was "
                "copied in part or changed; use another checkpoint [RL6004]"
            )
        for name, size in names.items():
            if name != MANIFEST and size != entries[name]["bytes"]:
                raise ValueError(
                    f"{at}/{name}: its content is not what {MANIFEST} says: {size} bytes instead "
                    f"of {entries[name]['bytes']}; use another checkpoint [RL6004]"
                )


def find_sources(
    path: Path, entries: Entries, sizes: Sizes, names: Sequence[str]
) -> dict[str, list[str]]:
    """By the disk or URL that has them, the files that a disk lacks.

    Raises:
        ValueError: a file is nowhere; RL6011, and so no damage, if its node is not of this run.
    """
    sources, lost = defaultdict(list), defaultdict(list)
    for name in names:
        place = entries[name].get("place", "")
        disk = next((disk for disk, there in sizes.items() if name in there), None)
        if disk is not None:
            sources[disk].append(name)
        elif is_url(place):
            sources[place].append(name)
        else:
            lost[place].append(name)
    for place, files in lost.items():
        if not place or place in sizes:
            at = f"{path} on {place}" if place else path
            raise ValueError(
                f"{at}: its manifest and its files differ: missing {files[:SHOWN]}. It was "
                "copied in part or changed; use another checkpoint [RL6004]"
            )
        listed = ", ".join(files[:SHOWN]) + (", ..." if len(files) > SHOWN else "")
        raise ValueError(
            f"{path}: {len(files)} of its {len(entries)} files are on node {place} alone, and "
            f"no node of this run has them: {listed}. Bring {place} back, copy its {path} to "
            "another node, or go on from an older checkpoint with trainer.resume=step:N [RL6011]"
        )
    return dict(sources)
