"""What the shells get to complete, asked for as they ask: through the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.config import Config
from rltrain.config.hydra_groups import find_recipes

ROOT = Path(__file__).parents[3]
ASK = "import sys; from rltrain.cli.app import main; sys.exit(main())"


def ask(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return done.stdout


def bash(*words: str) -> list[str]:
    """The completions of the last of the words into which Bash splits a line."""
    answer = ask(
        _RLTRAIN_COMPLETE="complete_bash",
        COMP_WORDS="\n".join(words),
        COMP_CWORD=str(len(words) - 1),
    )
    return answer.split()


def fish(line: str) -> dict[str, str]:
    answer = ask(
        _RLTRAIN_COMPLETE="complete_fish",
        _TYPER_COMPLETE_ARGS=line,
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    return dict(row.partition("\t")[::2] for row in answer.splitlines())


def zsh(line: str) -> str:
    return ask(_RLTRAIN_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)


def test_commands_and_options() -> None:
    assert bash("rltrain", "tr") == ["train"]
    assert bash("rltrain", "routes", "sl") == ["slice"]
    assert bash("rltrain", "train", "--con") == ["--config-dir"]
    assert bash("rltrain", "train", "--cfg", "") == ["job"]


@pytest.mark.parametrize("command", ["train", "data", "plan"])
def test_bash_gets_what_follows_the_equals_sign_where_it_splits(command: str) -> None:
    assert bash("rltrain", command, "+recipe", "=") == list(find_recipes())
    assert bash("rltrain", command, "+recipe", "=", "sft") == ["sft_tiny"]


def test_a_recipe_file_is_no_name_that_bash_has_split() -> None:
    assert bash("rltrain", "train", "my.yaml", "trainer.see") == bash(
        "rltrain", "train", "trainer.see"
    )
    assert bash("rltrain", "train", "my_reci") == []  # so that Bash completes files


def test_groups_and_keys() -> None:
    assert {"+recipe="} == {word for word in bash("rltrain", "train", "+re") if word[-1] == "="}
    names = bash("rltrain", "train", "+recipe=sft_tiny", "data")
    assert {"data=", "data.path=", "data.reward.function="} <= set(names)
    assert bash("rltrain", "train", "routing_replay.mode", "=") == ["off", "r2", "r3"]
    assert bash("rltrain", "plan", "data.as_chat", "=") == ["true", "false"]


def test_a_name_that_is_complete_gets_no_space() -> None:
    """Bash puts a space after a single completion, and not after a common beginning of two."""
    default = f"trainer.steps={Config().trainer.steps}"
    assert bash("rltrain", "train", "trainer.ste") == ["trainer.steps=", default]


def test_fish_and_zsh_get_whole_words_with_descriptions() -> None:
    recipes = fish("rltrain train +recipe=grpo_moe")
    assert recipes["+recipe=grpo_moe_r2"].startswith("The same run, replaying")
    assert set(recipes) == {f"+recipe=grpo_moe_{mode}" for mode in ("off", "r2", "r3", "r3_async")}
    assert "+recipe=sft_tiny" in zsh("rltrain data +recipe=")


def test_ones_own_recipes(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# My own run.\n")
    line = f"rltrain train --config-dir {tmp_path} +recipe=mi"
    assert fish(line) == {"+recipe=mine": "My own run."}
    assert fish("rltrain train --config-dir /nowhere +recipe=sf").keys() == {"+recipe=sft_tiny"}


def test_a_person_waits_for_nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys
from rltrain.cli.completion import complete_override
class Context: params = {"overrides": []}
assert complete_override(Context, "trainer.s")
heavy = {"torch", "ray", "vllm", "transformers", "hydra", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
