"""Which checkpoint a run goes on from: the newest that is whole, or the one that is asked for.

A folder in which no checkpoint is whole is an error, and never a new run. The preflight looks at
what this machine's disk has: names, sizes and records. `find_checkpoint` reads every file on the
disks of all nodes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rltrain.config import Config
from rltrain.config.bounded_files import check_yaml
from rltrain.config.error_codes import codes_in
from rltrain.config.saved_config import NAME as CONFIG_FILE
from rltrain.controller.checkpoint_record import NOT_WHOLE, Record, read_record
from rltrain.controller.resume_changes import Changes, changes_since, check_changes
from rltrain.controller.run_checkpoint import candidates_here, check_model, model_of, step_of
from rltrain.tracking.jsonl import read_jsonl

if TYPE_CHECKING:
    from rltrain.weights.architecture.decoder import Architecture


PENDING = "checkpoint/pending"
"""The metric that is 1 in the steps that end before the newest checkpoint is there."""


@dataclass(frozen=True)
class Choice:
    record: Record | None
    """Of the one to go on from; None where there is none."""
    faults: Sequence[str] = ()
    """What is wrong with those that were passed over, newest first."""
    steps: Sequence[int] = ()
    """Of all that there are, newest first."""


def check_resumed(config: Config, arch: "Architecture") -> None:
    """What ``trainer.resume`` would go on from is there, of this run's model and with its settings,
    as far as this machine's disk tells; see `find_checkpoint`."""
    if not config.trainer.resumes:
        return
    choice = choose(config, candidates_here(Path(config.trainer.output_dir)), read_record)
    if config.cluster.address is None:
        require(config, choice)
    if choice.record is not None:  # else other nodes may have one
        record = choice.record
        check_model(record.path, model_of(config, arch), trust=config.checkpoint.trust)
        check_changes(changes_of(config, record), config, record.step)


def choose(config: Config, paths: Sequence[Path], look: Callable[[Path], Record]) -> Choice:
    """The newest that is whole, or the one of the step that ``trainer.resume`` names.

    Args:
        paths: newest first
        look: raises ValueError where one is not whole

    Raises:
        ValueError: as ``look`` does for another reason.
    """
    wanted = config.trainer.resumed_step
    faults: list[str] = []
    steps = [step_of(path) for path in paths]
    for path, step in zip(paths, steps, strict=True):
        if wanted not in (None, step):
            continue
        try:
            return Choice(look(path), faults, steps)
        except ValueError as error:
            if codes_in(str(error)) != [NOT_WHOLE]:
                raise
            faults.append(str(error))
    return Choice(None, faults, steps)


def require(config: Config, choice: Choice) -> None:
    """A run that has left checkpoints goes on from one.

    Raises:
        ValueError: it cannot.
    """
    trainer = config.trainer
    if choice.record is not None:
        return
    start = f"trainer.resume={trainer.resume}: expected in {trainer.output_dir} a checkpoint"
    anew = "start anew in another trainer.output_dir"
    others = [step for step in choice.steps if step != trainer.resumed_step]
    if choice.faults:
        older = (
            f"choose another one: steps {others}, or " if others and trainer.resumed_step else ""
        )
        listed = "\n".join(f"  {fault}" for fault in choice.faults)
        raise ValueError(
            f"{start} that is whole, found none:\n{listed}\nBring its files back, {older}{anew} "
            "[RL6014]"
        )
    if trainer.resumed_step is not None:
        found = f"those of steps {others}" if others else "none"
        raise ValueError(
            f"{start} of step {trainer.resumed_step}, found {found}: name one that is there, or "
            f"{anew} [RL6014]"
        )
    every, rows = config.checkpoint.every, read_jsonl(Path(trainer.output_dir) / "metrics.jsonl")
    skipped = bool(rows and rows[-1].get("checkpoint/skipped"))  # the disk was full
    # One that is written in the background is there before the next is begun.
    first = 2 * every if rows and rows[-1].get(PENDING) else every
    if every and rows and rows[-1]["step"] >= first and not skipped:
        raise ValueError(
            f"{start}, since its metrics go to step {rows[-1]['step']} and checkpoint.every="
            f"{every}, found none. Bring its checkpoints back, or {anew} [RL6014]"
        )


def changes_of(config: Config, record: Record) -> Changes:
    """Of the configuration since a checkpoint. One that does not say with which it was written was
    so with the ``config.yaml`` beside it."""
    saved = record.state.get("config") or _config_file(Path(config.trainer.output_dir))
    return {} if saved is None else changes_since(saved, config)


def keep_earlier_config(config: Config) -> None:
    """Before ``config.yaml`` is written anew with changes, keep it as ``config.step_K.yaml``: what
    led to the checkpoint of step K, from which the run goes on."""
    run_dir = Path(config.trainer.output_dir)
    saved = _config_file(run_dir)
    if not config.trainer.resumes or saved is None or not changes_since(saved, config):
        return
    record = choose(config, candidates_here(run_dir), read_record).record
    text = (run_dir / CONFIG_FILE).read_bytes()
    name = f"config.step_{record.step if record else 0}"
    kept = [path for path in run_dir.glob(f"{name}*.yaml") if path.is_file()]
    if text not in [path.read_bytes() for path in kept]:
        number = f".{len(kept) + 1}" if kept else ""
        (run_dir / f"{name}{number}.yaml").write_bytes(text)


def _config_file(run_dir: Path) -> Mapping[str, Any] | None:
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return None
    check_yaml(path)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values if isinstance(values, dict) else None
