"""MkDocs hook: the site's files are named by their path in the repository, as on GitHub.

So one relative link works in both places. Besides docs/ the site has README.md as its home page,
the pages of recipes/ and rltrain/, and every file that a page links to.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")
SHOWN = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash"}
"""As pages; other files are copied."""


class SourcePage(File):
    """A source file as a page."""

    def is_documentation_page(self) -> bool:
        return True


def on_config(config: MkDocsConfig) -> None:
    config.nav = list(expand(config.nav or []))


def expand(nav: list[Any]) -> Iterator[Any]:
    """``nav`` with each pattern replaced by the paths that it matches and ``nav`` does not name."""
    for entry in nav:
        if isinstance(entry, dict):
            yield {
                title: below if isinstance(below, str) else list(expand(below))
                for title, below in entry.items()
            }
        elif "*" in entry:
            paths = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(entry))
            yield from (path for path in paths if path not in nav)
        else:
            yield entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    named = Files([])
    for file in files:
        in_docs = file.src_dir == config.docs_dir
        named.append(site_file(f"docs/{file.src_uri}", config, file.dest_uri) if in_docs else file)
    for folder in ("recipes", "rltrain"):
        for page in sorted((ROOT / folder).rglob("*.md")):
            named.append(site_file(page.relative_to(ROOT).as_posix(), config))
    named.append(site_file("README.md", config))
    unread = [file for file in named if file.src_uri.endswith(".md")]
    while unread:
        page_uri, text = unread[-1].src_uri, unread.pop().content_string
        for link in LINK.findall(text):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page_uri), link))
            outside = path.startswith("../")
            if not outside and (ROOT / path).is_file() and not named.get_file_from_path(path):
                named.append(linked := site_file(path, config))
                linked.inclusion = InclusionLevel.NOT_IN_NAV
                unread += [linked] if path.endswith(".md") else []
    return named


def site_file(path: str, config: MkDocsConfig, dest_uri: str | None = None) -> File:
    """The file ``path`` of the repository, at ``dest_uri`` of the site."""
    if Path(path).suffix in SHOWN:
        return SourcePage(path, str(ROOT), config.site_dir, False, dest_uri=f"source/{path}.html")
    return File(path, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=dest_uri)


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    path = page.file.src_uri
    if not isinstance(page.file, SourcePage):
        return None
    fence = "~" * 8
    code = f'{fence} {{ .{SHOWN[Path(path).suffix]} linenums="1" }}\n{page.file.content_string}'
    return f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n# {path}\n\n{code}\n{fence}\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """GitHub shows the README of a folder that a link leads to."""
    folder = Path(page.file.src_uri).parent

    def to_file(link: re.Match[str]) -> str:
        is_folder = (ROOT / folder / link[0]).is_dir()
        return f"{link[0].rstrip('/')}/README.md" if is_folder else link[0]

    return LINK.sub(to_file, markdown) + abbreviations(page.file.src_uri)


def abbreviations(path: str) -> str:
    """The glossary's abbreviations with the first sentence about each: tooltips of other pages."""
    if path == "docs/glossary.md":
        return ""
    glossary = (ROOT / "docs/glossary.md").read_text()
    entries = re.findall(r"^### (.+)\n\n((?:.|\n)+?\.)\s", glossary, re.MULTILINE)
    lines = [
        f"*[{term}]: {re.sub(r'[`*[]|]([(][^)]+[)])?', '', meaning).replace(chr(10), ' ')}"
        for terms, meaning in entries
        for term in terms.split(", ")
        if re.fullmatch(r"[A-Z][A-Z0-9]+|k[0-9]", term)
    ]
    return "\n\n" + "\n".join(lines) + "\n"
