"""The files that Hydra composes: where they lie and what each offers."""

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


def find_groups(config_dir: Path | None = None) -> Groups:
    """All groups of ``conf/`` and of the user's own ``config_dir``.

    Raises:
        ConfigError: there is no such folder.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir: expected a folder, found none at {config_dir}")
    found: Groups = {}
    for folder in (conf_folder(), config_dir):
        for file in sorted(folder.glob("*/*.yaml")) if folder else ():
            found.setdefault(file.parent.name, {})[file.stem] = file
    return found


def summary(file: Path) -> str:
    """The first comment of a group file: what it is, in a line."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line[1:].strip()
    return ""
