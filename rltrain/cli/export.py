"""``rltrain export RUN OUT``: a checkpoint as a Hugging Face folder."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rltrain.config import Config
from rltrain.config.files import load

USAGE = (
    "usage: rltrain export RUN OUT\n  RUN: the folder of a run; OUT: a folder that does not exist"
)


def export(arguments: Sequence[str]) -> int:
    """Load the newest checkpoint of a run into its policy and write that as a Hugging Face folder.

    Raises:
        ValueError: there is no run, no checkpoint of it, or OUT exists.
    """
    if len(arguments) != 2:
        raise ValueError(USAGE)
    run_dir, out = (Path(argument).expanduser().absolute() for argument in arguments)
    config = load(run_dir)
    if out.exists():
        raise ValueError(f"{out} exists already: choose another folder to export to")
    _export(config, run_dir, out)
    sys.stdout.write(f"{out}\n")
    return 0


def _export(config: Config, run_dir: Path, out: Path) -> None:
    from rltrain.controller import checkpoint
    from rltrain.controller.cluster import cluster
    from rltrain.controller.policy_group import PolicyGroup
    from rltrain.data.tiny_model import warm_started_path

    found = checkpoint.checkpoints(run_dir)
    if not found:
        raise ValueError(
            f"{run_dir}: expected a checkpoint to export, found none; run with checkpoint.every=N"
        )
    # What the run started from has the architecture and the tokenizer.
    source = config.model.path or str(warm_started_path(config.model) / "model")
    with cluster(config) as placed:
        policy = PolicyGroup(config, source, placed.device, placed.policy_options)
        checkpoint.restore(found[-1], run_dir, policy, config.checkpoint)
        policy.call("export", str(out), "float32")
