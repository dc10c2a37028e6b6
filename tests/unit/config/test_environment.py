"""Which variables reach the actors, and by which way."""

import pytest

from rltrain.config import Config
from rltrain.config.environment import OWNED, actor_environment
from rltrain.config.errors import ConfigError, validate
from rltrain.config.redact import redacted, redacted_text, remember_secrets

DRIVER = {
    "NCCL_DEBUG": "INFO",
    "GLOO_SOCKET_IFNAME": "eth0",
    "HF_TOKEN": "hf_12345678",
    "HF_HOME": "/hf",
    "HF_ENDPOINT": "https://me:mine@hub",
    "VLLM_HOST_IP": "10.0.0.1",
    "TOKENIZERS_PARALLELISM": "true",
    "WANDB_API_KEY": "abc",
    "PATH": "/bin",
    "MY_NCCL_DEBUG": "no",
}


def test_safe_variables_of_the_driver_reach_other_nodes_and_secrets_go_apart() -> None:
    given = {"NCCL_DEBUG": "WARN", "LEVEL": 3, "S3_SECRET": "abcdefgh"}
    plain, secret = actor_environment(given, DRIVER, joined=True)
    assert plain == {
        "NCCL_DEBUG": "WARN",
        "GLOO_SOCKET_IFNAME": "eth0",
        "HF_HOME": "/hf",
        "TOKENIZERS_PARALLELISM": "true",
        "LEVEL": "3",
    }
    assert secret == {
        "HF_TOKEN": "hf_12345678",
        "HF_ENDPOINT": "https://me:mine@hub",
        "S3_SECRET": "abcdefgh",
    }


def test_on_one_machine_processes_inherit_and_get_what_was_asked_for() -> None:
    assert actor_environment({"A": "b"}, DRIVER, joined=False) == ({"A": "b"}, {})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *((name, "1", "the trainer or Ray sets it") for name in sorted(OWNED)[:3]),
        ("RAY_ADDRESS", "x", "the trainer or Ray sets it"),
        ("RLTRAIN_LOG", "x", "the trainer or Ray sets it"),
        ("two words", "x", "expected the name of an environment variable"),
        ("NCCL_DEBUG", True, "expected text or an integer, found bool"),
        ("HF_TOKEN", ["hf_12345678"], "expected text, found list"),
        ("PIN_TOKEN", 12345678, "expected text, found int"),
        ("X", "a\0b", "NUL"),
    ],
)
def test_a_name_or_value_that_cannot_be_used_is_refused(name, value, said) -> None:
    with pytest.raises(ConfigError) as error:
        validate({"cluster": {"env": {name: value}}})
    assert f"cluster.env: env.{name}: " in str(error.value) and said in str(error.value)
    assert "[RL1003]" in str(error.value) and "hf_12345678" not in str(error.value)


def test_a_secret_of_the_configuration_is_in_no_text() -> None:
    config = Config.model_validate(
        {"cluster": {"env": {"HF_TOKEN": "hf_87654321", "PIN_TOKEN": "12345678"}}}
    )
    assert redacted(config.model_dump(mode="json"))["cluster"]["env"] == {
        "HF_TOKEN": "[redacted]",
        "PIN_TOKEN": "[redacted]",
    }
    assert redacted_text("it is hf_87654321", {}) == "it is hf_87654321"
    remember_secrets(["hf_87654321", "short"])
    assert redacted_text("it is hf_87654321, short", {}) == "it is [redacted], short"
