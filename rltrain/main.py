"""A training run: compose the configuration with Hydra, validate it, check the machine, run.

``python -m rltrain.main ...`` is ``rltrain train ...``.

Ray, torch and the trainers are imported after the configuration, data and machine were checked: an
error there comes within seconds.
"""

import logging
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rltrain.actors.interrupts import exit_status, grace, last_act
from rltrain.actors.outcome import OUTCOME
from rltrain.actors.run_lock import run_lock
from rltrain.actors.run_temp import keep_compiled
from rltrain.cli.failure import fail, keep_traceback
from rltrain.cli.going_on import how_to_go_on
from rltrain.cli.typed_command import program
from rltrain.config import Config
from rltrain.config.bounded_files import check_yaml
from rltrain.config.error_codes import with_code
from rltrain.config.errors import ConfigError, nearest, validate
from rltrain.config.hydra_groups import Groups, conf_folder, find_groups, find_recipes
from rltrain.config.overrides import Override, check_overrides
from rltrain.config.recipe_file import (
    RECIPE_FILE,
    check_folder_of_command,
    no_override,
    split_recipe_file,
)
from rltrain.config.redact import log_without_secrets, redacted
from rltrain.config.saved_config import save_config, save_recipe

if TYPE_CHECKING:
    from rltrain.controller.run_data import RunData

CANNOT_START = "rltrain: cannot start"


def main(argv: Sequence[str] | None = None) -> int:
    """``rltrain train`` with the arguments ``argv``."""
    from rltrain.cli.app import main as rltrain

    return rltrain(["train", *(sys.argv[1:] if argv is None else argv)])


def train(
    overrides: Sequence[str],
    config_dir: Path | None,
    arguments: Sequence[str],
    *,
    show: bool = False,
) -> int:
    """Train with the configuration that ``overrides`` describe; the result is the exit status.

    Args:
        config_dir: as in `compose`
        arguments: of ``rltrain train``, as they were typed
        show: only print the configuration
    """
    log_without_secrets()
    keep_compiled()
    with ExitStack() as held:
        try:
            config = compose(overrides, config_dir)
            if show:
                sys.stdout.write(OmegaConf.to_yaml(redacted(config.model_dump(mode="json"))))
                return 0
            config = start_folder(config)
            held.enter_context(run_lock(Path(config.trainer.output_dir)))
            data = prepare(config, overrides, config_dir, arguments)
        except ValueError as error:
            return fail(CANNOT_START, error, 2)
        except KeyboardInterrupt:
            sys.stderr.write("rltrain: interrupted before anything was started\n")
            return exit_status()
        except OSError as error:  # a full or read-only disk, most likely
            return fail(CANNOT_START, error, 1)
        except Exception as error:
            return fail(f"{CANNOT_START} ({keep_traceback()})", error, 1)
        return run(config, data, arguments)


def prepare(
    config: Config, overrides: Sequence[str], config_dir: Path | None, arguments: Sequence[str]
) -> "RunData":
    """Check all that can be checked, and write the configuration into the run's folder.

    Args:
        arguments: as in `train`

    Raises:
        ValueError: the run cannot start.
    """
    from rltrain.controller.checks.preflight import preflight
    from rltrain.controller.choose_checkpoint import keep_earlier_config

    data = preflight(config)
    keep_earlier_config(config)
    save_config(config, shlex.join(program(arguments)), arguments)
    save_changes_of_recipe(config, overrides, config_dir)
    return data


def run(config: Config, data: "RunData", arguments: Sequence[str]) -> int:
    """Train. An error is one message in the terminal, in ``error.log`` and in the report."""
    folder = Path(config.trainer.output_dir)
    began = time.time()
    try:
        train_until_end(config, data)
    except KeyboardInterrupt as error:
        keep_outcome(folder, error, began)
        sys.stderr.write(f"rltrain: {how_to_go_on(config, arguments)}\n")
        return exit_status()
    except Exception as error:
        keep_outcome(folder, error, began)
        return fail(f"rltrain: stopped ({keep_traceback(folder)})", error, 1)
    return 0


def train_until_end(config: Config, data: "RunData") -> None:
    """Train, and go on after a part was lost; if a second signal ends the closing at once, the
    outcome is written all the same."""
    if config.algorithm.type == "sft":
        from rltrain.controller.sft import run as train_supervised
    else:
        from rltrain.controller.rl import run as train
    from rltrain.controller.run_progress import run_progress
    from rltrain.controller.supervision import Restarts, supervise
    from rltrain.tracking.tracker import write_outcome

    def attempt(config: Config, restarts: Restarts) -> None:
        has_held_out = bool(data.problems.held_out)
        with closing(run_progress(config, has_held_out=has_held_out)) as progress:
            if config.algorithm.type == "sft":
                train_supervised(config, data, progress)
            else:
                train(config, data, progress, restarts)

    folder = Path(config.trainer.output_dir)
    ended = last_act(lambda why: write_outcome(folder, KeyboardInterrupt(why)))
    with ended, grace(config.trainer.grace_s):
        supervise(config, attempt)


