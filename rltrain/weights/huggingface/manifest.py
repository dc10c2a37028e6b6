"""The manifest of a folder: size and SHA-256 of every file in it.

Megatron's checkpoints hold pickles, so one is opened only after `check_manifest`. Whoever wrote a
file takes its entry (`entries_of`), so that nobody reads what others wrote.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

MANIFEST = "manifest.json"
_THREADS = 4


class ManifestEntry(TypedDict):
    """What a manifest says of one file."""

    bytes: int
    sha256: str


def manifest_entry(path: Path) -> ManifestEntry:
    """Reads the whole file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def write_manifest(folder: Path, entries: Mapping[str, ManifestEntry] | None = None) -> None:
    """Write the manifest of ``folder``.

    Args:
        entries: by name, of all its files; without them every file is read here
    """
    if entries is None:
        entries = entries_of(folder, _names(folder))
    (folder / MANIFEST).write_text(json.dumps(dict(sorted(entries.items())), indent=1))


def check_manifest(folder: Path) -> None:
    """Raise ``ValueError`` unless ``folder`` holds exactly what its manifest says."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"{folder}: expected {MANIFEST} beside the checkpoint's files, found none [RL6004]"
        )
    expected = json.loads((folder / MANIFEST).read_text())
    present = _names(folder)
    if present != set(expected):
        raise ValueError(
            f"{folder}: its manifest and its files differ: missing "
            f"{sorted(set(expected) - present)}, unknown {sorted(present - set(expected))}. It was "
            "copied in part or changed; use another checkpoint"
            " [RL6004]"
        )
    for name, entry in entries_of(folder, expected).items():
        if entry != expected[name]:
            raise ValueError(
                f"{folder / name}: its content is not what {MANIFEST} says; use another checkpoint"
                " [RL6004]"
            )


def entries_of(folder: Path, names: Iterable[str]) -> dict[str, ManifestEntry]:
    """Of these files below ``folder``; reads them, several at a time."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:  # SHA-256 lets other threads run
        return dict(
            zip(names, pool.map(lambda name: manifest_entry(folder / name), names), strict=True)
        )


def _names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {MANIFEST}
