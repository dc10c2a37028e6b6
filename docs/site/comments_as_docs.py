"""Griffe extension: the project's docstring conventions, for the API reference.

Comments on fields are their documentation, shapes are set as code, ``a, b: ...`` documents two
parameters, and `rltrain.room.name` is a link where the reference has that name.
"""

import re
from typing import Any

import griffe

SHAPE = re.compile(r"[ ]*# (\[.*\](?: each)?)[ ]*$", re.MULTILINE)
SHARED = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 .*)*)", re.MULTILINE)

NAME = re.compile(r"(?<!`)`(rltrain(?:\.\w+)+)`(?!`)")
LINK = r'<autoref optional identifier="\1"><code>\1</code></autoref>'


class CommentsAsDocs(griffe.Extension):
    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and (text := comment_of(attr)):
            attr.docstring = griffe.Docstring(text, parent=attr)

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = SHARED.sub(one_by_one, obj.docstring.value)
            obj.docstring.value = NAME.sub(LINK, SHAPE.sub(r" Shape: `\1`.", text))


def one_by_one(entry: re.Match[str]) -> str:
    indent, names, text = entry.groups()
    return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))


def comment_of(attribute: griffe.Attribute) -> str:
    """The comment lines before an attribute, and those at the ends of its own lines."""
    lines = attribute.parent.module.lines_collection[attribute.filepath]
    first, last = attribute.lineno - 1, attribute.endlineno
    above = first
    while lines[above - 1].lstrip().startswith("#"):
        above -= 1
    before = [line.strip().removeprefix("# ") for line in lines[above:first]]
    after = [line.partition("  # ")[2] for line in lines[first:last]]
    text = " ".join(part.strip() for part in before + after if part.strip())
    words, _, shape = text.partition("# [")
    in_code = re.sub(r"((?:\[[^]]+\])+)", r"`\1`", words)  # a link in Markdown otherwise
    return f"{in_code} Shape: `[{shape}`." if shape else in_code