def keep_outcome(folder: Path, error: BaseException, began: float) -> None:
    """Write the outcome and the report of a run, unless a tracker has done so since ``began``, in
    seconds since 1970."""
    from rltrain.tracking.report import write_report
    from rltrain.tracking.tracker import write_outcome

    if (folder / OUTCOME).exists() and (folder / OUTCOME).stat().st_mtime >= began:
        return
    try:
        write_outcome(folder, error)
        write_report(folder)
    except Exception as other:  # the error that ended the run is the one to show
        logging.getLogger(__name__).warning("no report could be written: %r", other)


def start_folder(config: Config) -> Config:
    """``config`` with the time filled into an absolute ``trainer.output_dir``, and with the model's
    folders as this machine calls them, if other machines are to find them by the same names."""
    folder = Path(time.strftime(config.trainer.output_dir)).expanduser().absolute()
    trainer = config.trainer.model_copy(update={"output_dir": str(folder)})
    model = config.model
    if config.cluster.address is not None:
        named = {"path": model.path, "weights": model.weights}
        absolute = {k: str(Path(v).expanduser().absolute()) for k, v in named.items() if v}
        model = model.model_copy(update=absolute)
    return config.model_copy(update={"trainer": trainer, "model": model})


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
        raise ConfigError(with_code(reword(error), "RL1009")) from error
    assert isinstance(values, dict)
    if "recipe" in values:
        raise ConfigError(
            "recipe: its file must begin with the line '# @package _global_' [RL1009]"
        )
    config = validate({str(key): value for key, value in values.items()})
    if recipe_file is not None:
        check_folder_of_command(recipe_file, config)
    return config


def save_changes_of_recipe(
    config: Config, overrides: Sequence[str], config_dir: Path | None
) -> None:
    """Write which keys the command line changed of the recipe that it names, for the report."""
    rest, recipe_file = split_recipe_file(overrides)
    groups = find_groups(config_dir)
    parsed = [parse_override(text, groups) for text in rest]
    named = [str(override.value) for override in parsed if override.name == "recipe"]
    if recipe_file is not None:
        named = [str(recipe_file)]
    for name in named[-1:]:
        alone = name if recipe_file else f"+recipe={name}"
        with suppress(ConfigError):  # alone, a recipe may lack a key such as model.path
            save_recipe(config, name, compose([alone], config_dir))


@cache
def store_schema_and_recipes() -> None:
    """Register the schema and the recipes with Hydra. ``recipes/NAME/recipe.yaml`` becomes the
    option NAME of the group ``recipe``."""
    store = ConfigStore.instance()
    store.store(name="schema", node=schema_node())
    for name, file in find_recipes().items():
        store_recipe(name, file)


def store_recipe(name: str, file: Path) -> None:
    check_yaml(file)
    node = OmegaConf.load(file)
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{file}: expected sections such as 'trainer:', found a list [RL1009]")
    ConfigStore.instance().store(group="recipe", name=name, node=node, package="_global_")


def reword(error: Exception) -> str:
    """The message of an error of Hydra or OmegaConf about a file, without internal details."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"{group}: there is no option {option}. {nearest(option, error.options)} [RL1007]"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        tab = ". Indent with spaces" if "'\\t'" in str(error.problem) else ""
        return f"{mark.name}, line {mark.line + 1}: {error.problem}{tab}"
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


def _syntax_error(error: Exception) -> str:
    return str(error).partition("\n")[0]


def parse_override(text: str, groups: Groups) -> Override:
    try:
        parsed = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError) as error:  # Python reads no integer of 5000 digits
        name, equals, value = text.partition("=")
        advice = f"quote a value with special characters: {name}=\"'{value}'\""
        raise ConfigError(
            f"{text}: expected name=value such as trainer.steps=5, +recipe=NAME or a recipe file "
            f"such as recipe.yaml, found {_syntax_error(error) if equals else 'no equals sign'}"
            f"{'; ' + advice if equals else no_override(text, groups)}"
            " [RL1006]"
        ) from error
    if parsed.is_sweep_override():
        raise ConfigError(f"{text}: a run takes one value; start one run for each [RL1006]")
    signed = parsed.get_key_element()
    name = signed.lstrip("+~")
    return Override(name, parsed.value(), signed.removesuffix(name))


if __name__ == "__main__":
    sys.exit(main())
