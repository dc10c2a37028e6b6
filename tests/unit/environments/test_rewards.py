"""What the built-in rewards give, and what is said about a function that cannot be used."""

import subprocess
import sys
from pathlib import Path

import pytest
import reasoning_gym as gym

from rltrain.environments.rewards import exact, load_reward, math_verify, reasoning_gym


@pytest.fixture(autouse=True)
def import_from_this_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [("42", "42", 1), (" 42\n", 42, 1), ("42.", "42", 0), ("", "42", 0), ("042", "42", 0)],
)
def test_exact(response, answer, reward):
    assert exact(response, answer, prompt="?") == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1),
        (r"$\frac{2}{4}$", r"\frac{1}{2}", 1),
        ("The answer is 42", 42, 1),
        ("The answer is 41", "42", 0),
        ("no idea", "42", 0),
        ("", "42", 0),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1),
        (r"\boxed{(1,2]}", "(1,2]", 1),
        (r"\boxed{(1,2)}", "(1,2]", 0),
    ],
)
def test_math_verify(response, answer, reward):
    assert math_verify(response, answer, prompt="?") == reward


def test_math_verify_refuses_an_answer_without_mathematics():
    with pytest.raises(ValueError, match="finds no mathematics in the answer ''"):
        math_verify("1", "")


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
    ],
)
def test_a_function_that_cannot_be_used_says_why(name, message):
    with pytest.raises(ValueError, match=f"data.reward.function={name}.*{message}"):
        load_reward(name)


def test_a_dotted_path_is_imported():
    assert load_reward("sample_rewards.length")("four", None, prompt="?") == 4


def test_workers_start_fast_because_nothing_heavy_is_imported():
    code = (
        "import sys, rltrain.environments.pool, rltrain.environments.reward_worker;"
        "heavy = {'torch', 'transformers', 'sympy', 'math_verify', 'reasoning_gym', 'ray'};"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
