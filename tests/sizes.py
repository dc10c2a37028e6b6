"""Prints how large the package is, by room: `make sizes`. It enforces nothing.

A docstring counts as comment.
"""

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST_FUNCTION = 60
LONGEST_FILE = 350
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    """Its path in the package."""
    code: int
    comment: int
    blank: int
    long_functions: tuple[tuple[str, int], ...]
    """Name and lines of those above `LONGEST_FUNCTION`, methods and nested ones included."""
    public: tuple[str, ...]
    """Functions and classes of the top level."""

    @property
    def lines(self) -> int:
        return self.code + self.comment + self.blank

    @property
    def room(self) -> str:
        return self.name.split("/")[0] if "/" in self.name else "(top)"


def measure(name: str, source: str) -> Module:
    tree = ast.parse(source)
    code, comment = lines_of_code(source, tree), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment.add(token.start[0])
    comment |= docstring_lines(tree)
    comment -= code
    long_functions = [
        (node.name, size)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    public = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    ]
    total = len(source.splitlines())
    return Module(
        name,
        len(code),
        len(comment),
        total - len(code) - len(comment),
        tuple(long_functions),
        tuple(public),
    )


def docstring_lines(tree: ast.AST) -> set[int]:
    """The lines of strings that are statements: docstrings, also those of attributes."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }


def lines_of_code(source: str, tree: ast.AST) -> set[int]:
    """Lines with a token that is neither comment nor docstring."""
    docstrings = docstring_lines(tree)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT or token.type == tokenize.COMMENT:
            continue
        if not (token.type == tokenize.STRING and token.start[0] in docstrings):
            code |= set(range(token.start[0], token.end[0] + 1))
    return code


def twice(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Of (name, module): the names that several modules have, and those modules."""
    modules = defaultdict(list)
    for name, module in pairs:
        modules[name].append(module)
    return {name: where for name, where in sorted(modules.items()) if len(where) > 1}


def report(modules: list[Module]) -> str:
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for module in modules:
        for room in (module.room, "all"):
            rooms[room].update(
                files=1,
                lines=module.lines,
                code=module.code,
                comment=module.comment,
                blank=module.blank,
            )
    columns = ("files", "lines", "code", "comment", "blank")
    total = rooms.pop("all")
    out = [f"{'room':<14}" + "".join(f"{column:>9}" for column in columns)]
    for room, counts in [*sorted(rooms.items()), ("all", total)]:
        out.append(f"{room:<14}" + "".join(f"{counts[column]:>9,}" for column in columns))
    functions = [f"{m.name}: {name}, {n}" for m in modules for name, n in m.long_functions]
    files = [f"{m.name}, {m.lines}" for m in modules if m.lines > LONGEST_FILE]
    basenames = twice((m.name.rsplit("/", 1)[-1], m.name) for m in modules)
    basenames.pop("__init__.py", None)
    names = twice((name, module.name) for module in modules for name in module.public)
    for title, entries in (
        (f"functions above {LONGEST_FUNCTION} lines", functions),
        (f"files above {LONGEST_FILE} lines", files),
        ("file names that exist twice", [f"{n}: {', '.join(w)}" for n, w in basenames.items()]),
        ("public names that exist twice", [f"{n}: {', '.join(w)}" for n, w in names.items()]),
    ):
        out += ["", f"{title}: {len(entries)}", *(f"  {entry}" for entry in entries)]
    return "\n".join(out) + "\n"


def main() -> None:
    package = ROOT / "rltrain"
    sys.stdout.write(
        report(
            [
                measure(str(path.relative_to(package)), path.read_text(encoding="utf-8"))
                for path in sorted(package.rglob("*.py"))
            ]
        )
    )


if __name__ == "__main__":
    main()
