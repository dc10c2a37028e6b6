"""The base of every configuration class: frozen, strict, and an unknown key is an error."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NotEmpty = Annotated[str, Field(min_length=1)]
"""For paths and addresses: an empty path would name the current folder."""


class Section(BaseModel):
    """One section of the configuration.

    It is frozen, so that no stage can change the configuration of a run. Validators raise and never
    repair. The docstring below a field is shown in ``rltrain keys`` and docs/configuration.md.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
