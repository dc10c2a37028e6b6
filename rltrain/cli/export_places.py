"""Where an export reads and writes: folders of this machine, and URLs by way of one."""

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
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
def readable_run(source: str, *, trust: bool) -> Iterator[Path]:
    """A folder with the configuration and the records of the run or checkpoint in ``source``.

    Raises:
        ValueError: it is a URL without a run, or not trusted.
    """
    if not is_url(source):
        yield Path(source).expanduser().absolute()
        return
    if not trust:
        raise ValueError(
            f"{source}: a checkpoint holds pickles, which can run any code. Name the run's folder, "
            "whose checkpoint.url leads there, or add --trust only if you know who wrote it "
            "[RL6007]"
        )
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
def with_weights(checkpoint: Path) -> Iterator[Path]:
    """A folder that has the policy's files of a checkpoint, each as its manifest says.

    Those below a URL are fetched, into a temporary folder.

    Raises:
        ValueError: they are on other nodes, or were changed.
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
    with tempfile.TemporaryDirectory(prefix="rltrain-export-") as folder:
        for url, names in absent.items():
            RemoteFolder(url).get({name: Path(folder) / name for name in names})
        for name in weights.keys() - {name for names in absent.values() for name in names}:
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkpoint / name, Path(folder) / name)
        check_files(Path(folder), weights)
        yield Path(folder)


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
