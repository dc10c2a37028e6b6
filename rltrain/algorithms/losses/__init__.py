"""Policy losses by name. To add one, add a file here and an entry in ``LOSSES``
(docs/extend.md)."""

from collections.abc import Callable

from rltrain.algorithms.lookup import find_by_name
from rltrain.algorithms.losses.cispo import cispo
from rltrain.algorithms.losses.gspo import gspo
from rltrain.algorithms.losses.loss_inputs import LossInputs, TokenLoss
from rltrain.algorithms.losses.pg import pg
from rltrain.algorithms.losses.ppo import ppo

Loss = Callable[[LossInputs], TokenLoss]

LOSSES: dict[str, Loss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "pg": pg}


def find_loss(name: str) -> Loss:
    """The loss named by ``algorithm.loss``.

    Raises:
        ValueError: see `rltrain.algorithms.lookup.find_by_name`.
    """
    return find_by_name("algorithm.loss", name, LOSSES)
