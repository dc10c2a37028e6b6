"""The checkpoints below ``checkpoint.url``: their records come here, and all else reads those.

What counts is at the URL: a node with an empty disk goes on from there.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from rltrain.actors import node_files
from rltrain.config import Config
from rltrain.config.saved_config import NAME as CONFIG_FILE
from rltrain.controller.run_checkpoint import FOLDER, STATE
from rltrain.weights.huggingface.manifest import (
    MANIFEST,
    ManifestEntry,
    parse_manifest,
    read_manifest,
)
from rltrain.weights.huggingface.remote_folder import RemoteFolder

ASIDE = f"{node_files.ASIDE}.{MANIFEST}"
"""What the manifest of a checkpoint is called that a run did not go on from."""


def check_url(config: Config) -> None:
    """``checkpoint.url`` can be written, and is empty or of a run to go on with.

    Brings the records of its checkpoints, if ``trainer.resume`` asks for them.

    Raises:
        ValueError: it holds the checkpoints of another run, or cannot be opened here.
        RuntimeError: it cannot be reached.
    """
    if config.checkpoint.url is None:
        return
    remote = RemoteFolder(config.checkpoint.url)
    remote.write(".token", b"1")
    names = remote_checkpoints(remote)
    remote.remove([".token"])
    if config.trainer.resumes:
        pull_records(remote, Path(config.trainer.output_dir), names)
    elif found := sorted({*names, *remote_steps(remote)}):
        raise ValueError(
            f"checkpoint.url={remote.url}: expected no checkpoints there, found those of an "
            f"earlier run: {', '.join(found)}. Set trainer.resume=auto to go on with it, or choose "
            "another URL [RL6002]"
        )


def remote_checkpoints(remote: RemoteFolder) -> list[str]:
    """Names of those that are complete, and of the last weights."""
    return complete_among(remote.sizes())


def complete_among(files: Iterable[str]) -> list[str]:
    """See `remote_checkpoints`.

    Args:
        files: names below the URL
    """
    parts = [name.split("/") for name in files]
    return sorted(part[0] for part in parts if len(part) == 2 and part[1] == MANIFEST)


def pull_records(remote: RemoteFolder, run_dir: Path, names: list[str]) -> None:
    """Make the records of ``run_dir`` those of the URL. Checkpoints that the run kept in its folder
    before it had a URL stay, and so do records of another URL."""
    folder = run_dir / FOLDER
    stale = [name for name in node_files.records(folder) if is_record_of(remote, folder / name)]
    node_files.set_aside(folder, [name for name in stale if name not in names])
    for name in names:
        if (folder / name).is_symlink():
            node_files.remove(folder / name)
        if name not in stale and (folder / name / MANIFEST).is_file():
            continue
        if name not in stale:
            node_files.set_aside(folder, [name])  # files without a manifest
        record = remote / name
        if STATE in record.sizes():
            node_files.write_file(folder / name / STATE, record.read(STATE))
        data = record.read(MANIFEST)
        with suppress(ValueError):  # `find_checkpoint` says what is wrong with it
            entries = parse_manifest(data, record.url)
            placed = {
                file: entry if file == STATE else {**entry, "place": record.url}
                for file, entry in entries.items()
            }
            data = json.dumps(placed, indent=1).encode()
        node_files.write_file(folder / name / MANIFEST, data)


def is_record_of(remote: RemoteFolder, path: Path) -> bool:
    """Whether there is no more in ``path`` than the record of a checkpoint below the URL."""
    if not (node_files.sizes_of(path) or {}).keys() <= {STATE, MANIFEST}:
        return False
    try:
        return is_below(remote, read_manifest(path))
    except ValueError:  # it is written anew, or set aside
        return True


def is_below(remote: RemoteFolder, entries: Mapping[str, ManifestEntry]) -> bool:
    """Whether the files of a checkpoint are below the URL."""
    return any(e.get("place", "").startswith(f"{remote.url}/") for e in entries.values())


def put_config(remote: RemoteFolder, run_dir: Path) -> None:
    """The run's configuration without its secrets, for an export that has the URL alone."""
    if (run_dir / CONFIG_FILE).is_file():
        remote.put({CONFIG_FILE: run_dir / CONFIG_FILE})


# The checkpoints at the URL. It has no renames: a marker says that one is written or removed


def remote_steps(remote: RemoteFolder) -> set[str]:
    """Names of the steps of which there is a file, complete or not, and that are not set aside."""
    files = remote.sizes()
    names = {name.split("/")[0] for name in files if "/" in name}
    return {n for n in names if node_files.STEP.fullmatch(n) and f"{n}/{ASIDE}" not in files}


def begin_remote(folder: RemoteFolder) -> None:
    """Until `commit_remote`, what is in ``folder`` is a leftover if this process ends."""
    remove_remote(folder)
    folder.write(node_files.UNFINISHED, b"1")


def commit_remote(folder: RemoteFolder, manifest: Path) -> None:
    folder.put({MANIFEST: manifest})
    folder.remove([node_files.UNFINISHED])


def remove_remote(folder: RemoteFolder) -> None:
    """A checkpoint; without its manifest it is none."""
    if names := folder.sizes().keys():
        folder.write(node_files.UNFINISHED, b"1")
        folder.remove([MANIFEST])
        folder.remove(names - {node_files.UNFINISHED})
        folder.remove([node_files.UNFINISHED])


def set_aside_remote(remote: RemoteFolder, names: Iterable[str]) -> None:
    """These are no candidates any more: their manifests get another name. Their files stay until
    the run writes a checkpoint of the same step."""
    files = remote.sizes()
    for name in names:
        at = remote / name
        has_manifest = f"{name}/{MANIFEST}" in files
        at.write(ASIDE, at.read(MANIFEST) if has_manifest else b"{}")
        at.remove([MANIFEST])


def remove_remote_leftovers(remote: RemoteFolder) -> None:
    """What killed processes left unfinished."""
    files = list(remote.sizes())
    complete = complete_among(files)
    for name in files:
        folder, _, file = name.rpartition("/")
        if file == node_files.UNFINISHED and folder in complete:
            remote.remove([name])
        elif file == node_files.UNFINISHED:
            remove_remote(remote / folder)
