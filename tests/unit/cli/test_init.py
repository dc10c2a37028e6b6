"""``rltrain init`` writes a folder that works as it is, and overwrites nothing."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.cli.app import main
from rltrain.cli.init_command import write_run_folder
from rltrain.cli.init_data import look_at_data
from rltrain.cli.init_recipe import Choices
from rltrain.config import Config
from rltrain.data.arithmetic import arithmetic_rows
from rltrain.main import compose
from tests.unit.data.model_folders import save_model

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
DENSE = Path(__file__).parents[1] / "weights" / "published" / "Qwen2.5-7B.json"


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def made(monkeypatch: pytest.MonkeyPatch, **choices: Any) -> Config:
    """The configuration of a new folder, read in that folder."""
    write_run_folder(Path("my_run"), Choices(**choices))
    monkeypatch.chdir("my_run")
    return compose(["recipe.yaml"])


def test_the_folder_works_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "runs/my_run"]) == 0
    assert "cd runs/my_run\n  rltrain data recipe.yaml\n" in capsys.readouterr().out
    monkeypatch.chdir("runs/my_run")
    files = sorted(str(path.relative_to(Path.cwd())) for path in Path.cwd().rglob("*.*"))
    assert files == [
        "README.md",
        "data/eval.jsonl",
        "data/train.jsonl",
        "recipe.yaml",
        "reward.py",
        "test_reward.py",
    ]
    config = compose(["recipe.yaml"])
    assert (config.model.path, config.routing_replay.mode) == (None, "r3")
    assert main(["data", "recipe.yaml"]) == 0
    assert "usable as configured" in capsys.readouterr().out
    subprocess.run(PYTEST, check=True, capture_output=True)


def test_the_test_that_is_written_fails_for_a_wrong_reward() -> None:
    write_run_folder(Path("my_run"), Choices())
    file = Path("my_run/reward.py")
    file.write_text(file.read_text().replace("said == expected", "said != expected"))
    done = subprocess.run(PYTEST, cwd="my_run", capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "9 failed" in done.stdout, done.stdout


def test_the_sample_shares_no_problem_with_the_warm_start() -> None:
    write_run_folder(Path("my_run"), Choices())
    warm = {row["prompt"] for row in arithmetic_rows(4000, 1, 1, 0)["warm_start"]}
    train, held_out = (
        {
            json.loads(row)["prompt"]
            for row in Path(f"my_run/data/{name}.jsonl").read_text().splitlines()
        }
        for name in ("train", "eval")
    )
    assert (len(train), len(held_out)) == (1024, 128)
    assert not (train & held_out or train & warm or held_out & warm)


def test_every_key_of_the_recipe_has_a_comment() -> None:
    write_run_folder(Path("my_run"), Choices(gpus=2))
    lines = Path("my_run/recipe.yaml").read_text().splitlines()
    for before, line in pairwise(lines):
        if re.match(r" +[-\w]", line) and not line.endswith(":"):
            assert before.strip().startswith("#"), line


@pytest.mark.parametrize("held", [["a.txt"], [".hidden"], list("abcdefg")])
def test_a_folder_with_something_in_it_is_left_as_it_is(
    held: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my_run").mkdir()
    for name in held:
        (Path("my_run") / name).write_text("mine")
    assert main(["init", "my_run"]) == 2
    printed = capsys.readouterr().err
    assert f"found {', '.join(held[:5])}" in printed and "Nothing was written" in printed
    assert sorted(path.name for path in Path("my_run").iterdir()) == sorted(held)
    assert all((Path("my_run") / name).read_text() == "mine" for name in held)


def test_an_empty_folder_is_used() -> None:
    assert main(["init", "."]) == 0
    assert Path("recipe.yaml").is_file()
    assert main(["init", "."]) == 2


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("my_run.yaml", "expected the name of a new folder, found that of a file: rltrain init my"),
        ("taken", "expected a new or empty folder, found a file"),
        ("link", "expected a new or empty folder, found a file or a link"),
        ("taken/inner", "Not a directory"),
        (" my_run", "such as my_run"),
        ("a\nb", "such as my_run"),
        ("x" * 300, "File name too long"),
        ("closed/my_run", "Permission denied"),
    ],
)
def test_a_bad_name_is_named(
    name: str, answer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("taken").touch()
    Path("link").symlink_to("nowhere")
    Path("closed").mkdir()
    if name.startswith("closed"):  # root may write anywhere

        def closed(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", closed)
    before = sorted(Path.cwd().rglob("*"))
    assert main(["init", name]) == 2
    assert answer in capsys.readouterr().err
    assert sorted(Path.cwd().rglob("*")) == before


@pytest.mark.parametrize("name", ["a space's", "{curly} #hash", "${x}: $HOME", "%Y Zürich"])
def test_odd_names_of_folders_and_files_are_kept(
    name: str, an_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, model = an_empty_folder / name / "rows.jsonl", an_empty_folder / name / "model"
    data.parent.mkdir()
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    save_model(model)
    config = made(monkeypatch, data=f"{name}/rows.jsonl", model=f"{name}/model")
    assert (config.data.path, config.model.path) == (str(data), str(model))
    write_run_folder(Path(name), Choices())
    monkeypatch.chdir(name)
    assert compose([f"../{name}/recipe.yaml"]).trainer.steps == 40


@pytest.mark.parametrize(("gpus", "ep"), [(1, 1), (3, 1), (6, 2), (8, 8)])
def test_a_layout_for_every_number_of_gpus(
    gpus: int, ep: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = made(monkeypatch, model=str(save_model(Path("model"))), gpus=gpus)
    layout = config.policy.parallel
    assert layout.world_size == config.rollout.num_engines == config.cluster.num_gpus == gpus
    assert (layout.ep, config.routing_replay.mode) == (ep, "r3")
    assert main(["plan", "recipe.yaml", "--gpus", str(gpus)]) == 0
    assert "\nfits: " in capsys.readouterr().out


def test_a_base_model_gets_text_and_a_chat_model_gets_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = save_model(Path("model"))
    assert made(monkeypatch, model=str(model)).data.as_chat
    monkeypatch.chdir("..")
    shutil.rmtree("my_run")
    (model / "chat_template.jinja").unlink()
    assert not made(monkeypatch, model=str(model)).data.as_chat


def test_a_dense_model_has_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("model").mkdir()
    shutil.copy(DENSE, "model/config.json")
    config = made(monkeypatch, model="model", gpus=2)
    assert (config.routing_replay.mode, config.policy.parallel.ep) == ("off", 1)
    assert (config.optimizer.lr, config.data.as_chat) == (1e-6, True)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (1024, 1024)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--gpus", "9"], "expected 1 to 8"),
        (["--gpus", "0"], "expected 1 to 8"),
        (["--model", "nowhere"], "nowhere"),
        (["--model", "org/name"], "hf download org/name --local-dir FOLDER"),
        (["--data", "org/name"], "hf download org/name --repo-type dataset --local-dir FOLDER"),
        (["--data", "nowhere.jsonl"], "--data: there is no file or folder"),
        (["--data", "rows.csv"], "convert it"),
        (["--data", "empty.jsonl"], "expected rows that are objects, found none"),
        (["--reward", "nowhere.py:score"], "--reward nowhere.py:score: there is no file"),
        (["--reward", "exakt"], "expected one of exact"),
        (["--recipe", "grpo_moe_r4"], "there is no such recipe. Nearest: grpo_moe_r3"),
        (["--recipe", "grpo_moe_r3", "--gpus", "2"], "drop one"),
    ],
)
def test_a_choice_that_cannot_be_used_writes_nothing(
    arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.csv").write_text("prompt,answer\n1,2\n")
    Path("empty.jsonl").touch()
    assert main(["init", "my_run", *arguments]) == 2
    assert answer in capsys.readouterr().err
    assert not Path("my_run").exists()


MESSAGES = [{"role": "user", "content": "1+1?"}]
SOLVED = [*MESSAGES, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1+1=", "answer": "2"}, {}),
        (
            {"question": "1+1?", "answer": "It is 2.\n#### 2"},
            {"prompt_column": "question", "answer_pattern": "#### (.+)"},
        ),
        (
            {"problem": "1+1?", "solution": "2"},
            {"prompt_column": "problem", "answer_column": "solution"},
        ),
        (
            {"prompt": MESSAGES, "reward_model": {"ground_truth": "2", "style": "rule"}},
            {"answer_column": "reward_model.ground_truth"},
        ),
        (
            {"messages": SOLVED, "answer": "2"},
            {"prompt_column": "messages", "last_turn": "drop"},
        ),
        (
            {"messages": SOLVED},
            {"prompt_column": "messages", "answer_column": None, "last_turn": "answer"},
        ),
        ({"prompt": "1+1=", "tests": ["f() == 2"]}, {"answer_column": None}),
    ],
)
def test_the_columns_of_common_formats_are_seen(
    row: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    data = made(monkeypatch, data="rows.jsonl").data
    assert data.source == "jsonl"
    defaults = {"prompt_column": "prompt", "answer_column": "answer"}
    defaults |= {"answer_pattern": None, "last_turn": "error"}
    assert {name: getattr(data, name) for name in defaults} == defaults | expected
    assert (data.eval_path, data.eval_size) == (None, 4)
    assert not Path("data").exists()


def test_the_kind_of_file_is_seen() -> None:
    rows = [{"prompt": MESSAGES, "reward_model": {"ground_truth": "2"}}] * 20
    for folder in ("json", "parquet", "mixed", "hub/data"):
        Path(folder).mkdir(parents=True)
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    for file in ("json/a.jsonl", "json/b.jsonl", "mixed/a.jsonl"):
        Path(file).write_text(lines)
    Path("rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for file in ("parquet/a.parquet", "rows.parquet", "hub/data/train-0.parquet"):
        pq.write_table(pa.Table.from_pylist(rows), file)
    sources = {"json": "jsonl", "parquet": "parquet", "rows.parquet": "parquet"}
    for path, source in (sources | {"rows.jsonl.gz": "jsonl", "hub": "huggingface"}).items():
        data = look_at_data(path)
        assert (data.source, data.num_rows, data.is_chat) == (
            source,
            40 if path == "json" else 20,
            True,
        )
        assert data.answer_column == "reward_model.ground_truth"


def test_a_dataset_folder_with_several_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GSM8K is published."""
    names = ("main", "socratic")
    parts = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*\n"
        for name in names
    )
    for name in names:
        Path("gsm8k", name).mkdir(parents=True)
        rows = [{"question": f"{i}+1?", "answer": f"So\n#### {i + 1}"} for i in range(20)]
        pq.write_table(pa.Table.from_pylist(rows), f"gsm8k/{name}/train-0.parquet")
    Path("gsm8k/README.md").write_text(f"---\nconfigs:\n{parts}---\n")
    data = made(monkeypatch, data="gsm8k").data
    assert (data.source, data.name, data.split) == ("huggingface", "main", "train")
    assert (data.prompt_column, data.answer_pattern) == ("question", "#### (.+)")


def test_a_reward_of_ones_own_is_named_and_none_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("mine.py").write_text("def f(response, answer, **columns): return 1\n")
    expected = f"{Path('mine.py').absolute()}:f"
    assert made(monkeypatch, reward="mine.py:f").data.reward.function == expected
    assert not Path("reward.py").exists()


@pytest.mark.parametrize("name", ["sft_tiny", "ppo_moe_r3", "grpo_qwen3_30b_a3b_8gpu"])
def test_every_recipe_can_be_built_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, base = made(monkeypatch, recipe=name), compose([f"+recipe={name}"])
    for section in ("algorithm", "routing_replay", "policy", "model", "optimizer"):
        assert getattr(config, section) == getattr(base, section)
    assert config.data.path == "data/train.jsonl"
    assert Path("reward.py").exists() == (config.algorithm.type == "rl")
