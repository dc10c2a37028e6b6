"""What the built-in rewards give, and what is said about a function that cannot be used."""

import math
import subprocess
import sys

import numpy as np
import pytest
import reasoning_gym as gym
import torch

from rltrain.environments.load_reward import load_reward
from rltrain.environments.reward_sample import RewardInput
from rltrain.environments.rewards import (
    exact,
    group_values,
    judgement,
    math_verify,
    reasoning_gym,
)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("42", "42", 1),
        (" 42\n", 42, 1),
        ("42.0", 42.0, 1),
        ("42", 42.0, 0),
        ("42.", "42", 0),
        ("", "42", 0),
        ("042", "42", 0),
    ],
)
def test_exact(response, answer, reward):
    assert exact(response, answer, prompt="?") == reward


@pytest.mark.parametrize("answer", [None, {"ground_truth": "1"}, ["1"], math.nan, math.inf, True])
@pytest.mark.parametrize("function", [exact, math_verify])
def test_an_answer_that_is_neither_text_nor_a_number_is_refused(function, answer):
    with pytest.raises(ValueError, match=f"found {type(answer).__name__} .*data.answer_column"):
        function(str(answer), answer)


@pytest.mark.parametrize(
    ("value", "reward", "correct"),
    [
        (1, 1.0, None),
        (0.5, 0.5, None),
        (True, 1.0, None),
        (np.float32(0.5), 0.5, None),
        (np.float64(0.5), 0.5, None),
        (np.int64(-2), -2.0, None),
        (np.True_, 1.0, None),
        (np.array(0.5), 0.5, None),
        (torch.tensor(0.5), 0.5, None),
        (torch.tensor(True), 1.0, None),
        ({"reward": 0.25}, 0.25, None),
        ({"reward": np.int8(1), "correct": True}, 1.0, True),
        ({"reward": -1, "correct": np.False_}, -1.0, False),
        ({"reward": -1, "correct": None}, -1.0, None),
        ({"reward": 1, "format": 0.2, "n_steps": 3}, 1.0, None),
    ],
)
def test_what_a_reward_may_return(value, reward, correct):
    found = judgement(value)
    assert found[:2] == (reward, correct)
    names = set(value) - {"reward", "correct"} if isinstance(value, dict) else set()
    assert found.parts == {name: float(value[name]) for name in names}
    assert all(type(part) is float for part in found.parts.values())
    assert type(found.reward) is float and type(found.correct) in (bool, type(None))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0.5", "found str '0.5'"),
        (None, "found NoneType"),
        (1 + 0j, "found complex"),
        (math.nan, "found float 'nan'"),
        (-math.inf, "found float '-inf'"),
        (1e39, "found float '1e+39', which float32 cannot hold"),
        pytest.param(10**400, "found int", id="huge"),
        (np.array([0.5]), "found ndarray"),
        (torch.tensor([0.5]), "found Tensor"),
        (np.complex64(1), "found complex64"),
        (np.str_("1"), "found str_"),
        (np.datetime64("2026-01-01"), "found datetime64"),
        ((1.0, {}), "found tuple"),
        ([1.0], "found list"),
        ({"score": 1.0}, "a mapping of ['score']"),
        ({"reward": 1.0, "corect": True}, "found corect=bool 'True'"),
        ({"reward": 1.0, "corect": np.True_}, "found corect=bool 'True'"),
        ({"reward": 1.0, "format": None}, "found format=NoneType"),
        ({"reward": 1.0, "format": math.nan}, "found format=float 'nan', which"),
        ({"reward": 1.0, "format": "0.2"}, "found format=str '0.2'"),
        ({"reward": 1.0, "format/tags": 0.2}, "a part named str 'format/tags'"),
        ({"reward": 1.0, "länge": 0.2}, "a part named str 'länge'"),
        ({"reward": 1.0, 3: 0.2}, "a part named int '3'"),
        ({"reward": "1"}, "found str '1'"),
        ({"reward": {"reward": 1}}, "found dict"),
        ({"reward": 1.0, "correct": 1.0}, "found correct=float '1.0'"),
        ({"reward": 1.0, "correct": "yes"}, "found correct=str 'yes'"),
    ],
)
def test_anything_else_is_refused_with_its_type(value, said):
    with pytest.raises(ValueError, match=r"expected a finite number") as caught:
        judgement(value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "values", [[1.0, 2.0], (1.0, 2.0), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])]
)
def test_what_a_function_of_a_group_may_return(values):
    assert [judgement(value).reward for value in group_values(values, 2)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (1.0, "found float '1.0'"),
        (None, "found NoneType"),
        ({"reward": 1.0}, "found dict"),
        ("12", "found str '12'"),
        (np.ones((2, 1)), "found ndarray"),
        ([1.0], "found 1 "),
        ([1.0] * 3, "found 3 "),
        ([], "found 0 "),
    ],
)
def test_a_group_needs_one_reward_for_each_response(values, said):
    with pytest.raises(ValueError, match=f"a list of 2 rewards, one for each response .*{said}"):
        group_values(values, 2)


