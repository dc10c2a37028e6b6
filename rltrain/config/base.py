"""The base of every configuration class: frozen, strict, and an unknown key is an error."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of the configuration.

    Frozen, so that no stage can change what the run was started with. Validators raise and never
    repair. Prose about a field stands below it as a docstring and reaches ``--help`` and the docs.
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
