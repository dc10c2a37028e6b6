"""The console script finds its commands."""

import pytest

from rltrain.cli.app import COMMANDS, main


def test_help_describes_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert command.__doc__
        assert f"  {name}" in printed


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "there is no command trian" in capsys.readouterr().err


def test_train_is_the_main_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "+recipe=grpo_moe_r3", "trainer.steps=7", "--cfg", "job"]) == 0
    assert "\n  steps: 7\n" in capsys.readouterr().out


def test_keys_lists_those_that_contain_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "router_lr"]) == 0
    assert "optimizer.router_lr=null  (number > 0 or null)\n" in capsys.readouterr().out
