"""Every command of the tutorial runs, in an empty folder, and prints what the page shows.

``-m slow`` runs those that take minutes, too.
"""

import re
import shlex
from pathlib import Path

import pytest

from rltrain.cli.app import main
from rltrain.cli.init_command import write_run_folder
from rltrain.cli.init_recipe import Choices
from rltrain.config.hydra_groups import find_groups
from rltrain.config.reference import keys, sections
from rltrain.main import compose
from rltrain.tracking.report.chart_specs import LEARNING, MISMATCH, TIME
from tests.tutorial.pages import PAGES, blocks, check_output, run_page


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    empty = tmp_path / "here"
    empty.mkdir()
    return empty


def name_of(page: Path) -> str:
    return page.stem


WITH_COMMANDS = [page for page in PAGES if any(block.kind == "bash" for block in blocks(page))]
QUICK = [
    page
    for page in WITH_COMMANDS
    if any(block.kind == "bash" and not block.is_slow for block in blocks(page))
]


@pytest.mark.parametrize("page", QUICK, ids=name_of)
def test_the_quick_commands_of_a_page(page: Path, folder: Path) -> None:
    run_page(page, folder, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_all_commands_of_a_page(page: Path, folder: Path) -> None:
    run_page(page, folder, slow=True)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_for_gpus_compose(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand in ``shell`` blocks, which are not run."""
    write_run_folder(tmp_path / "run", Choices(gpus=4))
    monkeypatch.chdir(tmp_path / "run")
    for block in blocks(page):
        assert block.kind in ("bash", "text", "shell", "python", "json", "yaml"), block.kind
        if block.kind != "shell":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            program, command, *arguments = shlex.split(line, comments=True) or ["", ""]
            if (program, command) == ("rltrain", "train"):
                compose(arguments)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_that_a_page_names_exist(page: Path) -> None:
    known = {key.name for key in keys()} | set(sections())
    free = tuple(f"{key.name}." for key in keys() if key.free)
    roots = "|".join(sorted({name.partition(".")[0] for name in known}))
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    ours = re.sub(r"^\| [^|]* \|", "", prose, flags=re.MULTILINE) if "05" in page.name else prose
    named = re.findall(rf"`((?:{roots})(?:\.\w+)+)(?:[=:][^`]*)?`", ours)
    named = [name for name in named if not name.endswith((".py", ".yaml"))]
    assert [name for name in named if name not in known and not name.startswith(free)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_that_a_page_names_exist(page: Path) -> None:
    """``algorithm=ppo`` is a choice of the group ``algorithm``."""
    groups = find_groups()
    for name, option in re.findall(r"`\+?([a-z_]+)=(\w+)`", page.read_text()):
        assert option in groups[name], f"{name}={option}"


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_a_run_of_a_new_folder_its_report_and_its_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The way of page 1, as small as a run can be."""
    monkeypatch.chdir(folder)
    small = ["trainer.steps=1", "trainer.prompts_per_step=4", "trainer.mini_batches=1"]
    small += ["model.tiny.num_layers=1", "model.tiny.warm_start.steps=0", "data.eval_size=4"]
    assert main(["init", "my_run"]) == 0
    monkeypatch.chdir("my_run")
    command = ["train", "recipe.yaml", *small, "trainer.output_dir=outputs/first"]
    assert main(command) == 0
    capfd.readouterr()
    assert main(["report", "outputs/first"]) == 0
    assert Path("outputs/first/report.html").is_file()
    assert main(["export", "outputs/first", "../model"]) == 0
    monkeypatch.chdir("..")
    assert main(["init", "next", "--model", "model"]) == 0
    monkeypatch.chdir("next")
    assert main(["data", "recipe.yaml"]) == 0
    check_output("<|start|>user\nusable as configured", capfd.readouterr().out)


def test_an_output_that_differs_is_found() -> None:
    check_output("rows 5, kept 5\ndone in 3 s", "x\nrows 7, kept 1,024\ny\ndone in 1.5 s\n")
    for expected in ("rows 5\ngone", "done in 3 s\nrows 5, kept 5"):
        with pytest.raises(AssertionError, match="expected a line like"):
            check_output(expected, "rows 7, kept 7\ndone in 1 s\n")


def test_page_3_explains_every_chart() -> None:
    page = next(page for page in PAGES if page.name.startswith("03")).read_text()
    explained = {
        cell.replace("\\|", "|") for cell in re.findall(r"^\| ((?:\\\||[^|])+) \|", page, re.M)
    }
    charts = {spec.title for group in (LEARNING, MISMATCH, TIME) for spec in group}
    assert charts - explained == set()
