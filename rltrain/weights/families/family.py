"""What a family of models is: how its ``config.json`` reads and what its weights are called."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rltrain.weights.architecture.config_json import Fields
from rltrain.weights.architecture.decoder import Architecture, FamilyName
from rltrain.weights.mapping.parameters import FamilyRules
from rltrain.weights.mapping.rules import usual_rules


@dataclass(frozen=True)
class Family:
    name: FamilyName
    classes: tuple[str, ...]
    """Of transformers, as ``architectures`` in ``config.json`` has them."""
    read: Callable[[Fields], dict[str, Any]]
    """The fields of `Architecture`, family excepted."""
    rules: Callable[[Architecture], FamilyRules] = usual_rules