def test_reasoning_gym_scores_its_own_answers():
    entry = gym.create_dataset("basic_arithmetic", size=1, seed=3)[0]
    columns = {"prompt": "?", "question": entry["question"], "metadata": entry["metadata"]}
    answer = entry["answer"]
    assert reasoning_gym(answer, answer, **columns) == 1
    assert (
        reasoning_gym(f"<answer>1</answer> no: <answer> {answer} </answer>", answer, **columns) == 1
    )
    assert reasoning_gym("nonsense", answer, **columns) < 1
    with pytest.raises(ValueError, match=r"expected column metadata .* found \['prompt'\]"):
        reasoning_gym(answer, answer, prompt="?")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exactt", r"neither built in \(exact, .* did you mean exact"),
        (
            "no_such_module.f",
            "cannot be imported: ModuleNotFoundError: .*no_such_module.*PYTHONPATH",
        ),
        ("broken_module.f", "cannot be imported: RuntimeError: no licence found"),
        ("sample_rewards.lenght", "has no 'lenght': did you mean 'length'"),
        ("sample_rewards.NOT_CALLABLE", r"expected a function \(response: .* found 1"),
        ("sample_rewards.no_columns", r"\*\*columns\) -> float, found \(response: str, answer"),
        ("sample_rewards.too_late", "found an async function"),
        ("sample_rewards.wrong_group", r"takes_group=True: expected a function \(responses: list"),
        ("sample_rewards.wrong_mark", "takes_group: expected True or False, found str 'yes'"),
    ],
)
def test_a_function_that_cannot_be_used_says_why(name, message):
    with pytest.raises(ValueError, match=f"data.reward.function={name}.*{message}"):
        load_reward(name)


def test_a_dotted_path_is_imported():
    assert load_reward("sample_rewards.length")("four", None, prompt="?") == 4


@pytest.fixture
def my_run(tmp_path, monkeypatch):
    """A folder with a reward file that imports its neighbour, and the name of a library."""
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "neighbour.py").write_text("FULL = 2\n")
    (folder / "torch.py").write_text(
        "import dataclasses\nimport neighbour\n\n@dataclasses.dataclass\nclass R:\n    x: int\n"
        "\ndef score(response, answer, **columns):\n    return R(neighbour.FULL).x\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("reward_file_torch", "neighbour"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def test_a_file_is_imported_with_its_neighbours_and_shadows_no_library(my_run):
    before = sys.modules.get("torch")
    for name in ("torch.py:score", "./torch.py:score", f"{my_run}/torch.py:score"):
        assert load_reward(name)("?", None, prompt="?") == 2
    assert sys.modules.get("torch") is before


def test_a_file_is_found_from_the_process_that_computes_rewards(my_run, pool_of):
    sample = RewardInput("x", "x", None, "?", {}, "id")
    with pool_of("torch.py:score") as pool:
        assert [result.value for result in pool.score([sample])] == [2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reward.py:score", "there is no Python file reward.py in .*my run"),
        ("/nowhere/reward.py:score", "there is no Python file /nowhere/reward.py"),
        ("my_rewards:score", "expected a Python file and a function in it"),
        ("torch.py", "name the function in the file, e.g. torch.py:score"),
        ("torch.py:", "is neither built in"),
        (":score", "is neither built in"),
        ("torch.py:scroe", "torch.py has no 'scroe': did you mean 'score'"),
        ("broken.py:score", "cannot be imported: line 2: KeyError: 'licence'"),
        ("syntax.py:score", "cannot be imported: SyntaxError: "),
    ],
)
def test_a_file_that_cannot_be_used_says_why(my_run, name, message):
    (my_run / "broken.py").write_text("# comment\nlicence = {}['licence']\n")
    (my_run / "syntax.py").write_text("def score(:\n")
    with pytest.raises(ValueError, match=f"data.reward.function={name}.*{message}"):
        load_reward(name)


def test_workers_start_fast_because_nothing_heavy_is_imported():
    code = (
        "import sys, rltrain.environments.pool, rltrain.environments.reward_worker;"
        "heavy = {'torch', 'transformers', 'sympy', 'math_verify', 'reasoning_gym', 'ray'};"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
