"""The worked examples of docs/extend.md are real: they run, and train what they say."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from rltrain.algorithms.advantages import find_advantage
from rltrain.algorithms.advantages.advantage_inputs import Advantage, AdvantageInputs
from rltrain.algorithms.losses import find_loss
from rltrain.algorithms.losses.loss_inputs import LossInputs
from rltrain.algorithms.objective import Targets, policy_objective
from rltrain.config.algorithm import AlgorithmConfig
from rltrain.config.errors import ConfigError, validate
from rltrain.controller.checks.preflight import check_algorithm

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's Python blocks as modules of a user's own, named after their functions."""
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "extend.md").read_text(), re.DOTALL):
        (name,) = re.findall(r"^def (\w+)", block, re.MULTILINE)
        lines = block.count("\n")
        assert lines < 50, f"{name} has {lines} lines"
        (tmp_path / f"my_{name}.py").write_text(block)
    entry = "from rltrain.algorithms.advantages.advantage_inputs import Advantage\n"
    entry += "from my_best_other import best_other\nentry = Advantage(best_other, compares=True)\n"
    (tmp_path / "my_entries.py").write_text(entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def advantage_of(rewards: list[float], groups: list[int]) -> Tensor:
    ones = torch.ones(len(rewards), dtype=torch.int64)
    inputs = AdvantageInputs(
        rewards=torch.tensor(rewards),
        token_rewards=torch.tensor(rewards),
        seq_lens=ones,
        group_ids=torch.tensor(groups),
        mask=ones.bool(),
    )
    return find_advantage("my_entries.entry").estimate(inputs).advantages


def test_the_advantage_is_what_it_says(modules: Path) -> None:
    assert isinstance(find_advantage("my_entries.entry"), Advantage)
    found = advantage_of([1.0, 0.5, 0.0, 3.0], [0, 0, 0, 1])
    assert found.tolist() == [0.5, -0.5, -1.0, 0.0]


def test_the_loss_is_what_it_says_and_a_step_follows_it(modules: Path) -> None:
    """On policy its gradient is the policy gradient's: f'(1) = 1 for every tau."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    config = AlgorithmConfig(loss="my_sapo.sapo", advantage="my_entries.entry")
    advantages = torch.tensor([1.0, -2.0, 0.5])
    loss, sums = policy_objective(
        logprobs,
        torch.zeros(3),
        Targets(logprobs.detach(), advantages, weights=torch.full((3,), 1 / 3)),
        sequence_mean=lambda values: values,
        config=config,
        kl_coef=0.0,
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -advantages / 3)
    assert float(sums.totals["stat/gate_weight"]) == pytest.approx(3.0)
    far = LossInputs(
        logprobs=torch.tensor([3.0]),
        old_logprobs=torch.tensor([0.0]),
        advantages=torch.tensor([1.0]),
        mask=torch.tensor([True]),
        sequence_mean=lambda values: values,
        config=config,
    )
    assert float(find_loss("my_sapo.sapo")(far).loss) == pytest.approx(-4.0, abs=1e-6)


def test_preflight_takes_them_and_names_what_is_wrong(modules: Path) -> None:
    check_algorithm(AlgorithmConfig(loss="my_sapo.sapo", advantage="my_entries.entry"))
    for values, named in (
        ({"loss": "ppoo"}, "the nearest is ppo"),
        ({"advantage": "my_best_other.best_other"}, "expected Advantage, found function"),
        ({"loss": "my_sapo.sappo"}, "Is its folder on PYTHONPATH"),
        ({"advantage": "my_entries.entry", "group_size": 1}, "nothing to compare"),
    ):
        with pytest.raises(ValueError, match=named):
            check_algorithm(AlgorithmConfig.model_validate(values))
    with pytest.raises(ConfigError):
        validate({"algorithm": {"loss": 3}})


@pytest.mark.parametrize("folder", ["advantages", "losses"])
def test_every_file_is_short(folder: str) -> None:
    import rltrain.algorithms as package

    assert isinstance(package, ModuleType)
    root = Path(str(package.__file__)).parent / folder
    long = {f.name: n for f in root.glob("*.py") if (n := f.read_text().count("\n")) >= 50}
    built_on = {"advantage_inputs.py", "loss_inputs.py", "group.py"}
    assert not long.keys() - built_on, long
