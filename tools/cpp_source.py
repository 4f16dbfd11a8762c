"""Finds the definitions of a C++ file without a compiler, for the size and name checks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_LITERALS = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_CONTROL = re.compile(r"^(?:else\b\s*)?(?:if|for|while|switch|catch)\b|^(?:else|do|try)$")
_TYPE = re.compile(
    r"^(?:class|struct|union|enum(?:\s+class)?)\s+"
    r"(?:\[\[[^\]]*\]\]\s*|alignas\([^)]*\)\s*)*"
    r"(?P<name>[A-Za-z_]\w*(?:::\w+)*)(?P<rest>.*)",
    re.DOTALL,
)
_TEMPLATE = re.compile(
    r"^template\s*<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>\s*(?:requires\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
)
_NAME = re.compile(
    r"((?:~?\w+(?:<[^()]*>)?\s*::\s*)*(?:operator\s*(?:\(\s*\)|[^\s\w(]*\s*\w*)|~?\w+))"
    r"\s*(?:<[^()]*>)?\s*$"
)
_NAMESPACE = re.compile(r'^(?:inline\s+)?namespace\b|^extern\s+"')
_LAMBDA = re.compile(r"\[[^\[\]]*\]\s*(?:\([^{}]*\))?[^(){}=;]*$")


@dataclass
class Definition:
    """A function or type with a body."""

    kind: str  # "function" or "type"
    name: str
    first_line: int
    last_line: int
    nesting: int = 0
    parameters: int = 0

    @property
    def lines(self) -> int:
        return self.last_line - self.first_line + 1


@dataclass
class _Scope:
    kind: str  # "namespace", "type", "function", "control" or "other"
    outer_text_start: int
    parens: int
    definition: Definition | None = None
    function: Definition | None = field(default=None)
    depth: int = 0


def blank(text: str) -> str:
    """Replaces comments, literals and preprocessor lines by spaces; line numbers are preserved."""

    def spaces(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group(0))

    return _DIRECTIVE.sub(spaces, _LITERALS.sub(spaces, text))


def _parameter_list(signature: str) -> str | None:
    """Returns the text between the parentheses that follow the function's name."""
    position = 0
    angle = 0
    while position < len(signature):
        char = signature[position]
        if char == "<" and re.search(r"(?:\w|operator)\s*$", signature[:position]):
            angle += 1
        elif char == ">" and angle > 0 and signature[position - 1] != "-":
            angle -= 1
        elif char == "(" and angle == 0:
            if signature[:position].rstrip().endswith("operator"):
                position = signature.find(")", position) + 1
                continue
            if re.search(r"\b(?:alignas|decltype|requires|__attribute__|__launch_bounds__)\s*$",
                         signature[:position]):
                position = _matching(signature, position) + 1
                continue
            return signature[position + 1 : _matching(signature, position)]
        position += 1
    return None


def _matching(text: str, start: int) -> int:
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "(":
            depth += 1
        elif text[position] == ")":
            depth -= 1
            if depth == 0:
                return position
    return len(text)


def _count_parameters(parameters: str) -> int:
    """Counts parameters, except a Metal kernel's attribute-bound ones: callers do not pass them."""
    if parameters.strip() in ("", "void"):
        return 0
    depth = 0
    count = 1
    for position, char in enumerate(parameters):
        if char in "(<[{":
            depth += 1
        elif char in ")]}" or (char == ">" and parameters[position - 1] != "-"):
            depth -= 1
        elif char == "," and depth == 0:
            count += 1
    return max(0, count - len(re.findall(r"\[\[\w", parameters)))


def _classify(text: str, scopes: list[_Scope], parens: int) -> tuple[str, str]:
    """Returns what the brace after `text` opens: a _Scope kind and, for a definition, its name."""
    statement = re.sub(r"^(?:(?:public|private|protected)\s*:\s*)+", "", text.strip())
    statement = re.sub(r"^(?:\[\[[^\]]*\]\]\s*)+", "", statement)
    inside = bool(scopes) and scopes[-1].kind in ("function", "control", "other")
    if _CONTROL.match(statement) and parens == 0:
        return "control", ""
    if _NAMESPACE.match(statement):
        return "namespace", ""
    bare = _TEMPLATE.sub("", statement)
    type_match = _TYPE.match(bare)
    if type_match and "(" not in re.sub(r"<[^{}]*>", "", type_match.group("rest")):
        return "type", type_match.group("name")
    if inside or parens > 0 or (_LAMBDA.search(statement) and "operator" not in statement):
        return "other", ""
    parameters = _parameter_list(bare)
    if parameters is None or re.search(r"=\s*$|^return\b", statement):
        return "other", ""
    head, _, tail = bare.partition("(" + parameters + ")")
    if re.match(r"[^()]*:\s", tail) and re.search(r"(?:[,:])\s*[\w:<>]+\s*$", tail):
        return "other", ""  # The brace initializes a member of a constructor.
    name = _NAME.search(head)
    return ("function", re.sub(r"\s+", "", name.group(1))) if name else ("other", "")


def definitions(text: str) -> list[Definition]:
    """Returns all functions and types that a C++ file defines, in order."""
    code = blank(text)
    found: list[Definition] = []
    scopes: list[_Scope] = []
    start = 0  # Start of the current statement.
    parens = 0
    line = 1
    for position, char in enumerate(code):
        if char == "\n":
            line += 1
        elif char == "(":
            parens += 1
        elif char == ")":
            parens = max(0, parens - 1)
        elif char == ";" and parens == 0:
            start = position + 1
        elif char == "{":
            scopes.append(_open(code, start, position, line, parens, scopes))
            if scopes[-1].definition is not None:
                found.append(scopes[-1].definition)
            start = position + 1
            parens = 0
        elif char == "}" and scopes:
            scope = scopes.pop()
            if scope.definition is not None:
                scope.definition.last_line = line
            parens = scope.parens
            start = scope.outer_text_start if scope.kind == "other" else position + 1
    return found


def class_lines(found: Mapping[str, list[Definition]]) -> dict[tuple[str, str], int]:
    """Returns the lines of every class, by folder and name: of its body, and of its functions
    outside of it in the same folder. `found` has the definitions of each file, by its path."""
    lines: Counter[tuple[str, str]] = Counter()
    bodies: set[tuple[str, str]] = set()
    for path, those in found.items():
        folder = path.rpartition("/")[0]
        for definition in those:
            outer, scope, _ = definition.name.partition("::")
            if definition.kind == "type":
                bodies.add((folder, definition.name))
                lines[folder, definition.name] += definition.lines
            elif scope:
                lines[folder, outer] += definition.lines
    return {key: lines[key] for key in bodies}


def _open(code: str, start: int, position: int, line: int, parens: int,
          scopes: list[_Scope]) -> _Scope:
    text = code[start:position]
    kind, name = _classify(text, scopes, parens)
    outer = scopes[-1] if scopes else None
    scope = _Scope(kind, start, parens)
    scope.function = outer.function if outer else None
    scope.depth = outer.depth if outer else 0
    if kind in ("function", "type"):
        first = line - text.lstrip().count("\n")
        scope.definition = Definition(kind, name, first, line)
        if kind == "function":
            parameters = _parameter_list(_TEMPLATE.sub("", text.strip()))
            scope.definition.parameters = _count_parameters(parameters or "")
            scope.function = scope.definition
            scope.depth = 0
    elif kind == "control" and scope.function is not None:
        # `else` continues the previous statement: its body is as deep as the first branch.
        scope.depth += 1
        scope.function.nesting = max(scope.function.nesting, scope.depth)
    return scope
