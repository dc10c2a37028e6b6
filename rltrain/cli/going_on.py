"""What a person reads who interrupted a run: where it was, what is saved, how to go on with it."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from rltrain.cli.typed_command import program
from rltrain.config import Config
from rltrain.config.redact import Redactor

_PLAIN = re.compile(r"[\w/.:%+@-]+")
"""A value that Hydra takes without quotes."""


def how_to_go_on(config: Config, arguments: Sequence[str]) -> str:
    """Where the run of ``config`` was interrupted, and what to type to go on.

    Args:
        arguments: of ``rltrain train``, as they were typed
    """
    from rltrain.controller.run_checkpoint import checkpoints, step_of
    from rltrain.tracking.tracker import last_step

    folder = Path(config.trainer.output_dir)
    step = last_step(folder)
    where = "before step 1" if not step else f"at step {step}"
    if saved := checkpoints(folder):
        newest = step_of(saved[-1])
        behind = "" if newest == step else f", with a checkpoint of step {newest}"
        return f"interrupted {where}{behind}; resume with\n  {resume_command(arguments, folder)}"
    every = config.checkpoint.every
    advice = (
        "checkpoint.every=10 saves after every 10th step"
        if every == 0
        else f"checkpoint.every={every} saves after step {every} for the first time"
    )
    return f"interrupted {where}; no checkpoint was saved, so it cannot be resumed ({advice})"


def resume_command(arguments: Sequence[str], folder: Path) -> str:
    """What to type to go on with the run in ``folder``, which ``arguments`` started. Secrets are
    left out: the log of a job may hold it."""
    replaced = ("trainer.resume=", "trainer.output_dir=")
    kept = [word for word in arguments if not word.lstrip("+").startswith(replaced)]
    path = str(folder)
    if not _PLAIN.fullmatch(path):
        # Hydra takes a backslash for itself, except before a quotation mark.
        path = "'" + re.sub(r"(\\*)(?='|$)", r"\1\1", path).replace("'", r"\'") + "'"
    going_on = ["trainer.resume=auto", f"trainer.output_dir={path}"]
    return shlex.join([*program(arguments), *Redactor().arguments(kept), *going_on])
