"""``rltrain init``: a new folder with a recipe, a reward function with a test, data and a README.

Everything is checked before the first file is written, and no file is ever overwritten.
"""

import json
import shlex
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from rltrain.cli.init_recipe import Choices, as_yaml, recipe_values
from rltrain.config import Config
from rltrain.data.arithmetic import arithmetic_rows

NUM_TRAIN, NUM_EVAL = 1024, 128
NUM_LISTED = 5


def init(folder: Path, choices: Choices) -> int:
    """Write the folder; raises as `write_run_folder`."""
    write_run_folder(folder, choices)
    inner = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}\n  "
    sys.stdout.write(f"wrote {folder}; README.md there lists the commands. Next:\n  {inner}")
    sys.stdout.write("rltrain data recipe.yaml\n")
    return 0


def write_run_folder(folder: Path, choices: Choices) -> None:
    """Write the files of a run into ``folder``, which is new or empty.

    Raises:
        ValueError: the folder cannot be used, or a choice is wrong or does not fit another.
    """
    folder = folder.expanduser()
    check_folder(folder)
    recipe, config = checked_recipe(folder.absolute().name, choices)
    files = {"recipe.yaml": recipe, **other_files(folder.absolute().name, choices, config)}
    try:
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("x", encoding="utf-8") as opened:
                opened.write(text)
    except OSError as error:
        raise ValueError(
            f"{folder}: expected a folder to write to, found: {error} [RL6001]"
        ) from error


def check_folder(folder: Path) -> None:
    """Raise ValueError unless ``folder`` can be a new folder, or is an empty one."""
    name = folder.name
    if folder.suffix in (".yaml", ".yml", ".py", ".jsonl", ".json"):
        raise ValueError(
            f"{folder}: expected the name of a new folder, found that of a file: rltrain init "
            f"{folder.with_suffix('')}"
            " [RL6009]"
        )
    if not name.isprintable() or name != name.strip() or name.startswith("-"):
        raise ValueError(
            f"{str(folder)!r}: expected a name without control characters, spaces at its ends or a "
            "dash at its start, such as my_run"
            " [RL6009]"
        )
    try:
        if folder.is_dir() and (inside := sorted(path.name for path in folder.iterdir())):
            more = f" and {len(inside) - NUM_LISTED} more" if len(inside) > NUM_LISTED else ""
            raise ValueError(
                f"{folder}: expected a new or empty folder, found {', '.join(inside[:NUM_LISTED])}"
                f"{more} in it. Nothing was written; choose another name"
                " [RL6009]"
            )
        if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
            raise ValueError(
                f"{folder}: expected a new or empty folder, found a file or a link [RL6009]"
            )
    except OSError as error:
        raise ValueError(
            f"{folder}: expected a new or empty folder, found: {error} [RL6009]"
        ) from error


def checked_recipe(name: str, choices: Choices) -> tuple[str, Config]:
    """The text of recipe.yaml, and the configuration that it makes."""
    # main imports Hydra, and plan_command main: not for the help.
    from rltrain.cli.plan_command import check_plan, with_architecture
    from rltrain.main import compose
    from rltrain.planning.machine import device

    base = compose([f"+recipe={choices.recipe}"]) if choices.recipe else None
    text = template("recipe.yaml.j2").render(recipe_values(name, choices, base))
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        config = compose([str(file)])
    config_with_model, _ = with_architecture(config)
    check_plan(config_with_model, device(config.cluster))
    return text, config


def other_files(name: str, choices: Choices, config: Config) -> dict[str, str]:
    """Reward, test, data and README, as far as the choices leave them to this folder."""
    files: dict[str, str] = {}
    about: dict[str, str] = {}
    has_reward = config.algorithm.type == "rl" and choices.reward is None
    if has_reward:
        files["reward.py"] = template("reward.py.j2").render()
        files["test_reward.py"] = template("test_reward.py.j2").render(has_sample=not choices.data)
        about["reward.py"] = "the reward function `score`"
        about["test_reward.py"] = "its test"
    if choices.data is None:
        num_warm_start = config.model.tiny.warm_start.num_problems
        rows = arithmetic_rows(num_warm_start, NUM_EVAL, NUM_TRAIN, seed=0)
        for file, part in {"train": "train", "eval": "held_out"}.items():
            files[f"data/{file}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows[part])
        about["data/train.jsonl"] = f"{NUM_TRAIN:,} digit sums to train on: `3594=` to `21`"
        about["data/eval.jsonl"] = f"{NUM_EVAL} others to evaluate on"
    files["README.md"] = template("README.md.j2").render(
        name=name,
        steps=commands(has_reward=has_reward),
        files=about,
        changes=changes(choices, has_reward=has_reward),
    )
    return files


def commands(*, has_reward: bool) -> list[dict[str, str]]:
    test = {
        "command": "pytest -q",
        "shows": "the test of the reward function passes (`pip install pytest` if that is missing)",
    }
    return [
        *([test] if has_reward else []),
        {
            "command": "rltrain data recipe.yaml",
            "shows": "rows, three prompts as the model sees them, their rewards",
        },
        {"command": "rltrain plan recipe.yaml", "shows": "placement, batch and memory"},
        {
            "command": "rltrain train recipe.yaml trainer.steps=3",
            "shows": "three steps, one line each; the last line is the path of the report",
        },
        {"command": "rltrain train recipe.yaml", "shows": "the whole run"},
    ]


def changes(choices: Choices, *, has_reward: bool) -> list[str]:
    lines = [
        "Model: `rltrain init NAME --model FOLDER` writes a recipe for a local Hugging Face "
        "folder, with its lengths and learning rate. Or change `model.path` and these keys here; "
        'a dense model also needs `override /routing_replay: "off"` and '
        "`routing_replay.capture: false`."
    ]
    if choices.data is None:
        lines.append(
            "Data: set `data.path` to your file, name its columns, and set `data.eval_path` to a "
            "second file or to null. `rltrain init NAME --data FILE` does this for you."
        )
    if has_reward:
        lines.append("Reward: change `score` in `reward.py`, and the examples in its test.")
    return lines


@cache
def environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # none of it is HTML
    )
    made.filters["yaml"] = as_yaml
    return made


def template(name: str) -> Template:
    return environment().get_template(name)
