"""Online or offline, by what is asked for and by the login."""

import pytest

from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.wandb_mode import check_login, choose_mode


@pytest.mark.parametrize(
    ("wanted", "environment", "mode"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "online"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("offline", {"WANDB_API_KEY": "k"}, "offline"),
        ("online", {}, "online"),
    ],
)
def test_the_mode(tmp_path, wanted, environment, mode):
    assert choose_mode(wanted, {"NETRC": str(tmp_path / "none"), **environment}) == mode


def test_a_netrc_with_the_server_in_it_is_a_login(tmp_path):
    path = tmp_path / "netrc"
    path.write_text("machine api.wandb.ai\n  login user\n  password k\n")
    assert choose_mode("auto", {"NETRC": str(path)}) == "online"
    elsewhere = {"NETRC": str(path), "WANDB_BASE_URL": "https://wandb.example.com"}
    assert choose_mode("auto", elsewhere) == "offline"


def test_online_needs_a_login_before_anything_starts(tmp_path):
    nowhere = {"NETRC": str(tmp_path / "none")}
    online = TrackingConfig(wandb="online")
    with pytest.raises(ValueError, match=r"tracking.wandb=online: expected a login.*wandb login"):
        check_login(online, nowhere)
    check_login(online, nowhere | {"WANDB_API_KEY": "k"})
    check_login(TrackingConfig(), nowhere)
    check_login(TrackingConfig(wandb="online", backends=[]), nowhere)
