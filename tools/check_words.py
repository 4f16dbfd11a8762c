#!/usr/bin/env python3
"""Checks that comments, docstrings and documents use the field's words and plain sentences.

Usage: check_words.py [ROOT] | --self-test | --count | --habits [FOLDER] | --lower-limits

Checked are the comments of C++, CUDA, Metal, shell, CMake and Python, the docstrings of Python, and
the prose of *.md. Code, text between backquotes or quotation marks, and data are not.

Habits are turns of phrase that read as translated. They are sought in messages, too (the string
literals of everything but tests), and not in docs/log, whose entries stay as they were written.
Each folder may have as many as tools/word_limits.txt says, and none where it says nothing: limits
only fall. --count prints uses and limit of each folder, --habits the places in a folder, and
--lower-limits writes the limits that the tree needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import check_main
import check_paths

# The word to write: the terms that it replaces, as the glossary of docs/architecture.md lists them,
# each with its regular expression, in which a space is any white space. A term is here only where
# it has no plain meaning beside the one that the field has a word for.
TERMS: dict[str, dict[str, str]] = {
    "GEMV": {
        "few-rows kernel": "few[- ]rows? kernels?",
        "kernel for few rows": "(?:kernels?|products?) (?:for|of|with) few rows",
    },
    "large-M GEMM": {
        "kernel for many rows": "(?:kernels?|products?) (?:for|of|with) (?:many|more) rows",
    },
    "WGMMA kernel": {"warpgroup kernel": "warpgroup kernels?"},
    "n8 tile": {"octet": "octets?", "eights": "eights"},
    "split-K partial": {
        "parts that meet": "(?:parts|splits|blocks that divide k) (?:that )?me(?:e|)t",
        "meet in memory": "me(?:et(?:s|ing)?|t) in (?:global |device )?memory",
    },
    "tile counter": {"meeting memory": "meeting memory", "MeetingMemory": "MeetingMemory"},
    "stream-K": {"streamed item": "streamed (?:items?|tiles?)"},
    "tail wave": {
        "what whole waves leave": "(?:what )?whole waves (?:of items )?leave",
        "left after whole waves": "left (?:over )?(?:after|behind|by) whole waves",
    },
    "flag-in-data": {
        "HandOver": "HandOver",
        "not handed over": "not (?:yet )?(?:been )?handed over",
    },
    "DSMEM reduction buffer": {"inbox": "inbox(?:es)?", "SendFloats": "SendFloats"},
    "TMA multicast group": {"mates": "mates"},
    "intra-CTA split-K": {"sharer": "sharers?"},
    "shared-memory LUT": {"pair table": "pair tables?"},
    "pipeline stage": {"LeaveSlot": "LeaveSlot"},
    "PDL": {"LetNextBegin": "LetNextBegin"},
    "tiling": {"cutter": "cutters?"},
    "k-packed words": {"canonical words": "canonical words"},
    "baseline": {
        "dense peer": "dense peers?",
        "against the peer": "against (?:the|a) peer|as a peer",
    },
    "back-to-back": {"alone or in a chain": "alone,? (?:or|and|nor) in a chain"},
    "cost": {
        "reckon": "reckon(?:s|ed|ing)?",
        "PassesOver": "PassesOver",
        "WgmmaTakesLess": "WgmmaTakesLess",
    },
    "embedding lookup": {"look up rows": "look(?:s|ed|ing)? up (?:no )?rows"},
}

# Sentences in which code is a person, and what to write instead.
_CODE_VERB = ("ran|runs|reads?|writes?|wrote|stores?|waits?|clears?|(?:has )?released?"
              "|who could still come")
PHRASES: dict[str, tuple[str, str]] = {
    "whoever": ("whoever", "the thread, the block or the caller that does it"),
    "nobody": (f"nobody(?: else)?(?:'s| (?:{_CODE_VERB}))|(?:for|to|by) nobody",
               "no thread, no kernel, nothing"),
    "who": ("who", '"which", or the thread or the code that does it'),
}
# Those who are people.
_PEOPLE_WHO = ("(?:people|persons?|attackers?|users?|readers?|callers?|writers?|authors?"
               "|engineers?|maintainers?|contributors?|those"
               "|(?:some|any|every)(?:one|body)(?: else's)?),? who")

# Comments do not begin with "Of", but for sentences ("Of the two, one waits"), nor with "What"
# where they are about a file, a declaration or a field, which a noun names.
BEGINNINGS: dict[str, tuple[str, str]] = {
    "Of": ("Of ", 'the noun: "Size of a barrier", "Weight row: ..."'),
    "What": ("What (?![^.]*[?])", 'the noun: "Launch parameters"'),
}

# Turns of phrase that a native speaker seldom uses, and what to write instead. They are sought in
# this order, and no word counts twice.
HABITS: dict[str, tuple[str, str]] = {
    "one behind the other": ("one behind (?:the other|another)", '"consecutive", "in order"'),
    "those of": ("those of", 'the noun again, or "\'s": "the rows of A and B"'),
    "that of": ("that of", 'the noun again, or "\'s": "the decoder\'s layout"'),
    "behind": ("behind", '"after", "following", "past the end of"'),
    "so many": ("so many", 'the number, "as many as", "too many"'),
    "else": (r"(?<=[,;:]\s)else", '"otherwise"'),
    "but for": ("but for", '"except", "apart from"'),
    "beside": ("beside", '"next to", "with", "compared with", "in addition to"'),
    "the one before": ("the ones? before", '"the previous one", "earlier ones"'),
    "next but one": (r"(?:next|last)(?: \w+)? but one", '"two later"'),
    "on its way": ("on (?:its|their) way", '"in flight", "being copied"'),
    "begin anew": ("beg[iau]ns? anew", '"start over"'),
    "in vain": ("in vain", '"for nothing", "without effect"'),
}
# The right uses of these words.
_RIGHT_USES = (
    r"behind (?:an?|the|its|this|that) (?:[\w'-]+ ){0,3}"
    r"(?:flags?|options?|handles?|pointers?|interface|seam|scenes)"
    r"|(?:fall|falls|fell|lag|lags|left|leaves?|hidden)(?: \w+)? behind"
)

LIMITS = "tools/word_limits.txt"
_LIMITS_HEADER = "# The most habits of each folder, written by tools/check_words.py --lower-limits."
# Files that name the habits.
_QUOTING = ("tools/check_words.py", "tests/tools/check_words_test.py")

_SENTENCE_OF = re.compile(r"Of (?:the|these|those) [^.:;]*,\s")

_CPP = re.compile(
    r'(?P<comment>//[^\n]*|/\*.*?\*/)|R"(?P<tag>[^(\s"]*)\(.*?\)(?P=tag)"'
    r"|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'", re.DOTALL)
_PYTHON = re.compile(
    r"(?P<comment>\#[^\n]*|(?<=:\n)[ \t]*\"\"\".*?\"\"\"|(?<![^\n])\"\"\".*?\"\"\")"
    r"|\"\"\"(?:\\.|[^\\])*?\"\"\"|'''(?:\\.|[^\\])*?'''"
    r"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
_SHELL = re.compile(r"(?P<comment>(?<!\S)\#[^\n]*)")
_TOKENS = {
    _CPP: {".h", ".c", ".cc", ".cu", ".cuh", ".metal", ".mm", ".def"},
    _PYTHON: {".py", ".pyi"},
    _SHELL: {".sh", ".cmake", "CMakeLists.txt", "dev", "run", ".clang-format", ".clang-tidy"},
}
_MARKERS = re.compile(r'^\#!.*|^[ \t]*(?://+<?|\#+|/\*+|"""|\*(?!/))?|(?:\*/|""")[ \t]*$')
_FENCED = re.compile(r"^[ \t]*```.*?^[ \t]*```[^\n]*$|^[ \t]*>[^\n]*$", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"`[^`\n]*(?:\n[^`\n]*)?`|\"[^\"\n]{1,200}(?:\n[^\"\n]{0,200})?\"")


class Comment(NamedTuple):
    """A comment or docstring without its markers."""

    line: int
    column: int
    text: str
    defines: bool = False  # About a file, a declaration or a field.
    apart: bool = False  # On lines of its own.


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """Spaces in place of matches; lines keep their numbers."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), text)


def _comments(token: re.Pattern[str], text: str) -> Iterator[Comment]:
    """Comments on lines that follow each other are one where they begin in the same column, unless
    code precedes the later one on its line."""
    comment: Comment | None = None
    line, counted = 1, 0
    for match in token.finditer(text):
        if match.group("comment") is None:
            continue
        begin = match.end() - len(match.group(0).lstrip())
        line, counted = line + text.count("\n", counted, begin), begin
        before = text[text.rfind("\n", 0, begin) + 1 : begin]
        own = "\n".join(_MARKERS.sub("", part) for part in match.group(0).strip().split("\n"))
        if (comment is not None and not before.strip() and comment.column == len(before)
                and line == comment.line + comment.text.count("\n") + 1):
            comment = comment._replace(text=f"{comment.text}\n{own}")
            continue
        if comment is not None:
            yield comment
        first = match.group(0).lstrip()[:3]
        defines = first in ("///", '"""', "/**") or (line == 1 and first.startswith("//"))
        comment = Comment(line, len(before), own, defines, not before.strip())
    if comment is not None:
        yield comment


def _token_of(path: str) -> re.Pattern[str] | None:
    name = path.rsplit("/", 1)[-1].removesuffix(".in")
    for token, kinds in _TOKENS.items():
        if name in kinds or Path(name).suffix in kinds:
            return token
    return None


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{pattern})\b".replace(" ", r"\s+"), re.IGNORECASE)


