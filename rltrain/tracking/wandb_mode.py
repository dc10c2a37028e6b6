"""Where wandb sends a run to, decided without loading wandb."""

import logging
import netrc
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlparse

from rltrain.config.trainer import TrackingConfig

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline", "disabled"]


def choose_mode(wanted: str, environment: Mapping[str, str]) -> Mode:
    """``auto`` obeys WANDB_MODE, then is online when there are credentials, else offline."""
    if wanted != "auto":
        return cast(Mode, wanted)
    mode = environment.get("WANDB_MODE", "")
    if mode in ("online", "offline", "disabled"):
        return cast(Mode, mode)
    return "online" if is_logged_in(environment) else "offline"


def check_login(tracking: TrackingConfig, environment: Mapping[str, str]) -> None:
    """Raise ValueError if wandb is to be online and has no credentials."""
    if (
        "wandb" in tracking.backends
        and tracking.wandb == "online"
        and not is_logged_in(environment)
    ):
        raise ValueError(
            "tracking.wandb=online: expected a login to wandb, found none in WANDB_API_KEY and the "
            "netrc file. Run `wandb login`, or set tracking.wandb=auto, which is offline without "
            "a login"
            " [RL7003]"
        )


def is_logged_in(environment: Mapping[str, str]) -> bool:
    """Whether wandb would find a key without asking for one."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(environment.get("NETRC") or "~/.netrc").expanduser()
    host = urlparse(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return path.is_file() and host in netrc.netrc(path).hosts
    except netrc.NetrcParseError as error:
        logger.warning("%s cannot be read (%s): taken as not logged in to wandb", path, error)
        return False
