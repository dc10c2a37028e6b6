"""A reward worker has what programs need, no secret, and what is named."""

import json

import pytest

from rltrain.config.errors import ConfigError, validate
from rltrain.config.reward import RewardConfig
from rltrain.environments.error_advice import error_advice
from rltrain.environments.worker_environment import worker_environment
from tests.unit.environments.pool_case import samples

DRIVER = {
    "PATH": "/bin",
    "HOME": "/root",
    "LC_ALL": "C",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "4",
    "CUDA_VISIBLE_DEVICES": "1",
    "HF_HOME": "/models",
    "https_proxy": "http://proxy:80",
    "HF_TOKEN": "hf_secret",
    "HTTP_PROXY": "http://me:secret@proxy:80",
    "OPENAI_API_KEY": "sk-secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "WANDB_API_KEY": "secret",
    "JUDGE_URL": "http://judge",
    "RLTRAIN_LOG_FOLDER": "/run/logs",
}
USUAL = {name: DRIVER[name] for name in list(DRIVER)[:8]}
LIMITS = RewardConfig().limits.model_dump()


def test_what_programs_need_is_passed_on_and_secrets_are_not() -> None:
    assert worker_environment(DRIVER, {}) == USUAL


def test_what_is_named_is_passed_on_or_given() -> None:
    named = {"OPENAI_API_KEY": None, "HF_TOKEN": None, "JUDGE": 3, "PATH": "/opt"}
    expected = {"OPENAI_API_KEY": "sk-secret", "HF_TOKEN": "hf_secret", "JUDGE": "3"}
    assert worker_environment(DRIVER, named) == USUAL | expected | {"PATH": "/opt"}


def test_a_variable_that_is_named_and_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data.reward.env.NOWHERE=null .*: export NOWHERE") as no:
        worker_environment(DRIVER, {"NOWHERE": None})
    assert "RL2017" in str(no.value) and "secret" not in str(no.value)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"A B": "x"}, "expected the name of an environment variable"),
        ({"PYTHONPATH": "x"}, "set PYTHONPATH where you start it"),
        ({"API_KEY": "sk-12345678"}, "expected null, found a value"),
        ({"A": True}, "expected text, an integer or null, found bool"),
        ({"A": 1.5}, "\"data.reward.env.A='1'\""),
        ({"A": "x\0"}, "the character NUL"),
    ],
)
def test_a_name_or_value_that_cannot_be_used_is_refused(env, said) -> None:
    with pytest.raises(ConfigError) as error:
        validate({"data": {"reward": {"env": env}}})
    assert said in str(error.value) and "sk-12345678" not in str(error.value)


def test_an_error_about_a_variable_or_a_limit_says_what_to_do() -> None:
    def advice(text: str) -> str:
        return error_advice(text, LIMITS, DRIVER, USUAL)

    assert "set data.reward.env.OPENAI_API_KEY=null" in advice("KeyError: 'OPENAI_API_KEY'")
    assert advice("KeyError: 'OTHER_KEY'") == advice("KeyError: 'HF_HOME'") == ""
    assert advice("MemoryError") == ". The process has data.reward.limits.memory_gib=32.0"
    assert error_advice("MemoryError", LIMITS | {"memory_gib": None}, {}, {}) == ""


def test_the_environment_of_a_real_worker(pool_of, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    file = tmp_path / "environment"
    with pool_of("hostile_rewards.environment", env={"GREETING": "hello"}) as pool:
        greeting, missing, wrote = pool.score(samples("GREETING", "OPENAI_API_KEY", str(file)))
    assert (greeting.value, wrote.value) == (5.0, 1.0)
    assert "set data.reward.env.OPENAI_API_KEY=null to pass it on" in missing.detail
    assert "secret" not in file.read_text() and json.loads(file.read_text())["PATH"]
    with pool_of("hostile_rewards.environment", env={"OPENAI_API_KEY": None}) as pool:
        assert pool.score(samples("OPENAI_API_KEY"))[0].value == 9.0
