"""The wheel carries ``conf/`` and ``recipes/``: the main command composes from an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rltrain.config import Config
from rltrain.main import compose

ROOT = Path(__file__).parents[2]


@pytest.mark.integration
def test_the_installed_wheel_composes_the_recipe(tmp_path: Path) -> None:
    built, site, empty = tmp_path / "built", tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    python(["-m", "build", "--wheel", "--no-isolation", "--outdir", str(built)], ROOT)
    (wheel,) = built.glob("*.whl")
    python(["-m", "pip", "install", "--no-deps", "--target", str(site), str(wheel)], empty)

    where = python(["-c", "import rltrain.main; print(rltrain.main.__file__)"], empty, site)
    assert Path(where.strip()).is_relative_to(site)
    wrong = "import sys; from rltrain.main import main; sys.exit(main(['+recipe=x']) != 2)"
    assert python(["-c", wrong], empty, site) == ""
    printed = python(["-m", "rltrain.main", "+recipe=grpo_moe_r3", "--cfg", "job"], empty, site)
    assert Config.model_validate(yaml.safe_load(printed)) == compose(["+recipe=grpo_moe_r3"])
    assert not list(empty.iterdir())

    python(["-m", "rltrain.cli.app", "init", "my_run"], empty, site)
    printed = python(["-m", "rltrain.main", "recipe.yaml", "--cfg", "job"], empty / "my_run", site)
    assert yaml.safe_load(printed)["data"]["path"] == "data/train.jsonl"


def python(arguments: list[str], folder: Path, path: Path | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
