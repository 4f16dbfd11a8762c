"""MkDocs' hook: the pages of the site, made of the repository's files (mkdocs.yml names it)."""

from __future__ import annotations

import fnmatch
import posixpath
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import ConfigurationError
from mkdocs.plugins import event_priority
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


@event_priority(100)  # Before mkdocstrings looks for the folder.
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the package and the stubs of its compiled part together for the reference."""
    stubs, package = ROOT / "build/python/_core.pyi", ROOT / "build/site-python/metal_marlin"
    if not stubs.exists():
        raise ConfigurationError(f"{stubs.relative_to(ROOT)}: not found; ./dev build makes it")
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "python/metal_marlin", package)
    shutil.copy(stubs, package)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what docs/ links to and the reference, and orders the navigation."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    documents = sorted(path.relative_to(ROOT).as_posix() for folder in ("docs", "src")
                       for path in (ROOT / folder).rglob("*.md"))
    external = links.repository(ROOT / "pyproject.toml")
    style = (Path(__file__).parent / "extra.css").read_text()
    generated = headers.pages(ROOT) | python_api.pages(ROOT) | {"extra.css": style}
    for path in links.linked(ROOT, ["README.md", *documents]):
        if external and not path.endswith((".md", ".svg", ".png")):
            continue
        uri = links.uri_of(path)
        if uri in generated:
            continue
        _paths[uri] = path
        files.append(_source(config, path, uri) if uri.endswith(".md") and not path.endswith(".md")
                     else File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for uri, content in generated.items():
        files.append(File.generated(config, uri, content=content))
    config.nav = navigation(config.nav or [], [file.src_uri for file in files])
    return files


def _source(config: MkDocsConfig, path: str, uri: str) -> File:
    language = links.SOURCES[posixpath.splitext(path)[1]]
    text = (ROOT / path).read_text()
    return File.generated(config, uri, inclusion=InclusionLevel.NOT_IN_NAV,
                          content=f"{_HIDDEN}# {path}\n\n~~~~~{language}\n{text}~~~~~\n")


def navigation(entries: list[Any], uris: list[str]) -> list[Any]:
    """Replaces each pattern by the pages of which it is the longest that matches, in order; pages
    that an entry names and sources are in none."""
    names = list(_names(entries))
    patterns = sorted((name for name in names if "*" in name), key=len, reverse=True)
    found: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    for uri in sorted(set(uris).difference(names)):
        if uri.endswith(".md") and _paths.get(uri, ".md").endswith(".md"):
            pattern = next((part for part in patterns if fnmatch.fnmatch(uri, part)), None)
            if pattern:
                found[pattern].append(uri)

    def expand(part: list[Any]) -> list[Any]:
        result: list[Any] = []
        for entry in part:
            if isinstance(entry, dict):
                result += [{title: expand(value) if isinstance(value, list) else value}
                           for title, value in entry.items()]
            else:
                result += found.get(entry, [entry])
        return result

    return expand(entries)


def _names(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, dict):
            for value in entry.values():
                yield from _names(value if isinstance(value, list) else [value])
        else:
            yield entry


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page's text with the site's links, and with lists as Python-Markdown reads them."""
    path = _paths.get(page.file.src_uri)
    if path is None or not path.endswith(".md"):
        return markdown
    external = links.repository(ROOT / "pyproject.toml")
    return lists.indented(links.rewritten(path, markdown, external))
