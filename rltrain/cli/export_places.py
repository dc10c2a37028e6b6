"""Where an export reads and writes: folders of this machine, and URLs by way of one.

What is read may be of anyone. So files are fetched from a URL that was typed, or from below it, and
not from one that a manifest names.
"""

import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rltrain.config.saved_config import NAME as CONFIG_FILE
from rltrain.weights.huggingface.manifest import (
    MANIFEST,
    check_files,
    check_manifest,
    read_manifest,
)
from rltrain.weights.huggingface.remote_folder import RemoteFolder, is_url
from rltrain.weights.huggingface.stored_model import POLICY

__all__ = ["is_url", "readable_run", "with_weights", "writable"]


@contextmanager
def readable_run(source: str) -> Iterator[Path]:
    """A folder with the configuration and the records of the run or checkpoint in ``source``.

    Raises:
        ValueError: it is a URL without a run.
    """
    if not is_url(source):
        yield Path(source).expanduser().absolute()
        return
    from rltrain.controller.remote_records import pull_records, remote_checkpoints
    from rltrain.controller.run_checkpoint import FOLDER

    remote, step = RemoteFolder(source.rstrip("/")), ""
    if MANIFEST in remote.sizes():  # a checkpoint of the run, not the run
        url, _, step = remote.url.rpartition("/")
        remote = RemoteFolder(url)
    if CONFIG_FILE not in remote.sizes():
        raise ValueError(
            f"{source}: expected the checkpoint.url of a run, or a checkpoint in it, found no "
            f"{CONFIG_FILE} [RL6008]"
        )
    with tempfile.TemporaryDirectory(prefix="rltrain-export-") as folder:
        run = Path(folder)
        remote.get({CONFIG_FILE: run / CONFIG_FILE})
        pull_records(remote, run, remote_checkpoints(remote))
        yield run / FOLDER / step if step else run


@contextmanager
def with_weights(checkpoint: Path, source: str, *, trust: bool) -> Iterator[Path]:
    """A folder that has the policy's files of a checkpoint, each as its manifest says.

    Those below a URL are fetched, into a temporary folder.

    Args:
        source: what was typed
        trust: whether URLs that are not below it may be opened

    Raises:
        ValueError: they are on other nodes, were changed, or are to come from somewhere else.
    """
    entries = read_manifest(checkpoint)
    if not any("place" in entry for entry in entries.values()):
        check_manifest(checkpoint)
        yield checkpoint
        return
    weights = {name: entry for name, entry in entries.items() if name.startswith(f"{POLICY}/")}
    absent = defaultdict(list)
    for name, entry in weights.items():
        if not (checkpoint / name).is_file():
            absent[entry.get("place", "")].append(name)
    if nodes := [place for place in absent if not is_url(place)]:
        raise ValueError(_on_other_nodes(checkpoint, nodes, len(absent[nodes[0]])))
    if not absent:
        check_files(checkpoint, weights)
        yield checkpoint
        return
    if not trust:
        check_places(checkpoint, source, absent)
    with tempfile.TemporaryDirectory(prefix="rltrain-export-") as folder:
        for url, names in absent.items():
            RemoteFolder(url).get({name: Path(folder) / name for name in names})
        for name in weights.keys() - {name for names in absent.values() for name in names}:
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkpoint / name, Path(folder) / name)
        check_files(Path(folder), weights)
        yield Path(folder)


def check_places(checkpoint: Path, source: str, places: Iterable[str]) -> None:
    """Raise ``ValueError`` unless all of these URLs are ``source`` or below it, or ``source`` is a
    checkpoint beside them."""
    allowed = source.rstrip("/")
    if re.fullmatch(r"step_\d+|last", allowed.rpartition("/")[2]):
        allowed = allowed.rpartition("/")[0]
    for url in places:
        if ".." in url.split("/") or not (is_url(source) and f"{url}/".startswith(f"{allowed}/")):
            raise ValueError(
                f"{checkpoint}: its manifest says that its files are in {url}. Whoever wrote it "
                f"can name any server there. If it is yours, export {url.rpartition('/')[0]} "
                "instead of this folder, or add --trust [RL6007]"
            )


def _on_other_nodes(checkpoint: Path, nodes: list[str], number: int) -> str:
    commands = "\n".join(f"  rsync -a {node}:{checkpoint}/ {checkpoint}/" for node in sorted(nodes))
    return (
        f"{checkpoint}: expected all files of the policy on this machine, found {number} of them "
        f"on {nodes[0]} alone (checkpoint.storage=local). Bring them here, for example by\n"
        f"{commands}\nand run the same command again [RL6011]"
    )


@contextmanager
def writable(out: str) -> Iterator[Path]:
    """A folder that does not exist; what is in it at the end is at ``out``.

    To a URL config.json goes last: without it, nobody takes the folder for a model.

    Raises:
        ValueError: ``out`` exists.
    """
    if not is_url(out):
        yield Path(out).expanduser().absolute()
        return
    remote = RemoteFolder(out.rstrip("/"))
    if remote.sizes():
        raise ValueError(f"{out} exists already: choose another URL to write to [RL6009]")
    with tempfile.TemporaryDirectory(prefix="rltrain-export-") as folder:
        model = Path(folder) / "model"
        yield model
        files = {str(p.relative_to(model)): p for p in model.rglob("*") if p.is_file()}
        last = {"config.json": files.pop("config.json")}
        remote.put(files)
        remote.put(last)
