"""Reference pages of the public headers: each declaration with its comment, as the header has them.

The members of a type are shown in its code with their comments, as godoc does; bodies and private
members are left out.
"""

from __future__ import annotations

import posixpath
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cpp_source  # noqa: E402

_FORMATS = Path(__file__).resolve().parents[2] / "include/marlin/formats.def"

FOLDER = "reference/cpp"
_SCOPE = re.compile(r"\s*(?:namespace\s+[\w:]*\s*\{|extern\s*\{|extern\s+\"C\"\s*\{)")
_TYPE = re.compile(r"(?:template\s*<.*?>\s*)?(?:typedef\s+)?"
                   r"(?:enum class|enum|class|struct|union)\b(?:\s*\[\[\w+\]\])?\s*(\w+)",
                   re.DOTALL)
_MEMBERS = re.compile(r"(?:template\s*<.*?>\s*)?(?:typedef|enum|class|struct|union)\b", re.DOTALL)
_TYPEDEF = re.compile(r"(\w+)\s*;\s*$")
_USING = re.compile(r"(?:template\s*<.*?>\s*)?using\s+(\w+)", re.DOTALL)
_FUNCTION = re.compile(r"(operator\s*[^\s\w(]+|~?\w+)\s*\(")
_CONSTANT = re.compile(r"(\w+)\s*(?:\[[^\]]*\]\s*)*(?:=|;|\{)")
_MACRO = re.compile(r"^#define\s+(MARLIN_\w*[A-Z])\b(?!\s*$)(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_ACCESS = re.compile(r"^\s*(public|private|protected):", re.MULTILINE)
# Code in a sentence: text in quotes with signs, a shape, a constant, a name with "::" or "_".
_CODE = re.compile(r"`[^`]+`|\"[^\"]{1,90}\"|[\w.]*(?:\[[^\[\]]{1,60}\])+|\b(?:\w+::)+\w+(?:\(\))?"
                   r"|\bk[A-Z]\w+|\b(?:\w+\.)*\w+_\w+(?:\.\w+)*(?:\([\w, ]*\)|\*)?")
_VOCABULARY = {"Status", "Result"}  # In almost every declaration.
_LINT = re.compile(r"[ \t]*// NOLINT[^\n]*")
_EXPORT = "MARLIN_C_API "
_LIST = re.compile(r"#define MARLIN_FORMAT.*#undef MARLIN_FORMAT", re.DOTALL)


@dataclass
class Declaration:
    """A declaration at the scope of a namespace."""

    name: str
    code: str
    comment: str
    is_type: bool


def _comment_before(text: str, start: int) -> str:
    """The comment directly above a declaration, without its marks; empty if there is none."""
    above = text[:start].rstrip(" \t")
    found = re.search(r"(?:^[ \t]*///(?!<)[^\n]*\n)+\Z", above, re.MULTILINE)
    if found:
        return re.sub(r"^[ \t]*/// ?", "", found[0], flags=re.MULTILINE).strip("\n")
    found = re.search(r"^/\*((?:(?!\*/).)*)\*/[ \t]*\n\Z", above, re.MULTILINE | re.DOTALL)
    return _without_stars(found[1]) if found else ""


def _without_stars(text: str) -> str:
    return re.sub(r"^[ \t]*\*? ?", "", text, flags=re.MULTILINE).strip()


def file_comment(text: str) -> str:
    """The comment at the head of a header."""
    found = re.match(r"(?://[^\n]*\n)+", text)
    if found:
        return re.sub(r"^// ?", "", found[0], flags=re.MULTILINE).strip("\n")
    found = re.match(r"/\*(.*?)\*/", text, re.DOTALL)
    return re.sub(r"^ ?\*? ?", "", found[1], flags=re.MULTILINE).strip() if found else ""


def _end_of(blank: str, start: int) -> tuple[int, int]:
    """The end of the declaration at `start`, and the start of a function's body in it, or -1."""
    depth, body, parens = 0, -1, 0
    has_members = _MEMBERS.match(blank, start)
    for i in range(start, len(blank)):
        char = blank[i]
        parens += (char == "(") - (char == ")")
        if char == "{":
            if depth == 0 and parens == 0 and not has_members and "=" not in blank[start:i]:
                body = i
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0 and body >= 0:
                return i + 1, body
        elif char == ";" and depth == 0:
            return i + 1, -1
    raise ValueError(f"a declaration does not end: {blank[start:start + 80]!r}")


def _shown(text: str, blank: str, start: int, end: int, body: int) -> str:
    """The code of a declaration: without bodies and private members."""
    if body >= 0:
        head = _without_initializers(blank[start:body])
        return text[start:start + len(head.rstrip())] + ";"
    code, masked = text[start:end], blank[start:end]
    if not _TYPE.match(masked) or "{" not in masked:
        return code
    opening, closing = masked.index("{"), masked.rindex("}")
    members, masks = code[opening + 1:closing], masked[opening + 1:closing]
    is_class = re.search(r"\bclass\b", masked[:opening]) and "enum" not in masked[:opening]
    kept = _public(members, masks, not is_class)
    if "\n" in members:
        kept = (" public:" if is_class else "") + kept.rstrip() + "\n"
    return code[:opening + 1] + ("\n" if is_class else "") + kept + code[closing:]


def _without_initializers(head: str) -> str:
    """A constructor's head without its member initializers."""
    found = re.search(r"\)\s*(?:noexcept\s*)?:(?!:)", head)
    return head[:found.end() - 1] if found else head


def _public(members: str, masks: str, public: bool) -> str:
    """The public members of a type, without the bodies of functions."""
    parts, last = [], 0
    for label in (*_ACCESS.finditer(masks), None):
        end = label.start() if label else len(members)
        if public:
            parts.append(_without_bodies(members[last:end], masks[last:end]))
        if label:
            public, last = label[1] == "public", label.end()
    return "".join(parts)


def _without_bodies(members: str, masks: str) -> str:
    kept, last = [], 0
    for found in re.finditer(r"\)[^;{}()=]*(?::(?!:)[^;]*?)?(?=\{)", masks):
        opening = found.end()
        if found.start() < last:
            continue
        closing = _match(masks, opening)
        # The braces of a member initializer are not the body.
        while ":" in found[0] and (more := re.match(r"\s*(?:,[^;{]*)?\{", masks[closing:])):
            closing = _match(masks, closing + more.end() - 1)
        head = _without_initializers(masks[last:opening]).rstrip()
        kept.append(members[last:last + len(head)] + ";")
        last = closing
    return "".join(kept) + members[last:]


def _match(masks: str, opening: int) -> int:
    """The place after the brace that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(masks)):
        depth += (masks[i] == "{") - (masks[i] == "}")
        if depth == 0:
            return i + 1
    raise ValueError("unbalanced braces")


def _name(masked: str) -> tuple[str, bool]:
    """The name of a declaration, and whether it is a type."""
    if masked.startswith("typedef"):
        pointer = re.search(r"\(\s*\*\s*(\w+)\s*\)", masked)
        found = pointer or _TYPEDEF.search(masked)
    elif re.match(r"enum\s*\{", masked):
        return re.findall(r"\w+", masked)[1], False
    else:
        found = _TYPE.match(masked) or _USING.match(masked)
    if found:
        return found[1], True
    plain = re.sub(r"\[\[\w+\]\]|__attribute__\s*\(\(.*?\)\)", "", masked)
    found = _FUNCTION.search(plain) or _CONSTANT.search(plain)
    return (re.sub(r"\s", "", found[1]) if found else ""), False


def declarations(text: str) -> list[Declaration]:
    """The declarations of a header, in its order."""
    blank = cpp_source.blank(text)
    found, at = [], 0
    while True:
        start = re.compile(r"[^\s}]").search(blank, at)
        if start is None:
            break
        scope = _SCOPE.match(blank, start.start())
        if scope:
            at = scope.end()
            continue
        end, body = _end_of(blank, start.start())
        name, is_type = _name(blank[start.start():end])
        code = _readable(_shown(text, blank, start.start(), end, body))
        trailing = re.compile(r"[ \t]*///<[^\n]*").match(text, end)
        if trailing:
            code += f"  {trailing[0].strip()}"
        if name and not _is_forward(code):
            comment = _comment_before(text, start.start())
            found.append((start.start(), end, Declaration(name, code, comment, is_type)))
        at = end
    found += [macro for macro in _macros(text)
              if not any(start < macro[0] < end for start, end, _ in found)]
    return [declaration for _, _, declaration in sorted(found, key=lambda place: place[0])]


def _readable(code: str) -> str:
    """The code without what only compilers and linters read."""
    code = _LINT.sub("", code)
    if code.startswith(_EXPORT):
        code = code.removeprefix(_EXPORT).replace("\n" + " " * len(_EXPORT), "\n")
    return _LIST.sub(lambda _: _enumerators(), code)


def _enumerators() -> str:
    """The lines of an enumeration that formats.def makes."""
    names = re.findall(r"^MARLIN_FORMAT\((\w+),", _FORMATS.read_text(), re.MULTILINE)
    return textwrap.fill(", ".join(names) + ",", 96, subsequent_indent="  ", initial_indent="  ")


def _is_forward(code: str) -> bool:
    return bool(re.fullmatch(r"(?:class|struct) \w+;", code))


def _macros(text: str) -> list[tuple[int, int, Declaration]]:
    return [(macro.start(), macro.end(),
             Declaration(macro[1], macro[0], _comment_before(text, macro.start()), False))
            for macro in _MACRO.finditer(text)
            if not macro[1].endswith("_H_") and macro[1] != "MARLIN_C_API"]


def prose(comment: str) -> str:
    """A comment as Markdown: its text is taken literally, apart from lists and code."""
    blocks: list[list[str]] = [[]]
    for line in comment.splitlines():
        # A list begins after an empty line in Markdown.
        if not line or line.startswith("- "):
            blocks.append([])
        if line:
            blocks[-1].append(line)
    return "\n\n".join(_block("\n".join(block)) for block in blocks if block)


def _block(text: str) -> str:
    if text.startswith("  "):
        return textwrap.indent(textwrap.dedent(text), "    ")
    item, text = ("- ", text[2:]) if text.startswith("- ") else ("", text)
    parts, last = [], 0
    for code in _CODE.finditer(text):
        parts += [_literal(text[last:code.start()]), _code(code[0])]
        last = code.end()
    return item + "".join([*parts, _literal(text[last:])])


def _literal(text: str) -> str:
    return re.sub(r"([*_<\[\]])", r"\\\1", text)


def _code(text: str) -> str:
    if text.startswith("`") or text.startswith('"') and not re.search(r"[\[*_<|]", text):
        return text
    return f"`{' '.join(text.split())}`"


def merged(found: Iterable[Declaration]) -> list[Declaration]:
    """Consecutive overloads, and constants without a comment of their own, become one."""
    result: list[Declaration] = []
    for declaration in found:
        last = result[-1] if result else None
        if last and last.name == declaration.name and not last.is_type:
            text = f"{last.code}\n\n{_as_comment(declaration.comment)}{declaration.code}"
            result[-1] = Declaration(last.name, text, last.comment, False)
        elif not declaration.is_type and not declaration.comment and last and not last.is_type:
            last.code += f"\n{declaration.code}"
        else:
            result.append(declaration)
    return result


def _as_comment(comment: str) -> str:
    return "".join(f"/// {line}".rstrip() + "\n" for line in comment.splitlines())


def page(name: str, text: str, types: dict[str, str]) -> str:
    """The reference page of a header; `types` maps a type to its page and anchor."""
    language = "c" if name.startswith("marlin_c") else "cpp"
    include = f'#include "marlin/{name}"'
    parts = [f"# {name}", prose(file_comment(text)), f"```{language}\n{include}\n```"]
    here = f"{FOLDER}/{name}.md"
    for declaration in merged(declarations(text)):
        parts += [f"## {declaration.name} {{ #{declaration.name} }}", prose(declaration.comment),
                  f"```{language}\n{declaration.code}\n```"]
        used = sorted({word for word in re.findall(r"\w+", cpp_source.blank(declaration.code))
                       if word in types.keys() - {declaration.name, *_VOCABULARY}})
        if used:
            links = (f"[`{word}`]({_link(here, types[word])})" for word in used)
            parts.append(f"Types: {', '.join(links)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _link(page_uri: str, target: str) -> str:
    uri, _, fragment = target.partition("#")
    return f"{posixpath.relpath(uri, posixpath.dirname(page_uri))}#{fragment}"


def pages(root: Path) -> dict[str, str]:
    """The reference page of every public header, by its address in the site."""
    folder = root / "include/marlin"
    headers = {path.name: path.read_text() for path in sorted(folder.glob("*.h"))}
    types = {declaration.name: f"{FOLDER}/{name}.md#{declaration.name}"
             for name, text in headers.items() for declaration in merged(declarations(text))
             if declaration.is_type}
    return {f"{FOLDER}/{name}.md": page(name, text, types) for name, text in headers.items()}
