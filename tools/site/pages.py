"""MkDocs' hook: the pages of the site, made of the repository's files (mkdocs.yml names it)."""

from __future__ import annotations

import fnmatch
import posixpath
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parent))

import headers  # noqa: E402
import links  # noqa: E402
import lists  # noqa: E402
import python_api  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
_HIDDEN = "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n"
_paths: dict[str, str] = {}  # Address in the site -> path in the repository.


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what docs/ links to and the reference, and orders the navigation."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    documents = sorted(path.relative_to(ROOT).as_posix() for folder in ("docs", "src")
                       for path in (ROOT / folder).rglob("*.md"))
    external = links.repository(ROOT / "pyproject.toml")
    for path in links.linked(ROOT, ["README.md", *documents]):
        if external and not path.endswith((".md", ".svg", ".png")):
            continue
        uri = links.uri_of(path)
        if uri.startswith(headers.FOLDER):
            continue
        _paths[uri] = path
        files.append(_source(config, path, uri) if uri.endswith(".md") and not path.endswith(".md")
                     else File.generated(config, uri, abs_src_path=str(ROOT / path)))
    generated = headers.pages(ROOT) | python_api.pages(ROOT)
    style = (Path(__file__).parent / "extra.css").read_text()
    for uri, content in {**generated, "extra.css": style}.items():
        files.append(File.generated(config, uri, content=content))
    config.nav = navigation(config.nav or [], [file.src_uri for file in files])
    return files


def _source(config: MkDocsConfig, path: str, uri: str) -> File:
    language = links.SOURCES[posixpath.splitext(path)[1]]
    text = (ROOT / path).read_text()
    return File.generated(config, uri, inclusion=InclusionLevel.NOT_IN_NAV,
                          content=f"{_HIDDEN}# {path}\n\n~~~~~{language}\n{text}~~~~~\n")


def navigation(entries: list[Any], uris: list[str]) -> list[Any]:
    """Replaces patterns by the pages that match and that no other entry names, in order."""
    named = _named(entries)
    left = [uri for uri in uris
            if uri.endswith(".md") and uri not in named and _paths.get(uri, ".md").endswith(".md")]

    def expand(part: list[Any]) -> list[Any]:
        result: list[Any] = []
        for entry in part:
            if isinstance(entry, dict):
                result += [{title: expand(value) if isinstance(value, list) else value}
                           for title, value in entry.items()]
            elif "*" in entry:
                matches = sorted(fnmatch.filter(left, entry))
                left[:] = [uri for uri in left if uri not in matches]
                result += matches
            else:
                result.append(entry)
        return result

    return expand(entries)


def _named(entries: list[Any]) -> set[str]:
    found: set[str] = set()
    for entry in entries:
        if isinstance(entry, dict):
            for value in entry.values():
                found |= _named(value) if isinstance(value, list) else {value}
        else:
            found.add(entry)
    return found


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page's text with the site's links, and with lists as Python-Markdown reads them."""
    path = _paths.get(page.file.src_uri)
    if path is None or not path.endswith(".md"):
        return markdown
    external = links.repository(ROOT / "pyproject.toml")
    return lists.indented(links.rewritten(path, markdown, external))
