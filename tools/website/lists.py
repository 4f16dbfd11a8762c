"""Lists and tables as Python-Markdown reads them, from how code hosts do: there, the contents of an
item begin at its text, here, four columns from its mark; there, a list may follow a paragraph."""

from __future__ import annotations

import re

_ITEM = re.compile(r" *(?:[-*+]|\d+\.) +")
_CELL_CODE = re.compile(r"`[^`]*`")
_FENCE = re.compile(r" *(```+|~~~+)")


def indented(text: str) -> str:
    """The text with the contents of list items indented by four columns for each level."""
    result: list[str] = []
    contents: list[int] = []  # For each open item, the column at which its text begins.
    fence = ""
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        mark = _FENCE.match(line)
        follows_paragraph = not contents and bool(result and result[-1].strip())
        if line.strip() and not fence:
            # The lines of a paragraph need no indentation: only an empty line ends an item.
            lazy = bool(result and result[-1].strip()) and not _ITEM.match(line) and not mark
            while contents and indent < contents[-1] and not lazy:
                contents.pop()
        column = contents[-1] if contents else 0
        level = "    " * len(contents)
        item = _ITEM.match(line) if not fence and indent - column < 4 else None
        if item:
            if follows_paragraph:
                result.append("")
            contents.append(len(item[0]))
        if mark:
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        # Code in a table has no escapes there.
        if line.startswith("|") and not fence:
            line = _CELL_CODE.sub(lambda code: code[0].replace("\\|", "|"), line)
        result.append(level + line[min(indent, column):] if line.strip() else "")
    return "\n".join(result) + "\n"
