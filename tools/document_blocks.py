#!/usr/bin/env python3
"""The fenced blocks of the documents, and the rule by which a test runs each of them. As a program
it prints how many are run, by language, and why the others are not."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`([\w.-]+)`:\n\n *$")
# The first line of a block that no test runs says why.
_NOT_RUN = re.compile(r"(?:#|//) (needs (?:an NVIDIA GPU|a Mac|vLLM|the network|a server"
                      r"|a model of yours)|compiles the project|a sketch)\b")
# The languages of blocks, and what is done with an unmarked block of each.
RULES = {
    "console": "tests/examples/documents_test.py runs its `$ metal-marlin` lines",
    "python": "tests/integrations/test_documents.py runs it",
    "c": "its lines are in a file of examples/ or a test",
    "cpp": "its lines are in a file of examples/ or a test",
    "cmake": "its lines are in a file of examples/ or a test",
    "json": "a file for the commands of its page",
    "metal": "a file for the commands of its page",
    "jinja": "a file for the commands of its page",
    "sh": "a request to the server of its page (documents_test.py) or `python -m metal_marlin...` "
          "(test_documents.py)",
    "text": "output, or the form of a file",
}
# Languages of what is neither code nor a command.
_NO_CODE = ("text",)
_FILES = ("json", "metal", "jinja")
# The address of a page's server in its text; the test's server has another port.
SERVER = "http://127.0.0.1:8000"
_SERVE = "$ metal-marlin serve "
MODULE = "python -m metal_marlin."


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    text: str
    file: str  # The file's name, where the line before the block ends with it and a colon.
    not_run: str  # The marker's reason; empty for a block that is run.


def how_tos(root: Path) -> list[str]:
    """README and the how-tos, which are for users and in short sentences."""
    return ["README.md", *(f"docs/howto/{path.name}"
                           for path in sorted((root / "docs/howto").glob("*.md")))]


def pages(root: Path) -> list[str]:
    """The pages whose blocks are run: all but the log's, which show what was run at the time."""
    others = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "metal_sim/README.md",
              *sorted(path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md")))
    first = how_tos(root)
    return first + [page for page in others
                    if (root / page).exists() and page not in first
                    and not page.startswith("docs/log/")]


def blocks(page: str) -> list[Block]:
    """Returns the blocks of a page's text, without their indentation."""
    found = []
    for match in _FENCE.finditer(page):
        text = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        file = _FILE.search(page, 0, match.start())
        marker = _NOT_RUN.match(text)
        found.append(Block(page.count("\n", 0, match.start()) + 1, match[2].strip(), text,
                           file[1] if file else "", marker[1] if marker else ""))
    return found


def run_blocks(page: str, *languages: str) -> list[Block]:
    """The blocks of some languages that are run."""
    return [block for block in blocks(page) if block.language in languages and not block.not_run]


def serves(page: str) -> bool:
    """Whether a page's commands start a server, which its `sh` and `python` blocks talk to."""
    return any(line.startswith(_SERVE) for block in run_blocks(page, "console")
               for line in block.text.splitlines())


def runs_modules(block: Block) -> bool:
    """Whether all lines of a block run modules of the package."""
    return all(line.startswith(MODULE) for line in block.text.splitlines())


def check(page: str) -> list[tuple[int, str]]:
    """Returns (line, finding) for each block that nothing runs and no marker excuses."""
    findings = []
    for block in blocks(page):
        if block.not_run:
            continue
        if block.language not in RULES:
            findings.append((block.line, f"no test runs {block.language or 'plain'!r} blocks: "
                                         "name its language, or begin it with a mark of "
                                         "tools/document_blocks.py"))
        elif block.language == "sh" and not (serves(page) and block.text.startswith("curl ")
                                             or runs_modules(block)):
            findings.append((block.line, "only curl's requests to the page's server and modules of "
                                         "the package are run: begin it with a mark of "
                                         "tools/document_blocks.py"))
        elif block.language in _FILES and not block.file:
            findings.append((block.line, "no line names the file that this block is"))
        elif block.language == "console":
            findings += [(block.line + 1 + i, f"only metal-marlin is run: {line}")
                         for i, line in enumerate(block.text.splitlines())
                         if line.startswith("$ ") and not line.startswith("$ metal-marlin ")]
    return findings


def check_fences(page: str) -> list[tuple[int, str]]:
    """Returns (line, finding) for each block that is indented instead of fenced."""
    findings = []
    unfenced = _FENCE.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), page)
    for match in re.finditer(r"^(?![ ]|\d+\. |[-*] )\S.*\n\n(?=    \S)", unfenced, re.MULTILINE):
        findings.append((page.count("\n", 0, match.end()) + 1, "fence this block"))
    return findings


def main() -> None:
    root = Path(__file__).resolve().parents[1]
    counts: Counter[tuple[str, str]] = Counter()
    for page in pages(root):
        for block in blocks((root / page).read_text()):
            rule = "no code: " if block.language in _NO_CODE else ""
            counts[block.language, f"not run: {block.not_run}" if block.not_run
                   else f"{rule}{RULES[block.language]}"] += 1
    for (language, how), count in sorted(counts.items()):
        print(f"{count:4}  {language:8} {how}")
    run = sum(count for (language, how), count in counts.items()
              if not how.startswith(("not run", "no code")))
    marked = sum(count for (_, how), count in counts.items() if how.startswith("not run"))
    print(f"{run} run, {marked} not run with a reason, {counts.total() - run - marked} no code")


if __name__ == "__main__":
    main()
