"""The checkpoints below ``checkpoint.url``: their records come here, and all else reads those.

What counts is at the URL: a node with an empty disk goes on from there.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from rltrain.actors import node_files
from rltrain.config import Config
from rltrain.config.saved_config import NAME as CONFIG_FILE
from rltrain.controller.run_checkpoint import FOLDER, STATE
from rltrain.weights.huggingface.manifest import MANIFEST, read_manifest
from rltrain.weights.huggingface.remote_folder import RemoteFolder, is_url


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
    if config.trainer.resume == "auto":
        pull_records(remote, Path(config.trainer.output_dir), names)
    elif names:
        raise ValueError(
            f"checkpoint.url={remote.url}: expected no checkpoints there, found those of an "
            f"earlier run: {', '.join(names)}. Set trainer.resume=auto to go on with it, or choose "
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
    before it had a URL stay."""
    folder = run_dir / FOLDER
    for name in node_files.records(folder):
        there = {entry.get("place", "") for entry in read_manifest(folder / name).values()}
        if any(map(is_url, there)):
            node_files.remove(folder / name)
    kept = node_files.records(folder)
    for name in names:
        if name in kept:
            continue
        node_files.remove(folder / name)  # a link, or what was never complete
        record = remote / name
        entries = json.loads(record.read(MANIFEST))
        placed = {
            file: entry if file == STATE else {**entry, "place": record.url}
            for file, entry in entries.items()
        }
        node_files.write_file(folder / name / STATE, record.read(STATE))
        node_files.write_file(folder / name / MANIFEST, json.dumps(placed, indent=1).encode())


def put_config(remote: RemoteFolder, run_dir: Path) -> None:
    """The run's configuration without its secrets, for an export that has the URL alone."""
    if (run_dir / CONFIG_FILE).is_file():
        remote.put({CONFIG_FILE: run_dir / CONFIG_FILE})


def remove_remote_leftovers(remote: RemoteFolder) -> None:
    """What killed processes uploaded of checkpoints that have no manifest."""
    files = list(remote.sizes())
    complete = complete_among(files)
    remote.remove(
        name
        for name in files
        if "/" in name and name.split("/")[0] not in complete and name.startswith("step_")
    )
