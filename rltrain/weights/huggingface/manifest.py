"""The manifest of a folder: size and SHA-256 of every file in it.

Megatron's checkpoints hold pickles, so one is opened only after `check_manifest`. Whoever wrote a
file takes its entry (`entries_of`), so that nobody reads what others wrote.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NotRequired, TypedDict

from rltrain.config.bounded_files import MOST_OF_TABLES, check_size
from rltrain.config.durable import write_durably

MANIFEST = "manifest.json"
_THREADS = 4


class ManifestEntry(TypedDict):
    """What a manifest says of one file."""

    bytes: int
    sha256: str
    place: NotRequired[str]
    """Where the file is, if not beside the manifest: on another node, or below a URL."""


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
    write_durably(folder / MANIFEST, json.dumps(dict(sorted(entries.items())), indent=1))


def read_manifest(folder: Path) -> dict[str, ManifestEntry]:
    """Raises ``ValueError`` if there is none, it is damaged, or a name leads out of the folder."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"{folder}: expected {MANIFEST} beside the checkpoint's files, found none [RL6004]"
        )
    try:
        check_size(folder / MANIFEST, MOST_OF_TABLES)
        data = (folder / MANIFEST).read_bytes()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder / MANIFEST} cannot be read ({error}); use another checkpoint [RL6004]"
        ) from error
    return parse_manifest(data, folder)


def parse_manifest(data: bytes, folder: Path | str) -> dict[str, ManifestEntry]:
    """As `read_manifest`; ``folder`` is where it came from."""
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{folder}/{MANIFEST} cannot be read ({error}); use another checkpoint [RL6004]"
        ) from error
    if not (isinstance(entries, dict) and all(map(_is_entry, entries.values()))):
        raise ValueError(
            f"{folder}/{MANIFEST} does not give bytes and sha256 of each file; use another "
            "checkpoint [RL6004]"
        )
    for name in entries:
        if name.startswith("/") or ".." in name.split("/"):  # it may come from elsewhere
            raise ValueError(f"{folder}/{MANIFEST} names {name}, outside its folder [RL6004]")
        if not name.isprintable():  # as half a surrogate, which no file system has
            raise ValueError(
                f"{folder}/{MANIFEST} names {name!a}, expected printable names; use another "
                "checkpoint [RL6004]"
            )
    return entries


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("bytes"), int)
        and isinstance(entry.get("sha256"), str)
        and isinstance(entry.get("place", ""), str)
    )


def check_manifest(folder: Path) -> None:
    """Raise ``ValueError`` unless ``folder`` holds exactly what its manifest says."""
    expected = read_manifest(folder)
    check_names(folder, expected, whole=True)
    check_files(folder, expected)


def check_names(folder: Path, expected: Collection[str], *, whole: bool) -> None:
    """Raise ``ValueError`` if ``folder`` has a file that is not ``expected``, or lacks one and is
    to be ``whole``."""
    present = _names(folder)
    if present - set(expected) or (whole and present != set(expected)):
        raise ValueError(
            f"{folder}: its manifest and its files differ: missing "
            f"{sorted(set(expected) - present)}, unknown {sorted(present - set(expected))}. It was "
            "copied in part or changed; use another checkpoint"
            " [RL6004]"
        )


def check_files(folder: Path, expected: Mapping[str, ManifestEntry]) -> None:
    """Raise ``ValueError`` unless these files of ``folder`` are what is expected."""
    try:
        found = entries_of(folder, expected)
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder} cannot be read ({error.strerror}); use another checkpoint"
            " [RL6004]"
        ) from error
    for name, entry in found.items():
        if entry["sha256"] != expected[name]["sha256"]:
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
