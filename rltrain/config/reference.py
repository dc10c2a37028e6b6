"""Every configuration key with its type, default and docstring: for errors, help and the docs."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rltrain.config.root import Config

BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", dict: "dictionary"}

SectionType = type[BaseModel]


@dataclass(frozen=True)
class Key:
    name: str
    """Dotted path, e.g. ``trainer.steps``."""
    type: str
    """In words with its bounds, e.g. ``integer > 0``."""
    default: object
    doc: str
    choices: tuple[object, ...] = ()
    """All values, where there are few."""
    section: SectionType | None = None
    """What a value of the dictionary is, where it is a section with keys of its own."""

    @property
    def free(self) -> bool:
        """Whether the key is a dictionary that takes any keys below it."""
        return isinstance(self.default, dict)


def keys(section: BaseModel | None = None, prefix: str = "") -> Iterator[Key]:
    """The leaf keys below ``section``, all of `Config` if it is None, in the order of declaration.

    Their defaults are the section's values: two sections of one type may have different ones.
    """
    section = Config() if section is None else section
    for name, field in type(section).model_fields.items():
        default = getattr(section, name)
        if isinstance(default, BaseModel):
            yield from keys(default, f"{prefix}{name}.")
        else:
            doc = field.description or ""
            values = tuple(choices(field.annotation))
            below = _section_in(field.annotation)
            yield Key(f"{prefix}{name}", spell_field(field), default, doc, values, below)


def keys_below(key: Key, name: str) -> Iterator[Key]:
    """The keys of the value ``name`` of a dictionary whose values are sections.

    The default of one that must be set is ``...``.
    """
    for field_name, field in key.section.model_fields.items() if key.section else ():
        default = ... if field.is_required() else field.default
        whole = f"{key.name}.{name}.{field_name}"
        yield Key(whole, spell_field(field), default, field.description or "")


def _section_in(annotation: Any) -> SectionType | None:
    """The section ``S`` in ``dict[str, S]``."""
    values = get_args(annotation)[1:] if get_origin(annotation) is dict else ()
    return next((v for v in values if isinstance(v, type) and issubclass(v, BaseModel)), None)


def sections(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all sections, e.g. ``policy`` and ``policy.parallel``."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield f"{prefix}{name}"
            yield from sections(field.annotation, f"{prefix}{name}.")


def spell_field(field: FieldInfo) -> str:
    return spell(field.annotation, field.metadata)


def spell(annotation: Any, metadata: list[Any]) -> str:
    """A type in words: ``integer > 0``, ``one of off, r2, r3``, ``text or null``."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return spell(
            inner, [bound for info in extra for bound in getattr(info, "metadata", [info])]
        )
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    if annotation is type(None):
        return "null"
    if origin is not None and origin is not dict:
        return " or ".join(spell(part, []) for part in get_args(annotation))
    bounds = [
        f"{sign} {getattr(bound, name):g}"
        for bound in metadata
        for name, sign in BOUNDS.items()
        if hasattr(bound, name)
    ]
    if any(getattr(bound, "min_length", None) for bound in metadata):
        bounds.append("that is not empty")
    return " ".join([TYPES[origin or annotation], " and ".join(bounds)]).strip()


def choices(annotation: Any) -> Iterator[object]:
    """The values of a type that has few: literals, true and false, null beside them."""
    if annotation is bool:
        yield from (True, False)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Union, UnionType):
        parts = [tuple(choices(part)) for part in get_args(annotation) if part is not type(None)]
        if all(parts):
            yield from (*(value for part in parts for value in part), None)


def show(value: object) -> str:
    """A value as one writes it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'"{value}"' if value == "" else str(value)


def markdown() -> str:
    """The text of ``docs/configuration.md``."""
    lines = [
        "# Configuration",
        "",
        "Every key, its type and its default. Generated by `python -m rltrain.config.reference`.",
        "Any key can be set on the command line: `trainer.steps=5`, and any key below a",
        "dictionary: `rollout.engine_args.max_num_seqs=64`. The folder `conf/` holds named",
        "variants of each section (`data=jsonl`), `recipes/` the recipes (`+recipe=grpo_moe_r3`).",
    ]
    for name, field in Config.model_fields.items():
        lines += ["", f"## {name}", "", "| key | type | default | |", "|---|---|---|---|"]
        for key in keys(field.get_default(), f"{name}."):
            lines += [_row(one) for one in (key, *keys_below(key, "NAME"))]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    doc = " ".join(key.doc.replace("``", "`").replace("|", "\\|").split())
    default = "must be set" if key.default is ... else f"`{show(key.default)}`"
    return f"| `{key.name}` | {key.type} | {default} | {doc} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
