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
        raise ConfigError(f"--config-dir: expected a folder, found none at {config_dir}")
    groups: Groups = {"recipe": find_recipes()}
    for folder in (conf_folder(), config_dir):
        for file in sorted(folder.glob("*/*.yaml")) if folder else ():
            options = groups.setdefault(file.parent.name, {})
            if file.stem in options:
                raise ConfigError(f"{file}: rltrain has {options[file.stem]}: rename your file")
            options[file.stem] = file
    return groups


def summary(file: Path) -> str:
    """The first comment of a group file: what it is, in a line."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line[1:].strip()
    return ""
