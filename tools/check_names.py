#!/usr/bin/env python3
"""Checks that every name has one definition: the names of seed_names.txt, every function and type
that a public header declares, and every codec of formats.def are each defined exactly once.

Usage: check_names.py [ROOT] | --self-test
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

import check_main
import cpp_source

_FREE_FUNCTION = re.compile(r"^(?:[\w:<>,\s&*]+?[\s&*])(\w+)\([^;{}]*\);", re.MULTILINE)
_FORMAT = re.compile(r"^MARLIN_FORMAT\((\w+), *(\w+), *(\w+)\)", re.MULTILINE)
# Suffixes that keep an old copy next to a new one.
_VERSIONED = re.compile(r"(?:_v\d+|_optimized|_new|_old|_fast|V2|Optimized)$")


def _last(name: str) -> str:
    return name.rsplit("::", 1)[-1]


def collect(files: dict[str, str]) -> dict[str, list[str]]:
    """Maps name -> "path:line" of every definition; constructors belong to their type."""
    found = [(path, definition) for path, text in files.items()
             for definition in cpp_source.definitions(text)]
    types = {definition.name for _, definition in found if definition.kind == "type"}
    places: dict[str, list[str]] = defaultdict(list)
    for path, definition in found:
        if definition.kind == "type" or _last(definition.name) not in types:
            places[definition.name].append(f"{path}:{definition.first_line}")
    return places


def declared(header: str) -> set[str]:
    """Returns the free functions that a public header declares without a body."""
    code = cpp_source.blank(header)
    # Members are indented; unindented declarations are in namespace marlin.
    flat = re.sub(r"\n[ \t]+", " ", code)
    names = set()
    for match in _FREE_FUNCTION.finditer(flat):
        if not re.search(r"\b(?:class|struct|using|return|friend|operator)\b", match.group(0)):
            names.add(match.group(1))
    return names


def check(files: dict[str, str], seeds: str) -> list[str]:
    """`files` maps paths to texts; `seeds` is the text of seed_names.txt."""
    findings = []
    places = collect(files)
    for line in seeds.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, state = line.split()
        found = [place for full, where in places.items() if _last(full) == name for place in where]
        if len(found) > 1:
            findings.append(f"{name}: {len(found)} definitions: {', '.join(found)}")
        if state == "cpp" and not found:
            findings.append(f"{name}: no definition")
    public = [text for path, text in files.items() if path.startswith("include/")]
    implemented = {_last(name) for name in places}
    for name in sorted(set().union(*(declared(text) for text in public)) - implemented):
        findings.append(f"{name}: declared in include/marlin, defined nowhere")
    formats = files.get("include/marlin/formats.def", "")
    for _, name, codec in _FORMAT.findall(formats):
        found = places.get(codec, [])
        if len(found) != 1 or not found[0].startswith(f"src/formats/{name}.h:"):
            findings.append(f"{codec}: not defined once, in src/formats/{name}.h, but in {found}")
    for name, where in places.items():
        if _VERSIONED.search(_last(name)):
            findings.append(f"{where[0]}: {name} names a version; git keeps the old one")
    return findings


def check_tree(root: Path) -> list[str]:
    files = {}
    for folder in ("include", "src", "metal_sim/src"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cc", ".cu", ".cuh", ".metal", ".def"):
                files[path.relative_to(root).as_posix()] = path.read_text()
    seeds = (root / "tools" / "seed_names.txt").read_text()
    return check(files, seeds)


def self_test() -> list[str]:
    header = "class A {\n  int f() const;\n};\nint Gemm(int a,\n         int b);\n"
    header = header.replace("int f", "A(int a) { f_ = a; }\n  int f")
    good = {
        "include/marlin/a.h": header,
        "include/marlin/formats.def": "MARLIN_FORMAT(kU4, u4, U4)\n",
        "src/formats/u4.h": "struct U4 {\n  int f() { return 1; }\n};\n",
        "src/a.cc": "int Gemm(int a, int b) { return a; }\nint A::f() const { return 2; }\n",
    }
    seeds = "# a comment\nA cpp\nZ later\n"
    failures = [f"wrongly found: {finding}" for finding in check(good, seeds)]
    broken = {
        "twice": {**good, "src/b.cc": "struct A { int x; };\n"},
        "nowhere": {**good, "src/a.cc": ""},
        "codec twice": {**good, "src/b.cc": "struct U4 { int x; };\n"},
        "codec missing": {**good, "src/formats/u4.h": ""},
        "version": {**good, "src/b.cc": "int Gemm_v2() { return 1; }\n"},
    }
    failures += [f"not found: {name}" for name, files in broken.items() if not check(files, seeds)]
    if not check(good, "B cpp\n"):
        failures.append("not found: a seed name without a definition")
    return failures


if __name__ == "__main__":
    sys.exit(check_main.run(check_tree, self_test))