def _messages(token: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each string literal of several words."""
    line, counted = 1, 0
    for match in token.finditer(text):
        if match.group("comment") is None and " " in match.group(0):
            line, counted = line + text.count("\n", counted, match.start()), match.start()
            yield line, match.group(0).strip("\"'")


def folder_of(path: str) -> str:
    """Returns the folder by which a file's habits are counted."""
    parts = path.split("/")[:-1]
    depth = 4 if parts[:2] == ["src", "backends"] else 2
    return "/".join(parts[:depth]) or "."


class Words:
    """The rules, ready to use."""

    def __init__(self) -> None:
        self.rules = [(_compile(pattern), f'"{word}"')
                      for word, terms in TERMS.items() for pattern in terms.values()]
        self.rules += [(_compile(pattern), write) for pattern, write in PHRASES.values()]
        # One search finds whether any of them is in a text: nearly always none is.
        self.any_rule = re.compile("|".join(rule.pattern for rule, _ in self.rules), re.IGNORECASE)
        self.people = _compile(_PEOPLE_WHO)
        self.beginnings = [(re.compile(pattern.replace(" ", r"\s")), name, write)
                           for name, (pattern, write) in BEGINNINGS.items()]
        self.right_uses = _compile(_RIGHT_USES)
        self.habits = [(_compile(pattern), name, write)
                       for name, (pattern, write) in HABITS.items()]

    def habits_of(self, path: str, text: str) -> list[str]:
        """Returns the habits of a file, one line each."""
        if path.startswith("docs/log/"):
            return []
        token = _token_of(path)
        found: list[tuple[int, str, str]] = []
        if path.endswith(".md"):
            found = self._habits(1, _blank(_QUOTED, _blank(_FENCED, text)))
        elif token is not None:
            for comment in _comments(token, text):
                found += self._habits(comment.line, _blank(_QUOTED, comment.text))
            if token is not _SHELL and not path.startswith("tests/"):
                for line, message in _messages(token, text):
                    found += self._habits(line, message)
        return [f'{path}:{line}: "{name}": write {write}' for line, name, write in sorted(found)]

    def _habits(self, first_line: int, prose: str) -> list[tuple[int, str, str]]:
        prose = _blank(self.right_uses, prose)
        found = []
        for rule, name, write in self.habits:
            found += [(first_line + prose.count("\n", 0, match.start()), name, write)
                      for match in rule.finditer(prose)]
            prose = _blank(rule, prose)
        return found

    def check(self, path: str, text: str) -> list[str]:
        token = _token_of(path)
        findings = []
        if path.endswith(".md"):
            findings = self._check_prose(_blank(_FENCED, text))
        elif token is not None:
            for comment in _comments(token, text):
                if token is _PYTHON and path.startswith("tests/"):
                    comment = comment._replace(defines=False)
                findings += [(line + comment.line - 1, term, write)
                             for line, term, write in self._check_comment(comment)]
        return [f'{path}:{line}: "{term}": write {write}' for line, term, write in findings]

    def _check_comment(self, comment: Comment) -> list[tuple[int, str, str]]:
        begin = comment.text.lstrip()
        line = comment.text[: len(comment.text) - len(begin)].count("\n") + 1
        sentence = comment.apart and not comment.defines and _SENTENCE_OF.match(begin)
        excused = {"Of": sentence, "What": not comment.defines}
        return [(line, name, write) for pattern, name, write in self.beginnings
                if pattern.match(begin) and not excused[name]] + self._check_prose(comment.text)

    def _check_prose(self, text: str) -> list[tuple[int, str, str]]:
        if not self.any_rule.search(text):
            return []
        prose = _blank(self.people, _blank(_QUOTED, text))
        found = sorted((match.start(), " ".join(match.group(0).split()), write)
                       for rule, write in self.rules for match in rule.finditer(prose))
        return [(prose.count("\n", 0, place) + 1, term, write) for place, term, write in found]


def check_text(path: str, text: str) -> list[str]:
    return Words().check(path, text)


def _texts(root: Path) -> Iterator[tuple[str, str]]:
    """The relative path and the text of every file that is checked."""
    for path in sorted(check_paths.project_files(root)):
        relative = path.relative_to(root).as_posix()
        checked = path.suffix == ".md" or _token_of(relative) is not None
        if checked and path.is_file() and "data" not in relative.split("/"):
            yield relative, path.read_text(errors="replace")


def habits_by_folder(texts: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    words = Words()
    folders: dict[str, list[str]] = {}
    for path, text in texts:
        if path not in _QUOTING:
            folders.setdefault(folder_of(path), []).extend(words.habits_of(path, text))
    return folders


def limits(root: Path) -> dict[str, int]:
    """Returns the most habits of each folder, from lines "COUNT FOLDER"."""
    file = root / LIMITS
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {folder: int(count) for count, folder in rows}


def check_habits(root: Path, texts: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a finding for every folder with more habits than its limit."""
    most = limits(root)
    return [f"{folder}: {len(found)} turns of phrase that read as translated, limit "
            f"{most.get(folder, 0)}: see tools/check_words.py --habits {folder}"
            for folder, found in habits_by_folder(texts).items()
            if len(found) > most.get(folder, 0)]


def check_tree(root: Path) -> list[str]:
    words = Words()
    texts = list(_texts(root))
    findings = [finding for path, text in texts for finding in words.check(path, text)]
    return findings + check_habits(root, texts)


def count(root: Path) -> list[str]:
    """Returns the uses and the limit of each folder, and their sums."""
    most = limits(root)
    found = {folder: len(uses) for folder, uses in habits_by_folder(_texts(root)).items()}
    rows = [(found.get(folder, 0), most.get(folder, 0), folder)
            for folder in sorted(found.keys() | most.keys())]
    rows = [row for row in rows if row[0] or row[1]]
    total = (sum(row[0] for row in rows), sum(row[1] for row in rows), "all")
    return ["uses limit folder", *(f"{uses:4} {limit:5} {name}" for uses, limit, name
                                   in (*rows, total))]


def lower_limits(root: Path) -> None:
    """Writes the limits that the tree needs. A limit does not rise; a new file takes any."""
    most = limits(root)
    found = {folder: len(uses) for folder, uses in habits_by_folder(_texts(root)).items()}
    rows = {folder: min(uses, most.get(folder, 0) if most else uses)
            for folder, uses in found.items()}
    lines = [f"{uses} {folder}" for folder, uses in sorted(rows.items()) if uses]
    (root / LIMITS).write_text("\n".join([_LIMITS_HEADER, *lines, ""]))


# A comment that each rule finds, by the name of the rule.
MUST_FIND: dict[str, tuple[str, str]] = {
    "few-rows kernel": ("a.h", "// The few-row kernel."),
    "kernel for few rows": ("a.h", "/// Shared memory of the kernel\n/// for few rows."),
    "kernel for many rows": ("a.md", "Products of more rows wait."),
    "warpgroup kernel": ("a.cuh", "// Slower than the warpgroup kernels."),
    "octet": ("a.cuh", "int o;  ///< The octet."),
    "eights": ("a.cc", "/* In eights. */"),
    "parts that meet": ("a.py", "# The parts meet."),
    "meet in memory": ("a.cu", "// Splits that do not divide the tile meet in memory."),
    "meeting memory": ("a.sh", "x=1  # The meeting memory."),
    "MeetingMemory": ("CMakeLists.txt", "# MeetingMemory is large."),
    "streamed item": ("a.metal", "// Streamed items."),
    "what whole waves leave": ("a.cc", "// Takes what whole waves leave."),
    "left after whole waves": ("a.cc", "// The tiles left behind whole waves."),
    "HandOver": ("a.cc", "// HandOver stores."),
    "not handed over": ("a.cc", "// It has not been handed over."),
    "inbox": ("a.cc", "// To the inbox."),
    "SendFloats": ("a.cc", "// SendFloats waits."),
    "mates": ("a.cc", "// For the mates."),
    "sharer": ("a.cc", "// A sharer of it."),
    "pair table": ("a.cc", "// The pair table."),
    "LeaveSlot": ("a.cc", "// LeaveSlot comes last."),
    "LetNextBegin": ("a.cc", "// LetNextBegin comes first."),
    "cutter": ("a.cc", "// The cutter."),
    "canonical words": ("a.h.in", "/// From canonical words."),
    "dense peer": ("a.py", 'def f():\n    """The dense peer."""'),
    "against the peer": ("a.md", "Measure against the\npeer."),
    "alone or in a chain": ("a.cc", "// Launched alone or in a chain."),
    "reckon": ("a.cc", "// It is reckoned."),
    "PassesOver": ("a.cc", "// PassesOver decides."),
    "WgmmaTakesLess": ("a.cc", "// WgmmaTakesLess decides."),
    "look up rows": ("a.cc", "// Looks up rows."),
    "whoever": ("a.md", "Whoever takes the last ticket waits."),
    "nobody": ("a.cc", "// Bytes that nobody wrote."),
    "who": ("a.cc", "// It tells the kernel who has the tile."),
    "Of": ("a.cc", "int k;  ///< Of a tile."),
    "What": ("a.py", '#!/usr/bin/env python3\n\n"""What the kernel is given."""'),
}
MUST_PASS: list[tuple[str, str]] = [
    ("a.cc", "// Offsets.\n// Of these, half."),
    ("a.cc", "// What does a tile hold? Codes."),
    ("a.cc", "// Whatever it is."),
    ("a.cc", "void F() {\n  // What lies behind the words is not read.\n}"),
    ("tests/a_test.py", '"""What files say is quoted."""'),
    ("a.cc", 'f("whoever");  // The caller.'),
    ("a.cc", "// It estimates the tail of `kOctets`, an \"octet\", for people who ask."),
    ("a.cc", "// The climates\n// meet."),
    ("a.md", "```\nOf octets\n```\n> whoever\n\nUse `mates`, for users who do."),
    ("a.py", 'X = """\n# Whoever\n"""\n'),
    ("a.sh", "echo ${x#octet}\n"),
    ("a.json", "whoever"),
    ("a.cc", "// A size that nobody can allocate."),
    ("a.md", "On a machine that nobody else uses."),
    ("a.cc", "  x();\n  // Of the three most likely tokens, two exceed it."),
]


# A text in which each habit is found once.
MUST_COUNT: dict[str, tuple[str, str]] = {
    "one behind the other": ("a.h", "// Two tiles, one behind the other."),
    "those of": ("a.cc", "// The weights, then those\n// of the head."),
    "that of": ("src/a.cc", 'Status F() { return Invalid("a differs from that of b"); }'),
    "behind": ("a.md", "Zeros lie behind the last row."),
    "so many": ("a.cu", "// Copies so many rows."),
    "else": ("a.h", "int* up;  ///< Gated: the up half, else null."),
    "but for": ("a.py", '"""All formats but for fp32."""'),
    "beside": ("a.sh", "x=1  # Beside the baseline."),
    "the one before": ("a.metal", "// Added to the one before."),
    "next but one": ("a.cc", "// Read after the next barrier but one."),
    "on its way": ("a.cc", "// A matrix on its way."),
    "begin anew": ("a.cc", "// Segments begin anew."),
    "in vain": ("a.py", 'raise ValueError("waits in vain")'),
}
MUST_NOT_COUNT: list[tuple[str, str]] = [
    ("a.cc", "// Hidden behind a build flag; the object behind a handle; it must not fall behind."),
    ("tests/a.cc", 'EXPECT_EQ(text, "those of a");'),
    ("docs/log/a.md", "Slower than those of cuBLAS."),
    ("a.cc", "if (a) b(); else c();  // Or else `those of`."),
    ("a.cc", "// Those offsets; that offset; besides."),
]


def self_test() -> list[str]:
    failures = self_test_of_habits()
    for name, case in MUST_FIND.items():
        if len(check_text(*case)) != 1:
            failures.append(f"not found once: {name}: {check_text(*case)}")
    rules = [term for terms in TERMS.values() for term in terms]
    for name in (*rules, *PHRASES, *BEGINNINGS):
        if name not in MUST_FIND:
            failures.append(f"no case: {name}")
    return failures + [f"wrongly found: {check_text(*case)}" for case in MUST_PASS
                       if check_text(*case)]


def self_test_of_habits() -> list[str]:
    words = Words()
    failures = []
    for name in HABITS:
        path, text = MUST_COUNT.get(name, ("", ""))
        found = words.habits_of(path, text)
        if len(found) != 1 or f'"{name}"' not in found[0]:
            failures.append(f"not counted once: {name}: {found}")
    failures += [f"no habit: {name}" for name in MUST_COUNT if name not in HABITS]
    return failures + [f"wrongly counted: {words.habits_of(*case)}" for case in MUST_NOT_COUNT
                       if words.habits_of(*case)]


def main() -> int:
    option, *rest = [*sys.argv[1:], ""]
    if option == "--count":
        print("\n".join(count(Path("."))))
    elif option == "--habits":
        folders = habits_by_folder(_texts(Path(".")))
        for folder, uses in sorted(folders.items()):
            if f"{folder}/".startswith(f"{rest[0].rstrip('/')}/") or not rest[0]:
                print("\n".join(uses), end="\n" if uses else "")
    elif option == "--lower-limits":
        lower_limits(Path("."))
    else:
        return check_main.run(check_tree, self_test)
    return 0


if __name__ == "__main__":
    sys.exit(main())
