"""Rules about the source that no linter of ours holds."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "rltrain").rglob("*.py"))
UNPICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
MAY_UNPICKLE = {
    "rltrain/weights/huggingface/plain_checkpoint.py",  # makes the classes of a list alone
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_no_drawer_for_everything() -> None:
    drawers = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    assert [name_of(path) for path in MODULES if path.name in drawers] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_is_and_opens_no_pickle(path: Path) -> None:
    source = path.read_text()
    assert source.isascii(), f"{path} is not ASCII"
    tree = ast.parse(source)
    assert not tree.body or ast.get_docstring(tree), f"{path} has no docstring"
    found = [] if name_of(path) in MAY_UNPICKLE else list(unpickling(tree))
    assert found == [], f"{path} opens pickles, which can run any code"


def unpickling(tree: ast.Module) -> list[str]:
    """Every import of an unpickler, `torch.load` and `allow_pickle=True`, by line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Call):
            names = {"pickle"} if opens_pickles(node) else set()
        else:
            continue
        if names & UNPICKLERS:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def opens_pickles(call: ast.Call) -> bool:
    safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords)
    return (ast.unparse(call.func) == "torch.load" and not safe) or any(
        k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in call.keywords
    )


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import pickle", 1),
        ("from dill import loads", 1),
        ("torch.load(path)", 1),
        ("torch.load(path, weights_only=True)", 0),
        ("np.load(path, allow_pickle=True)", 1),
        ("safetensors.torch.load_file(path)", 0),
    ],
)
def test_the_search_for_pickles_finds_them(source: str, count: int) -> None:
    assert len(unpickling(ast.parse(source))) == count
