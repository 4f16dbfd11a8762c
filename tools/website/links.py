"""Where each file of the repository is in the site, and Markdown's links rewritten accordingly.

The site has the Markdown files of docs/, and what they link to: other Markdown files, sources as
pages that show them, and other files as they are. Where pyproject.toml names the repository's
address, links to anything but Markdown files and pictures lead there instead.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

SOURCES = {".cc": "cpp", ".h": "cpp", ".cu": "cuda", ".cuh": "cuda", ".metal": "cpp", ".c": "c",
           ".py": "python", ".def": "cpp", ".sh": "sh"}
_RENAMED = {"README.md": "index.md", "docs/README.md": "contents.md"}
_LINK = re.compile(r"(\]\()([^)\s]+)(?=\))")
_CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[ ]*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def uri_of(path: str) -> str:
    """The address in the site of a file of the repository."""
    uri = _RENAMED.get(path, path.removeprefix("docs/"))
    uri = re.sub(r"^include/marlin/(?=\w+\.h$)", "reference/cpp/", uri)  # Pages of headers.py.
    return f"{uri}.md" if posixpath.splitext(uri)[1] in SOURCES else uri


def repository(project: Path) -> str:
    """The repository's address that a pyproject.toml names; empty if it names none."""
    urls = tomllib.loads(project.read_text())["project"].get("urls", {})
    return next((url.rstrip("/") for name, url in urls.items()
                 if name.lower() in ("repository", "source")), "")


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts, last = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[last:code.start()]), code[0]]
        last = code.end()
    return "".join([*parts, change(text[last:])])


def targets(path: str, text: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    for _, target in _LINK.findall(_CODE.sub("", text)):
        name = target.partition("#")[0]
        if name and not re.match(r"[a-z]+:", target):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(path), name))


def linked(root: Path, start: list[str]) -> list[str]:
    """`start`, and what its pages link to, directly or by other pages; without missing files."""
    found = dict.fromkeys(start)
    waiting = list(start)
    while waiting:
        path = waiting.pop()
        if path.endswith(".md"):
            new = [target for target in targets(path, (root / path).read_text())
                   if target not in found and (root / target).is_file()]
            found.update(dict.fromkeys(new))
            waiting += new
    return list(found)


def rewritten(path: str, text: str, repository_url: str = "") -> str:
    """A page's text with links for the site; `path` is the page's in the repository."""
    here = posixpath.dirname(uri_of(path))

    def link(match: re.Match[str]) -> str:
        name, mark, fragment = match[2].partition("#")
        if not name or re.match(r"[a-z]+:", match[2]):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        if repository_url and not target.endswith((".md", ".svg", ".png")):
            return f"{match[1]}{repository_url}/blob/main/{target}{mark}{fragment}"
        return f"{match[1]}{posixpath.relpath(uri_of(target), here or '.')}{mark}{fragment}"

    return _outside_code(text, lambda part: _LINK.sub(link, part))
