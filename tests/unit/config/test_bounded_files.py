"""Files that others wrote are refused when they are huge, or become huge when they are read."""

import os
from pathlib import Path

import pytest
import yaml

from rltrain.config.bounded_files import check_yaml, load_json, parse_json
from rltrain.config.model import ModelConfig
from rltrain.config.saved_config import load_config
from rltrain.controller.choose_checkpoint import keep_earlier_config
from rltrain.data.model_tokenizer import load_tokenizer
from rltrain.main import compose
from rltrain.weights.architecture.config_json import read_json
from rltrain.weights.huggingface.manifest import read_manifest

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
"""3.5 thousand million values in 400 bytes."""


def huge(file: Path, start: str = "{") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(start)
    os.truncate(file, 2**40)


@pytest.mark.parametrize(
    "text",
    [LAUGHS, "a: &a [*a]", "a: " + "[" * 5000, "x: " + "{a: " * 60, "- x\n" * 20_000],
    ids=["laughs", "itself", "deep", "deep mappings", "many"],
)
def test_a_configuration_stays_small_when_it_is_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"with aliases written out.*\[RL7009\]"):
        load_config(tmp_path)
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match="RL7009"):
        compose([str(tmp_path / "recipe.yaml")])


def test_the_configuration_of_a_run_to_go_on_with_stays_small(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(LAUGHS)
    config = compose([f"trainer.output_dir={tmp_path}", "trainer.resume=auto"])
    with pytest.raises(ValueError, match="RL7009"):
        keep_earlier_config(config)


def test_a_huge_configuration_is_not_read(tmp_path: Path) -> None:
    huge(tmp_path / "config.yaml", "a: 1\n")
    with pytest.raises(ValueError, match=r"expected at most 1 MiB, found \d+ bytes.*RL2020"):
        load_config(tmp_path)


def test_aliases_that_repeat_little_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a {x: [1, 2]}\nb: *a\nc: [*a, *a]\n")
    check_yaml(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(yaml.YAMLError):
        check_yaml(tmp_path / "a.yaml")


def test_json_is_read_to_its_limits(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert load_json(tmp_path / "a.json") == {"a": 1}
    huge(tmp_path / "b.json")
    with pytest.raises(ValueError, match=r"b\.json: expected at most 16 MiB.*RL2020"):
        load_json(tmp_path / "b.json")
    with pytest.raises(ValueError, match=r"here: nested too deeply.*RL2020"):
        parse_json("[" * 10**5, "here")


def test_a_model_folder_and_a_checkpoint_are_read_to_their_limits(tmp_path: Path) -> None:
    huge(tmp_path / "config.json")
    with pytest.raises(ValueError, match="expected at most 16 MiB"):
        read_json(tmp_path)
    (tmp_path / "config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        huge(tmp_path / name / name)
        with pytest.raises(ValueError, match=rf"{name}: expected at most 256 MiB"):
            load_tokenizer(ModelConfig(path=str(tmp_path / name)))
    huge(tmp_path / "manifest.json")
    with pytest.raises(ValueError, match=r"expected at most 256 MiB.*RL6004"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "1",
        '{"a": 1}',
        '{"a": {"bytes": "1", "sha256": "x"}}',
        '{"a": {"bytes": 1, "sha256": "x", "place": ["s3://x"]}}',
        "[" * 10**5,
    ],
)
def test_a_manifest_of_another_form_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"manifest\.json (cannot be read|does not give bytes).*RL6004"
    ):
        read_manifest(tmp_path)
