"""The entry point: compose with Hydra, validate, check the machine, run.

python -m rltrain.main +recipe=grpo_moe_r3 trainer.steps=5
"""

import argparse
import logging
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rltrain.config import Config
from rltrain.config.errors import ConfigError, nearest, unknown_key, validate
from rltrain.config.files import save
from rltrain.config.reference import keys, sections

PROGRAM = "python -m rltrain.main"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit status is 2 for a bad request, 1 for a bad run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        arguments = parse(argv)
        if arguments.help or not argv:
            sys.stdout.write(help_text(arguments.config_dir))
            return 0
        config = compose(arguments.overrides, arguments.config_dir)
        if arguments.cfg:
            sys.stdout.write(OmegaConf.to_yaml(config.model_dump(mode="json")))
            return 0
        config = start_folder(config)
        from rltrain.controller.preflight import preflight

        preflight(config)
    except ValueError as error:
        return fail("cannot start", error, 2)
    save(config, shlex.join([*PROGRAM.split(), *argv]))
    return run(config)


def run(config: Config) -> int:
    """Train; an error is one message, and its traceback lies in ``error.log`` of the run."""
    try:
        if config.algorithm.type == "sft":
            from rltrain.controller.supervised import run as train
        else:
            from rltrain.controller.trainer import run as train
        train(config)
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError) as error:
        log = Path(config.trainer.output_dir) / "error.log"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        return fail(f"stopped ({log} has the details)", getattr(error, "cause", error), 1)
    return 0


def fail(what: str, error: BaseException, status: int) -> int:
    if os.environ.get("RLTRAIN_DEBUG") == "1":
        raise error
    sys.stderr.write(f"rltrain: {what}\n  {str(error).replace(chr(10), chr(10) + '  ')}\n")
    return status


def start_folder(config: Config) -> Config:
    """``config`` with the time filled into an absolute ``trainer.output_dir``."""
    folder = Path(time.strftime(config.trainer.output_dir)).expanduser().absolute()
    trainer = config.trainer.model_copy(update={"output_dir": str(folder)})
    return config.model_copy(update={"trainer": trainer})


# Composing.


def compose(overrides: Sequence[str] = (), config_dir: Path | None = None) -> Config:
    """The validated configuration of Hydra overrides such as ``+recipe=grpo_moe_r3``.

    Args:
        config_dir: a folder of further group files, e.g. one's own ``recipe/``.

    Raises:
        ConfigError: in words of ours, whoever noticed the mistake.
    """
    check_overrides(overrides, groups(config_dir))
    ConfigStore.instance().store(name="schema", node=Config().model_dump(mode="json"))
    search = [f"hydra.searchpath=[{config_dir.absolute().as_uri()}]"] if config_dir else []
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            composed = hydra_compose("config", overrides=[*overrides, *search])
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).partition("\n")[0]) from error
    assert isinstance(values, dict)
    check_filled_in(values)
    return validate({str(key): value for key, value in values.items()})


def conf_folder() -> Path:
    """``conf/`` of the installed package, or of the source checkout around it."""
    package = Path(__file__).parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"expected conf/config.yaml in {package} or beside it, found neither: reinstall")


def groups(config_dir: Path | None = None) -> dict[str, dict[str, Path]]:
    """Group name to option name to file, of ``conf/`` and of ``config_dir``."""
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir: expected a folder, found none at {config_dir}")
    found: dict[str, dict[str, Path]] = {}
    for folder in (conf_folder(), config_dir):
        for file in sorted(folder.glob("*/*.yaml")) if folder else ():
            found.setdefault(file.parent.name, {})[file.stem] = file
    return found


def check_overrides(overrides: Sequence[str], options: dict[str, dict[str, Path]]) -> None:
    """Refuse what Hydra would refuse in its own words, or take for something else."""
    try:
        parsed = [OverridesParser.create().parse_override(text) for text in overrides]
    except OverrideParseException as error:
        raise ConfigError(
            f"{error.override}: expected an override such as trainer.steps=5 or +recipe=NAME, "
            f"found something else ({error.message.partition(chr(10))[0]})"
        ) from error
    for override in parsed:
        name = override.key_or_group
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: a run takes one value of {name}; start one run for each"
            )
        if name in options and not isinstance(override.value(), dict):
            check_choice(override, options[name])
        else:
            check_key(override, options)


def check_choice(override: Override, options: dict[str, Path]) -> None:
    """``data=jsonl`` or ``+recipe=grpo_moe_r3``."""
    name, value = override.key_or_group, override.value()
    if value not in options:
        found = nearest(str(value), options)
        raise ConfigError(f"{name}={value}: there is no conf/{name}/{value}.yaml. {found}")
    if name == "recipe" and not override.is_add():
        raise ConfigError(f"recipe={value}: a recipe is added with a plus: +recipe={value}")
    if name != "recipe" and override.is_add():
        raise ConfigError(f"+{name}={value}: {name} always has a choice: write {name}={value}")


def check_key(override: Override, options: dict[str, dict[str, Path]]) -> None:
    """``trainer.steps=5``, or ``+rollout.engine_args.name=value`` below a free dictionary."""
    name = override.key_or_group
    known = {key.name: key for key in keys()}
    if any(key.free and name.startswith(f"{key.name}.") for key in known.values()):
        return
    if name not in known and name not in set(sections()):
        close = [*known, *options]
        raise ConfigError(f"{name}: there is no such key. {nearest(name, close)}")
    if override.is_add():
        raise ConfigError(f"+{name}: the key exists already: write it without the plus")


def check_filled_in(values: dict[Any, Any], prefix: str = "") -> None:
    for key, value in values.items():
        if value == "???":
            raise ConfigError(f"{prefix}{key}: the chosen group needs a value: set {prefix}{key}=...")
        if isinstance(value, dict):
            check_filled_in(value, f"{prefix}{key}.")


# The command line.


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir", type=Path)
    return parser.parse_intermixed_args(argv)


def help_text(config_dir: Path | None) -> str:
    options = groups(config_dir)
    recipes = options.pop("recipe")
    lines = [
        f"usage: {PROGRAM} +recipe=NAME [key=value ...] [--cfg job] [--config-dir FOLDER]",
        "",
        "recipes:",
        *(f"  {name:<14} {first_comment(file)}" for name, file in recipes.items()),
        "",
        "groups, chosen with name=option:",
        *(f"  {name:<14} {', '.join(files)}" for name, files in sorted(options.items())),
        "",
        "keys, set with name=value (docs/configuration.md and `rltrain keys` list them all):",
        "  trainer.steps=5 optimizer.lr=1e-4 policy.parallel.tp=2 +rollout.engine_args.max_num_seqs=64",
        "",
        "options:",
        "  --cfg job            print the resolved configuration and stop",
        "  --config-dir FOLDER  more group files, e.g. FOLDER/recipe/mine.yaml",
        "",
        "RLTRAIN_DEBUG=1 shows the traceback of an error.",
    ]
    return "\n".join(lines) + "\n"


def first_comment(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = [line[1:].strip() for line in lines if line.startswith("#") and "@package" not in line]
    return comments[0] if comments else ""


if __name__ == "__main__":
    sys.exit(main())
