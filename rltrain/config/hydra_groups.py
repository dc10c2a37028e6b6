"""The configuration files that Hydra composes: their folders, groups and options."""

from pathlib import Path

from rltrain.config.errors import ConfigError

Groups = dict[str, dict[str, Path]]
"""Group -> option -> file, e.g. ``groups["data"]["jsonl"]``."""


def conf_folder() -> Path:
    """``conf/`` of the installed package, or of the source checkout around it."""
    package = Path(__file__).parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(
        f"expected conf/config.yaml in {package} or beside it, found neither: install rltrain again"
        " [RL1009]"
    )


def find_recipes() -> dict[str, Path]:
    """The file of each folder of ``recipes/``, which lies beside ``conf/``."""
    files = sorted(conf_folder().with_name("recipes").glob("*/recipe.yaml"))
    return {file.parent.name: file for file in files}


def find_groups(config_dir: Path | None = None) -> Groups:
    """All groups of ``conf/``, the recipes, and both of the user's own ``config_dir``.

    Raises:
        ConfigError: there is no such folder, or a file of it has the name of one of ours.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir: expected a folder, found none at {config_dir} [RL1009]")
    groups: Groups = {"recipe": find_recipes()}
    for folder in (conf_folder(), config_dir):
        for file in sorted(folder.glob("*/*.yaml")) if folder else ():
            options = groups.setdefault(file.parent.name, {})
            if file.stem in options:
                raise ConfigError(
                    f"{file}: rltrain has {options[file.stem]}: rename your file [RL1009]"
                )
            options[file.stem] = file
    return groups


def summary(file: Path) -> str:
    """The first comment of a group file: what it is, in a line."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line[1:].strip()
    return ""


def describe_groups(groups: Groups) -> str:
    """Recipes, the options of the other groups, and how to set a key, for the help."""
    width = max(map(len, groups["recipe"]))
    recipes = "\n".join(
        f"  {name:<{width}}  {summary(file)}" for name, file in groups["recipe"].items()
    )
    choices = "\n".join(
        f"  {name:<14}  {', '.join(sorted(files))}"
        for name, files in sorted(groups.items())
        if name != "recipe"
    )
    return f"""
RECIPE.yaml is a file of your own; `rltrain init FOLDER` writes one with all that it needs.

recipes, chosen with +recipe=NAME:
{recipes}

groups, chosen with GROUP=OPTION:
{choices}

keys, set with name=value (`rltrain keys` lists them with their types and defaults):
  trainer.steps=5 optimizer.lr=1e-4 policy.parallel.tp=2 rollout.engine_args.max_num_seqs=64

RLTRAIN_DEBUG=1 shows the traceback of an error.
"""
