"""Every recipe composes, and the command line can override every choice of it."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rltrain.cli.app import main as rltrain
from rltrain.config.hydra_groups import conf_folder, find_groups
from rltrain.main import compose

ROOT = Path(__file__).parents[2]
GROUPS = find_groups()
RECIPES = GROUPS["recipe"]
FULL_SIZE = [name for name in RECIPES if name.endswith("gpu")]
OPTIONS = [
    (group, option) for group, options in GROUPS.items() if group != "recipe" for option in options
]
NEEDED = {
    ("data", "jsonl"): ["data.path=x"],
    ("data", "math"): ["data.path=x"],
    ("data", "parquet"): ["data.path=x"],
    ("data", "huggingface"): ["data.path=x"],
    ("data", "reasoning_gym"): ["data.task=basic_arithmetic"],
}
"""What an option asks for besides."""


def leaves(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix: values}
    return {
        name: leaf
        for key, value in values.items()
        if key != "defaults"
        for name, leaf in leaves(value, f"{prefix}.{key}" if prefix else key).items()
    }


def read(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text()) or {}


def read_base(file: Path) -> dict[str, Any]:
    """The recipe that a recipe is built on."""
    names = [name for name in read(file).get("defaults", []) if isinstance(name, str)]
    return read(RECIPES[names[0]]) if names else {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_and_validates(recipe: str) -> None:
    compose([f"+recipe={recipe}"])


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_composes_and_validates(group: str, option: str) -> None:
    compose([f"{group}={option}", *NEEDED.get((group, option), [])])


@pytest.mark.parametrize(
    ("recipe", "advantage", "loss", "mode"),
    [
        ("grpo_moe_r3", "grpo", "ppo", "r3"),
        ("grpo_moe_r3_async", "grpo", "ppo", "r3"),
        ("grpo_moe_r2", "grpo", "ppo", "r2"),
        ("grpo_moe_off", "grpo", "ppo", "off"),
        ("dr_grpo_moe_r3", "dr_grpo", "ppo", "r3"),
        ("dapo_moe_r3", "grpo", "ppo", "r3"),
        ("gspo_moe_r3", "grpo", "gspo", "r3"),
        ("cispo_moe_r3", "grpo", "cispo", "r3"),
        ("rloo_moe_r3", "rloo", "pg", "r3"),
        ("ppo_moe_r3", "gae", "ppo", "r3"),
    ],
)
def test_a_recipe_is_what_its_name_says(recipe: str, advantage: str, loss: str, mode: str) -> None:
    config = compose([f"+recipe={recipe}"])
    assert config.algorithm.type == "rl"
    assert (config.algorithm.advantage, config.algorithm.loss) == (advantage, loss)
    assert config.routing_replay.mode == mode


def test_sft_is_supervised() -> None:
    config = compose(["+recipe=sft_tiny"])
    assert (config.algorithm.type, config.routing_replay.mode) == ("sft", "off")


def test_the_three_grpo_recipes_differ_in_replay_alone() -> None:
    r3, r2, off = (
        compose([f"+recipe=grpo_moe_{mode}"]).model_dump(exclude={"routing_replay"})
        for mode in ("r3", "r2", "off")
    )
    assert r3 == r2 == off


def test_the_asynchronous_recipe_differs_in_what_it_is_named_for() -> None:
    plain, ahead = (compose([f"+recipe=grpo_moe_r3{end}"]).model_dump() for end in ("", "_async"))
    assert ahead["trainer"].pop("max_staleness") == 1 and ahead["algorithm"].pop("correction")
    for config in (plain, ahead):
        config["trainer"].pop("max_staleness", None)
        config["algorithm"].pop("correction", None)
    assert plain == ahead


def test_no_file_repeats_a_default() -> None:
    """The schema owns the defaults; a file holds differences."""
    from rltrain.config.reference import keys

    defaults = {key.name: key.default for key in keys()}
    for group, options in GROUPS.items():
        for file in options.values():
            stated = leaves(read(file), "" if group == "recipe" else group)
            base = defaults | leaves(read_base(file))
            for name, value in stated.items():
                assert name == group or value != base.get(name), f"{file} repeats {name}={value}"


def test_no_recipe_sets_what_a_group_sets() -> None:
    """Recipes are merged last: such a key would make GROUP=OPTION do nothing."""
    by_groups = {
        name for group, option in OPTIONS for name in leaves(read(GROUPS[group][option]), group)
    }
    for file in RECIPES.values():
        assert not by_groups & leaves(read(file)).keys(), file


def test_config_yaml_has_a_choice_for_every_group() -> None:
    defaults = yaml.safe_load((conf_folder() / "config.yaml").read_text())["defaults"]
    chosen = {name for entry in defaults if isinstance(entry, dict) for name in entry}
    assert chosen == GROUPS.keys() - {"recipe"}


@pytest.mark.parametrize("recipe", FULL_SIZE)
def test_a_full_size_recipe_fits_its_cards(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its README has the command and what that prints; layout, lengths and replay are checked."""
    page = (ROOT / "recipes" / recipe / "README.md").read_text()
    [command] = re.findall(r"^`rltrain plan (.+)`$", page, re.MULTILINE)
    assert f"+recipe={recipe} " in command and "--gpus" in command
    monkeypatch.chdir(ROOT)
    nodes = int(command.partition("--gpus ")[2].split()[0]) // 8
    assert rltrain(["plan", *command.split()]) == 0
    printed = capsys.readouterr().out
    assert f"```\n{printed}```" in page
    [verdict] = printed.partition("\nfits: ")[2].splitlines()
    assert "fullest policy rank" in verdict
    assert printed.count("\n  node-") == (nodes if nodes > 1 else 0)
    assert (nodes > 1) == ("bytes between nodes in a step" in printed)


@pytest.mark.parametrize("recipe", FULL_SIZE)
def test_a_full_size_recipe_is_grpo_with_r3(recipe: str) -> None:
    config = compose([f"+recipe={recipe}"])
    assert (config.algorithm.advantage, config.routing_replay.mode) == ("grpo", "r3")
    assert config.model.path is not None and config.model.path.startswith("models/")


def test_qwen3_on_eight_cards_of_80_gb_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """As its README says."""
    assert rltrain(["plan", "+recipe=grpo_qwen3_30b_a3b_8gpu", "--gpus", "8"]) == 1
    printed = capsys.readouterr().out
    assert "does not fit" in printed and "more policy.parallel.dp" in printed


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_a_page(recipe: str) -> None:
    """With the command, the hardware and the expected curve, or that there is none."""
    folder = RECIPES[recipe].parent
    page = (folder / "README.md").read_text()
    assert f"+recipe={recipe}" in page and "**Hardware**" in page
    if (curve := folder / "curve.csv").exists():
        header, *rows = csv.reader(curve.read_text().splitlines())
        cells = [[name.replace("_", " ") for name in header]]
        cells += [[step, *(f"{accuracy} %" for accuracy in seeds)] for step, *seeds in rows]
        heading, *lines = [f"| {' | '.join(row)} |" for row in cells]
        assert "\n".join([heading, "|---" * len(header) + "|", *lines]) + "\n" in page
    else:
        assert re.search(r"no expected curve|No curve was kept", " ".join(page.split()))
