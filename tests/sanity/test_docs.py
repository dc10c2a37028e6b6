"""What the documentation names is there: files, make targets, pins."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "recipes", ROOT / "rltrain")
    for path in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)", page.read_text())
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_anchors_of_links_are_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", page.read_text())
    assert [f"{to}#{anchor}" for to, anchor in links if anchor not in anchors(page, to)] == []


def anchors(page: Path, link: str) -> set[str]:
    """GitHub's anchors of the page that ``link`` leads to; ``page`` itself if it is empty."""
    text = (page.parent / link if link else page).read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_prose_names_are_there(page: Path) -> None:
    """``room/file.py`` in backticks, relative to the repository, a package or the page."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|sh))(?:::[^`]*)?`", prose))
    to_write = set(re.findall(r"As `([^`]+)`:", prose))  # by the reader
    folders = (ROOT, ROOT / "rltrain", ROOT / "tests", page.parent)
    missing = {path for path in named if not any((folder / path).is_file() for folder in folders)}
    assert missing == to_write, f"{name_of(page)} names files that are not there"


TOUR = ROOT / "docs/tour.md"
TOUR_NAMES = re.findall(r"\[`([^`]+)`\]\(([^)]+\.py)\)", TOUR.read_text())


def test_the_tour_is_five_files_from_the_step_to_the_router() -> None:
    files = re.findall(r"^## \d\. .*\]\(\.\./rltrain/(.+)\)$", TOUR.read_text(), re.MULTILINE)
    assert len(files) == 5
    assert (files[0], files[-1]) == ("controller/loop.py", "policy/passes/replay.py")
    for file in files:  # one that the text then reads
        assert f"../rltrain/{file}" in {link for _, link in TOUR_NAMES}


@pytest.mark.parametrize(("name", "link"), sorted(set(TOUR_NAMES)))
def test_the_tour_names_what_is_defined_in_the_file_it_links(name: str, link: str) -> None:
    scope: ast.AST = ast.parse((TOUR.parent / link).read_text())
    for part in name.split("."):
        defined = {
            node.name: node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        assert part in defined, f"{link} defines no {name}"
        scope = defined[part]


def test_every_kept_result_is_cited() -> None:
    text = "".join(page.read_text() for page in PAGES)
    kept = {path.name for path in (ROOT / "benchmarks/results").iterdir()}
    assert kept and {name for name in kept if name not in text} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_has_every_target_that_is_named(page: Path) -> None:
    code = re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL)
    named = {
        word
        for block in code
        for words in re.findall(r"(?:^|[`$;&])\s*make((?: [a-z-]+)+)", block, re.MULTILINE)
        for word in words.split()
    }
    assert named <= TARGETS, f"{name_of(page)} names {sorted(named - TARGETS)}; Makefile has none"


def test_the_readme_shows_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme


def test_the_lock_is_what_the_project_needs() -> None:
    command = [sys.executable, "docker/lock.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_both_locks_agree_on_what_the_two_stacks_share() -> None:
    cpu, gpu = (pins(ROOT / f"requirements-{stack}.lock") for stack in ("cpu", "gpu"))
    # vLLM 0.26 pins the first four or caps them; vLLM on CPU wants an old setuptools. MLflow, which
    # is no part of the GPU lock, caps the last two.
    apart = {"torch", "apache-tvm-ffi", "xgrammar", "protobuf", "setuptools"}
    apart |= {"cachetools", "importlib-metadata"}
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} <= apart


@pytest.mark.parametrize("stack", ["cpu", "gpu"])
def test_every_pin_has_hashes(stack: str) -> None:
    """But torch's CPU build, which is not at the package index. `make setup` checks them."""
    text = (ROOT / f"requirements-{stack}.lock").read_text()
    blocks = re.findall(
        r"^([a-z0-9-]+)==\S+((?: \\\n    --hash=sha256:[0-9a-f]{64})*)$", text, re.M
    )
    assert len(blocks) == len(pins(ROOT / f"requirements-{stack}.lock"))
    unhashed = [name for name, hashes in blocks if not hashes]
    assert unhashed == (["torch"] if stack == "cpu" else [])


def pins(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)(?: \\)?$", lock.read_text(), re.MULTILINE))
