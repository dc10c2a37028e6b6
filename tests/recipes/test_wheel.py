"""The wheel has all that a run needs, and runs from a folder that is far from the repository.

Its environment is new and has rltrain from the wheel alone. What rltrain needs, 2.4 GB, is linked
from the environment that runs the test.
"""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from rltrain.config import Config
from rltrain.main import compose

ROOT = Path(__file__).parents[2]
FOLDERS = {"rltrain": "rltrain", "conf": "rltrain/conf", "recipes": "rltrain/recipes"}
"""Folder of the repository -> where the wheel has it."""
EXPLAINED = "docs/troubleshooting.md"
"""What `rltrain explain` prints; in the wheel below rltrain/, like the folders."""
pytestmark = pytest.mark.integration


def run(command: list[str | Path], folder: Path) -> str:
    # Nothing that an activated environment or a source tree leaves behind.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("built")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", built, "."], ROOT)
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin/`` of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel], folder)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run([python, "-c", query], folder).strip())
    # A path in a .pth file does not follow the .pth files there, as that of an editable install.
    (site / "stack.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run([python, "-c", "import rltrain.main; print(rltrain.main.__file__)"], folder)
    assert Path(where.strip()).is_relative_to(site)
    return folder / "bin"


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    tracked = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT).split()
    wanted = {
        f"{FOLDERS[top]}/{rest}"
        for top, _, rest in (file.partition("/") for file in tracked)
        if top in FOLDERS and (ROOT / top / rest).is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
        (info,) = {name.partition("/")[0] for name in files - wanted - {f"rltrain/{EXPLAINED}"}}
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert re.fullmatch(r"rltrain-[\d.]+\.dist-info", info)
    assert {*wanted, f"rltrain/{EXPLAINED}", "rltrain/py.typed"} <= files
    assert f"{info}/licenses/LICENSE" in files
    assert "rltrain = rltrain.cli.app:main" in scripts
    for python in ("3.11", "3.12", "3.13"):
        assert f"Classifier: Programming Language :: Python :: {python}" in metadata


def test_the_command_answers(installed: Path, tmp_path: Path) -> None:
    assert run([installed / "rltrain", "--version"], tmp_path).startswith("rltrain ")
    assert "init" in run([installed / "rltrain", "--help"], tmp_path)
    assert not list(tmp_path.iterdir())


def test_recipes_compose_as_in_the_repository(installed: Path, tmp_path: Path) -> None:
    train = [installed / "python", "-m", "rltrain.main"]
    wrong = "import sys; from rltrain.main import main; sys.exit(main(['+recipe=x']) != 2)"
    assert run([installed / "python", "-c", wrong], tmp_path) == ""
    printed = run([*train, "+recipe=grpo_moe_r3", "--cfg", "job"], tmp_path)
    assert Config.model_validate(yaml.safe_load(printed)) == compose(["+recipe=grpo_moe_r3"])
    assert not list(tmp_path.iterdir())
    run([installed / "rltrain", "init", "my_run"], tmp_path)
    printed = run([*train, "recipe.yaml", "--cfg", "job"], tmp_path / "my_run")
    assert yaml.safe_load(printed)["data"]["path"] == "data/train.jsonl"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_new_folder_trains(installed: Path, tmp_path: Path) -> None:
    """Two steps of its recipe, its reward function's test, and the report."""
    rltrain = installed / "rltrain"
    run([rltrain, "init", "my_run"], tmp_path)
    folder = tmp_path / "my_run"
    run([rltrain, "train", "recipe.yaml", "trainer.steps=2", "trainer.output_dir=out"], folder)
    outcome = (folder / "out" / "outcome.json").read_text()
    assert '"finished"' in outcome, outcome
    assert (folder / "out" / "report.html").stat().st_size > 100_000
