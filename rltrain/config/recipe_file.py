"""A recipe that stands on the command line as a file, such as ``my_run/recipe.yaml``.

Its relative paths start at the folder in which the command runs, as those on the command line do.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rltrain.config.errors import ConfigError
from rltrain.config.hydra_groups import Groups
from rltrain.config.reward import is_url
from rltrain.config.root import Config

RECIPE_FILE = "recipe_file"
"""The recipe whose file stands on the command line, as an option of the group ``recipe``."""


def split_recipe_file(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """The overrides among the arguments, and the recipe file: one like ``my_run/recipe.yaml``.

    Raises:
        ConfigError: there is no such file, or there are two.
    """
    names = [name for name in arguments if "=" not in name and name.endswith((".yaml", ".yml"))]
    if len(names) > 1:
        raise ConfigError(
            f"expected one recipe file, found {len(names)}: {', '.join(names)} [RL1008]"
        )
    overrides = [argument for argument in arguments if argument not in names]
    if not names:
        return overrides, None
    file = Path(names[0]).expanduser()
    if not file.is_file():
        near = [
            str(path)
            for pattern in ("[!.]*.y*ml", "[!.]*/recipe.y*ml")
            for path in sorted(Path().glob(pattern))
        ]
        raise ConfigError(
            f"{file}: there is no such recipe file in {Path.cwd()}. "
            + (f"Here: {', '.join(near[:4])}" if near else "`rltrain init FOLDER` writes one")
            + " [RL1007]"
        )
    return [f"+recipe={RECIPE_FILE}", *overrides], file


def no_override(argument: str, groups: Groups) -> str:
    """What to type instead of an argument that is neither ``name=value`` nor a recipe file."""
    inner = Path(argument) / "recipe.yaml"
    if inner.is_file():
        return f"; the folder has a recipe: {inner}"
    if argument in groups["recipe"]:
        return f"; a recipe is added with +recipe={argument}"
    if argument in groups:
        return f"; choose one of them, e.g. {argument}={sorted(groups[argument])[0]}"
    return ""


def check_folder_of_command(file: Path, config: Config) -> None:
    """Raise ConfigError if a path is missing here and is there beside the recipe file."""
    for key, path in relative_paths(config):
        beside = file.parent / path
        if beside.exists() and not Path(path).exists():
            raise ConfigError(
                f"{key}: there is no {path} in {Path.cwd()}, where relative paths start, and there "
                f"is one beside the recipe: run the command in {file.parent} [RL2001]"
            )


def relative_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Keys and values of the relative paths of files that a run reads."""
    paths = {
        "model.path": config.model.path,
        "model.weights": config.model.weights,
        "data.path": config.data.path,
        "data.eval_path": config.data.eval_path,
        **{key: _file_of(name) for key, name in config.data.reward.functions.items()},
    }
    for key, path in paths.items():
        if path and not Path(path).expanduser().is_absolute():
            yield key, path


def _file_of(reward: str) -> str | None:
    """The file of ``reward.py:score``; None for what is in no file."""
    file, _, function = reward.rpartition(":")
    return file if function and not is_url(reward) else None
