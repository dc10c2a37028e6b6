"""The documentation site leaves no page out, and each page begins with what it is for."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path for folder in ("docs", "recipes", "rltrain") for path in (ROOT / folder).rglob("*.md")
)
MOST_WORDS = 60


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_page_is_in_the_navigation() -> None:
    _, _, after = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    entries = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", after.partition("\n\n")[0], re.MULTILINE)
    named = {path for entry in entries for path in ROOT.glob(entry)}
    missing = [name_of(page) for page in PAGES if page not in named]
    assert missing == [], "expected a line in `nav` of mkdocs.yml, where a reader looks for it"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_begins_with_a_short_paragraph(page: Path) -> None:
    title, _, body = page.read_text().lstrip().partition("\n")
    assert title.startswith("# "), f"{name_of(page)}: expected a title first, found {title!r}"
    first = body.strip().partition("\n\n")[0]
    assert re.match(r"[A-Z`*\[]", first), (
        f"{name_of(page)}: expected a paragraph that says who needs the page and what to do, found "
        f"{first.splitlines()[0]!r}"
    )
    assert len(first.split()) <= MOST_WORDS, (
        f"{name_of(page)}: expected at most {MOST_WORDS} words before the first empty line, found "
        f"{len(first.split())}"
    )


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=name_of)
def test_lists_and_tables_are_the_same_on_the_site(page: Path) -> None:
    """MkDocs' Markdown needs an empty line before them, and four spaces where GitHub needs two."""
    prose = re.sub(r"^ *```.*?^ *```", "```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    block = r"(?:[-*+] |\d+\. |\|)"
    glued = re.findall(rf"^(?!{block}|[ #<|]|```)\S.*\n{block}.*", prose, re.MULTILINE)
    assert glued == [], "expected an empty line between a paragraph and a list or table"
    shallow = re.findall(rf"^ {{1,3}}{block}.*", prose, re.MULTILINE)
    assert shallow == [], "expected four spaces before a nested list or table"


def test_the_glossary_explains_each_term_once() -> None:
    text = (ROOT / "docs/glossary.md").read_text()
    terms = [
        term for line in re.findall(r"^### (.+)$", text, re.MULTILINE) for term in line.split(", ")
    ]
    assert len(terms) > 50 and len(terms) == len(set(terms))
    assert [entry for entry in text.split("\n### ")[1:] if len(entry.split()) < 8] == []


def test_every_decision_is_listed() -> None:
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\)", (ROOT / "docs/adr/README.md").read_text())
    assert listed == sorted(path.name for path in (ROOT / "docs/adr").glob("0*.md"))


def test_every_recipe_is_listed() -> None:
    listed = re.findall(r"\((\w+)/README\.md\)", (ROOT / "recipes/README.md").read_text())
    assert sorted(listed) == sorted(path.parent.name for path in ROOT.glob("recipes/*/recipe.yaml"))
