"""What a user types: composed by Hydra, answered in our own words, before anything starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rltrain.config import Config
from rltrain.config.errors import ConfigError
from rltrain.config.hydra_groups import find_groups
from rltrain.config.reference import keys, show
from rltrain.main import compose, main, start_folder

ROOT = Path(__file__).parents[3]


def test_nothing_chosen_is_the_schema_with_the_lengths_of_the_tiny_model() -> None:
    lengths = {"data": {"max_prompt_tokens": 64}, "rollout": {"max_response_tokens": 16}}
    assert compose() == Config.model_validate(lengths)


def test_every_key_can_be_overridden_without_a_plus() -> None:
    quoted = [f"{key.name}='{key.default}'" for key in keys() if isinstance(key.default, str)]
    plain = [
        f"{key.name}={show(key.default)}" for key in keys() if not isinstance(key.default, str)
    ]
    assert compose(quoted + plain) == Config()


def test_a_dictionary_takes_any_key() -> None:
    config = compose(["rollout.engine_args.max_num_seqs=64", "+data.task_options.max_terms=3"])
    assert config.rollout.engine_args == {"max_num_seqs": 64}
    assert config.data.task_options == {"max_terms": 3}


def test_a_group_chosen_on_the_command_line_wins_over_the_recipe() -> None:
    assert compose(["+recipe=grpo_moe_r3", "routing_replay=r2"]).routing_replay.mode == "r2"
    assert compose(["+recipe=grpo_moe_r3", "routing_replay.mode=off"]).routing_replay.mode == "off"


MISTAKES = [
    ("trainer.stpes=5", "trainer.stpes: there is no such key. Nearest: trainer.steps"),
    ("+trainer.stpes=5", "Nearest: trainer.steps"),
    ("++trainer.stpes=5", "Nearest: trainer.steps"),
    ("trainer={stpes:5}", "trainer.stpes: there is no such key"),
    ("lr=3", "lr: there is no such key. Nearest: optimizer.lr"),
    ("rollout.top_p=0.9", "rollout.top_p: there is no such key. Tokens are sampled from"),
    ("rollout.top_p=1.0", "Leave it out"),
    ("+rollout.top_k=5", "the importance ratio would be wrong"),
    ("rollout={min_p:0.1}", "rollout.min_p: there is no such key. Tokens are sampled from"),
    ("repetition_penalty=1.1", "Tokens are sampled from the whole distribution that is trained"),
    ("hydra.run.dir=x", "hydra.run.dir: there is no such key"),
    ("trainer.steps=five", "trainer.steps: expected integer > 0, found five"),
    ("trainer.steps=-1", "trainer.steps: expected integer > 0, found -1"),
    ("+trainer.steps=5", "write it without the plus"),
    ("~trainer.steps", "nothing can be taken out"),
    ("+recipe=grpo_moe_r4", "there is no such recipe. Nearest: grpo_moe_r3"),
    ("+recipe=nothing", "there is no such recipe. Choose from: cispo_moe_r3, dapo_moe_r3"),
    ("recipe=grpo_moe_r3", "+recipe=grpo_moe_r3"),
    ("data=json", "there is no such data. Nearest: jsonl"),
    ("data=null", "there is no such data. Choose from: arithmetic"),
    ("+data=jsonl", "write data=jsonl"),
    ("data=[jsonl,parquet]", "there is no such data"),
    ("data@eval=jsonl", "data@eval: there is no such key"),
    ("data=jsonl", "set data.path"),
    ("trainer.steps", "trainer.steps: expected name=value"),
    ("trainer.steps=[1", "expected name=value"),
    ("model.path=~/m", "quote a value with special characters: model.path=\"'~/m'\""),
    (f"trainer.steps={'9' * 5000}", "expected name=value such as trainer.steps=5"),
    ("=3", "(no name): there is no such key"),
    ("trainer.steps=1,2", "a run takes one value"),
    ("trainer.steps=${foo}", "Interpolation key 'foo' not found\n  full_key: trainer.steps"),
    ("trainer.output_dir=${oc.env:RLTRAIN_NOT_SET}", "RLTRAIN_NOT_SET"),
    ("policy=ep2 policy.parallel.dp=1", "(rule: experts fit the ranks)"),
    ("+recipe=grpo_moe_r3 +recipe=sft_tiny", "recipe: expected one choice, found 2"),
    ("no/such.yaml", "no/such.yaml: there is no such recipe file in "),
    ("a.yaml b.yml", "expected one recipe file, found 2: a.yaml, b.yml"),
    ("+recipe=my.yaml", "a recipe file is given without +recipe=: my.yaml"),
    ("grpo_moe_r3", "a recipe is added with +recipe=grpo_moe_r3"),
    ("--config-dir /nowhere", "--config-dir: expected a folder, found none at /nowhere"),
]


@pytest.mark.parametrize(("line", "answer"), MISTAKES)
def test_a_mistake_ends_at_once_in_our_words(
    line: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("rltrain: cannot start\n")
    assert answer in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("recipe", "answer"),
    [
        ("trainer:\n  stpes: 3\n", "trainer.stpes: there is no such key. Nearest: trainer.steps"),
        ("rollout:\n  top_k: 5\n", "rollout.top_k: there is no such key. Tokens are sampled from"),
        ("routing_replay:\n  mode: off\n", 'write "off"'),
        ("trainer:\n  steps: : 3\n", "mine.yaml"),
        ("defaults:\n  - override /model: tinny\n", "model: there is no option tinny"),
        (
            "defaults:\n  - grpo_moe_r4\n",
            "Could not load 'recipe/grpo_moe_r4'",
        ),
        ("defaults:\n  - override /modle: tiny\n", "modle"),
    ],
)
def test_a_mistake_in_a_file_is_named(recipe: str, answer: str, tmp_path: Path) -> None:
    write_recipe(tmp_path, "# @package _global_\n" + recipe)
    with pytest.raises(ConfigError) as refused:
        compose(["+recipe=mine"], tmp_path)
    assert answer in str(refused.value)


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    write_recipe(tmp_path, "# @package _global_\ndefaults: [grpo_moe_r3]\ntrainer:\n  steps: 3\n")
    config = compose(["+recipe=mine"], tmp_path)
    assert (config.trainer.steps, config.routing_replay.mode) == (3, "r3")
    write_recipe(tmp_path, "trainer:\n  steps: 3\n")
    with pytest.raises(ConfigError, match="must begin with the line '# @package _global_'"):
        compose(["+recipe=mine"], tmp_path)


def test_a_recipe_file_is_found_from_the_folder_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my run"
    folder.mkdir()
    file = folder / "recipe.yaml"
    file.write_text("defaults: [grpo_moe_r3]\ntrainer:\n  steps: 3\n")
    for name in ("my run/recipe.yaml", "./my run/recipe.yaml", str(file)):
        config = compose([name, "routing_replay=r2"])
        assert (config.trainer.steps, config.routing_replay.mode) == (3, "r2")
    file.write_text("trainer:\n  steps: 4\n")  # a changed file is read again
    assert compose(["trainer.seed=5", "my run/recipe.yaml"]).trainer.steps == 4
    with pytest.raises(ConfigError, match="the folder has a recipe: my run"):
        compose(["my run"])
    with pytest.raises(ConfigError, match=r"no such recipe file in .*Here: my run/recipe.yaml"):
        compose(["recipe.yaml"])
    with pytest.raises(ConfigError, match="recipe: expected one choice, found 2"):
        compose([str(file), "+recipe=grpo_moe_r3"])


def test_a_recipe_whose_files_lie_beside_it_names_the_folder_to_run_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my_run"
    (folder / "data").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(
        "defaults:\n  - override /data: jsonl\ndata:\n  path: data/a.jsonl\n"
        "  reward:\n    function: reward.py:score\n"
    )
    monkeypatch.chdir(tmp_path)
    compose(["my_run/recipe.yaml"])  # neither here nor there: reading the data will say so
    (folder / "reward.py").touch()
    with pytest.raises(ConfigError, match=r"data.reward.function: there is no reward.py "):
        compose(["my_run/recipe.yaml"])
    (tmp_path / "reward.py").touch()
    compose(["my_run/recipe.yaml"])
    (folder / "data" / "a.jsonl").touch()
    with pytest.raises(ConfigError, match=r"data.path: there is no .* run the command in my_run"):
        compose(["my_run/recipe.yaml"])
    monkeypatch.chdir(folder)
    compose(["recipe.yaml"])


def test_the_file_of_a_component_is_looked_for_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_run").mkdir()
    (tmp_path / "my_run" / "reward.py").touch()
    (tmp_path / "my_run" / "recipe.yaml").write_text(
        "data:\n  reward:\n    components:\n      brief: {function: 'reward.py:brief'}\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"data.reward.components.brief.function: there is no rew"
    ):
        compose(["my_run/recipe.yaml"])


def test_a_component_is_added_on_the_command_line() -> None:
    weight = "data.reward.components.right.weight=0.5"
    config = compose(["data.reward.components.right.function=exact", weight])
    assert config.data.reward.components["right"].weight == 0.5


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("- trainer\n", "expected sections such as 'trainer:', found a list"),
        ("trainer:\n  stpes: 3\n", "trainer.stpes: there is no such key. Nearest: trainer.steps"),
        ("trainer:\n  steps: : 3\n", "mine.yaml"),
        ("defaults:\n  - grpo_moe_r4\n", "Could not load 'recipe/grpo_moe_r4'"),
    ],
)
def test_a_mistake_in_a_recipe_file_is_named(text: str, answer: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        compose([str(file)])
    assert answer in str(refused.value)


@pytest.mark.parametrize("name", ["recipe/sft_tiny.yaml", "data/jsonl.yaml"])
def test_a_file_of_ones_own_does_not_have_the_name_of_ours(name: str, tmp_path: Path) -> None:
    """Hydra would leave out one of the two."""
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"{name}: rltrain has .*: rename your file"):
        compose(config_dir=tmp_path)


def write_recipe(folder: Path, text: str) -> None:
    (folder / "recipe").mkdir(exist_ok=True)
    (folder / "recipe" / "mine.yaml").write_text(text)


def test_help_lists_every_recipe_and_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for group, options in find_groups().items():
        assert group in printed
        for option in options:
            assert option in printed
    assert main([]) == 0
    assert capsys.readouterr().out == printed


def test_cfg_job_prints_the_configuration_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["+recipe=grpo_moe_r3", "--cfg", "job"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert Config.model_validate(printed) == compose(["+recipe=grpo_moe_r3"])
    assert not list(tmp_path.iterdir())


def test_the_output_folder_is_absolute_and_has_the_time_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(start_folder(compose()).trainer.output_dir)
    assert folder.parent == tmp_path / "outputs"
    assert "%" not in folder.name
    assert len(folder.name) == len("2026-01-02_03-04-05")


def test_a_mistake_is_answered_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys; from rltrain.main import main; status = main(['trainer.stpes=5'])\n"
        "heavy = {'torch', 'ray', 'vllm', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'{status} {heavy}')"
    )
    assert last_line(code) == "2 set()"


def test_the_schema_imports_neither_torch_nor_hydra() -> None:
    code = (
        "import sys, rltrain.config, rltrain.config.errors, rltrain.config.overrides\n"
        "sys.exit(str({'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    assert last_line(code) == "set()"


def last_line(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    return done.stderr.splitlines()[-1]
