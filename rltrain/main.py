"""The entry point: compose the configuration with Hydra, validate it, check the machine, run.

python -m rltrain.main +recipe=grpo_moe_r3 trainer.steps=5

Ray, torch and the trainers are imported after the configuration, data and machine were checked: an
error there comes within seconds.
"""

import argparse
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rltrain.config import Config
from rltrain.config.errors import ConfigError, nearest, validate
from rltrain.config.hydra_groups import (
    RECIPE_FILE,
    Groups,
    conf_folder,
    find_groups,
    find_recipes,
    no_override,
    split_recipe_file,
    summary,
)
from rltrain.config.overrides import Override, check_overrides
from rltrain.config.redact import redacted_text
from rltrain.config.saved_config import save_config, save_recipe
from rltrain.controller.checks.preflight import preflight
from rltrain.controller.run_data import RunData

PROGRAM = "python -m rltrain.main"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.

    Exit status: 2 for a bad request, 1 for a run that failed, 130 or 143 for one that SIGINT or
    SIGTERM ended.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        arguments = parse_arguments(argv)
        if arguments.help or not argv:
            sys.stdout.write(help_text(find_groups(arguments.config_dir)))
            return 0
        config = compose(arguments.overrides, arguments.config_dir)
        if arguments.cfg:
            sys.stdout.write(OmegaConf.to_yaml(config.model_dump(mode="json")))
            return 0
        config = start_folder(config)
        data = preflight(config)
        save_config(config, PROGRAM, argv)
        save_changes_of_recipe(config, arguments)
    except ValueError as error:
        return fail("cannot start", error, 2)
    except KeyboardInterrupt as error:
        return interrupted(error)
    except Exception as error:
        return fail(f"cannot start ({keep_traceback()} has the details)", error, 1)
    return run(config, data)


def run(config: Config, data: RunData) -> int:
    """Train. An error is one message in the terminal, in ``error.log`` and in the report."""
    folder = Path(config.trainer.output_dir)
    began = time.time()
    try:
        if config.algorithm.type == "sft":
            from rltrain.controller.sft import run as train
        else:
            from rltrain.controller.rl import run as train
        train(config, data)
    except KeyboardInterrupt as error:
        keep_outcome(folder, error, began)
        return interrupted(error)
    except Exception as error:
        keep_outcome(folder, error, began)
        return fail(f"stopped ({keep_traceback(folder)} has the details)", error, 1)
    return 0


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, so that everything is closed as after Ctrl-C."""


def _terminate(*_: Any) -> NoReturn:
    raise Terminated("SIGTERM")


def interrupted(error: KeyboardInterrupt) -> int:
    was_terminated = isinstance(error, Terminated)
    sys.stderr.write(f"rltrain: ended by {'SIGTERM' if was_terminated else 'Ctrl-C (SIGINT)'}\n")
    return 128 + (signal.SIGTERM if was_terminated else signal.SIGINT)


def fail(summary_line: str, error: Exception, status: int) -> int:
    """Print the error in the terminal. Errors not written for users are shown with their class."""
    if os.environ.get("RLTRAIN_DEBUG") == "1":
        raise error
    error = getattr(error, "cause", None) or error
    text = redacted_text(str(error), os.environ)
    if not isinstance(error, ValueError | RuntimeError | OSError):
        text = f"{type(error).__name__}: {text}"
    sys.stderr.write(f"rltrain: {summary_line}\n  {text.replace(chr(10), chr(10) + '  ')}\n")
    return status


def keep_traceback(folder: Path | None = None) -> Path:
    """Write the traceback of the current error to ``error.log``, and return its path.

    A new temporary file is used without a folder, or if the folder cannot be written.
    """
    from rltrain.actors.last_error import strip_ray_frames

    text = redacted_text(strip_ray_frames(traceback.format_exc()), os.environ)
    if folder is not None:
        with suppress(OSError):  # the disk may be full, and that is the error to show
            (folder / "error.log").write_text(text, encoding="utf-8")
            return folder / "error.log"
    with tempfile.NamedTemporaryFile(
        "w", prefix="rltrain-error-", suffix=".log", delete=False, encoding="utf-8"
    ) as file:
        with suppress(OSError):
            file.write(text)
        return Path(file.name)


def keep_outcome(folder: Path, error: BaseException, began: float) -> None:
    """Write the outcome and the report of a run, unless a tracker has done so since ``began``, in
    seconds since 1970."""
    from rltrain.tracking.report import write_report
    from rltrain.tracking.tracker import OUTCOME, write_outcome

    if (folder / OUTCOME).exists() and (folder / OUTCOME).stat().st_mtime >= began:
        return
    try:
        write_outcome(folder, error)
        write_report(folder)
    except Exception as other:  # the error that ended the run is the one to show
        logging.getLogger(__name__).warning("no report could be written: %r", other)


def start_folder(config: Config) -> Config:
    """``config`` with the time filled into an absolute ``trainer.output_dir``."""
    folder = Path(time.strftime(config.trainer.output_dir)).expanduser().absolute()
    trainer = config.trainer.model_copy(update={"output_dir": str(folder)})
    return config.model_copy(update={"trainer": trainer})


def compose(overrides: Sequence[str] = (), config_dir: Path | None = None) -> Config:
    """The validated configuration of Hydra overrides such as ``+recipe=grpo_moe_r3``.

    Args:
        overrides: one of them may be a recipe file of the user's, such as ``my_run/recipe.yaml``.
        config_dir: a folder with more group files, e.g. your own ``recipe/``.

    Raises:
        ConfigError: also for errors of Hydra and OmegaConf, which are reworded.
    """
    groups = find_groups(config_dir)
    overrides, recipe_file = split_recipe_file(overrides)
    if recipe_file is not None:
        groups["recipe"][RECIPE_FILE] = recipe_file
    check_overrides([parse_override(text, groups) for text in overrides], groups)
    search = [f"hydra.searchpath=[{config_dir.absolute().as_uri()}]"] if config_dir else []
    try:
        store_schema_and_recipes()
        if recipe_file is not None:
            store_recipe(RECIPE_FILE, recipe_file)
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            composed = hydra_compose("config", overrides=[*overrides, *search])
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(reword(error)) from error
    assert isinstance(values, dict)
    if "recipe" in values:
        raise ConfigError("recipe: its file must begin with the line '# @package _global_'")
    return validate({str(key): value for key, value in values.items()})


def save_changes_of_recipe(config: Config, arguments: argparse.Namespace) -> None:
    """Write which keys the command line changed of the recipe that it names, for the report."""
    groups = find_groups(arguments.config_dir)
    overrides = [parse_override(text, groups) for text in arguments.overrides]
    for name in [o.value for o in overrides if o.name == "recipe"][-1:]:
        with suppress(ConfigError):  # alone, a recipe may lack a key such as model.path
            save_recipe(config, str(name), compose([f"+recipe={name}"], arguments.config_dir))


@cache
def store_schema_and_recipes() -> None:
    """Register the schema and the recipes with Hydra. ``recipes/NAME/recipe.yaml`` becomes the
    option NAME of the group ``recipe``."""
    store = ConfigStore.instance()
    store.store(name="schema", node=schema_node())
    for name, file in find_recipes().items():
        store_recipe(name, file)


def store_recipe(name: str, file: Path) -> None:
    node = OmegaConf.load(file)
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{file}: expected sections such as 'trainer:', found a list")
    ConfigStore.instance().store(group="recipe", name=name, node=node, package="_global_")


def reword(error: Exception) -> str:
    """The message of an error of Hydra or OmegaConf about a file, without internal details."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"{group}: there is no option {option}. {nearest(option, error.options)}"
    lines = [line.strip() for line in str(error).splitlines()]
    return "\n".join(line for line in lines if "object_type=" not in line)


