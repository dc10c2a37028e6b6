"""A model family: how its ``config.json`` is read, and its weight rules."""

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
    """Class names of transformers, as in ``architectures`` of ``config.json``."""
    read: Callable[[Fields], dict[str, Any]]
    """The fields of `Architecture`, family excepted."""
    rules: Callable[[Architecture], FamilyRules] = usual_rules
