"""The configuration: types, defaults and rules. Imports neither torch nor hydra."""

from rltrain.config.root import Config

__all__ = ["Config"]