def schema_node() -> DictConfig:
    """Hydra's base node: all defaults.

    It is not a struct, so that no key needs a plus. `check_overrides` rejects unknown keys.
    """
    node = OmegaConf.create(Config().model_dump(mode="json"))
    for section in node.values():
        OmegaConf.set_struct(section, False)
    return node


def parse_override(text: str, groups: Groups) -> Override:
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        name, equals, value = text.partition("=")
        advice = f"quote a value with special characters: {name}=\"'{value}'\""
        raise ConfigError(
            f"{text}: expected name=value such as trainer.steps=5, +recipe=NAME or a recipe file "
            f"such as recipe.yaml, found {str(error).partition(chr(10))[0]}"
            f"{'; ' + advice if equals else no_override(text, groups)}"
        ) from error
    if parsed.is_sweep_override():
        raise ConfigError(f"{text}: a run takes one value; start one run for each")
    signed = parsed.get_key_element()
    name = signed.lstrip("+~")
    return Override(name, parsed.value(), signed.removesuffix(name))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir", type=Path)
    return parser.parse_intermixed_args(argv)


def help_text(groups: Groups) -> str:
    recipes = "\n".join(f"  {name:<14} {summary(file)}" for name, file in groups["recipe"].items())
    choices = "\n".join(
        f"  {name:<14} {', '.join(sorted(files))}"
        for name, files in sorted(groups.items())
        if name != "recipe"
    )
    return f"""usage: {PROGRAM} RECIPE.yaml [name=value ...] [--cfg job] [--config-dir FOLDER]
       {PROGRAM} +recipe=NAME [name=value ...]

RECIPE.yaml is a file of your own; `rltrain init FOLDER` writes one with all that it needs.

recipes, chosen with +recipe=NAME:
{recipes}

groups, chosen with GROUP=OPTION:
{choices}

keys, set with name=value (`rltrain keys` lists them with their types and defaults):
  trainer.steps=5 optimizer.lr=1e-4 policy.parallel.tp=2 rollout.engine_args.max_num_seqs=64

options:
  --cfg job            print the resolved configuration and stop
  --config-dir FOLDER  more group files, e.g. FOLDER/recipe/mine.yaml

RLTRAIN_DEBUG=1 shows the traceback of an error.
"""


if __name__ == "__main__":
    sys.exit(main())
