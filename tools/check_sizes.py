#!/usr/bin/env python3
"""Checks the size limits of CONTRIBUTING.md for files, functions and folders of src.

Usage: check_sizes.py [ROOT] | --self-test
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import check_main
import check_paths
import cpp_source

FOLDER_FILES = 40
FILE_LINES = 800
PUBLIC_HEADER_LINES = 400
HOST_FUNCTION_LINES = 80
DEVICE_FUNCTION_LINES = 150
NESTING = 4
PARAMETERS = 8
COLUMNS = 100

CPP = {".h", ".cc", ".cu", ".cuh", ".metal"}
FOLDERS = ("include", "src", "metal_sim", "tests", "bench", "tools", "examples", "python")


def check_text(path: str, text: str) -> list[str]:
    """Returns the findings of one file."""
    findings = []
    lines = text.splitlines()
    limit = PUBLIC_HEADER_LINES if path.startswith("include/") else FILE_LINES
    if len(lines) > limit:
        findings.append(f"{path}: {len(lines)} lines, limit {limit}")
    for number, line in enumerate(lines, 1):
        if len(line) > COLUMNS and not path.endswith(".def"):
            findings.append(f"{path}:{number}: {len(line)} columns, limit {COLUMNS}")
    if Path(path).suffix not in CPP:
        return findings
    for function in cpp_source.definitions(text):
        if function.kind != "function":
            continue
        where = f"{path}:{function.first_line}: {function.name}"
        limit = DEVICE_FUNCTION_LINES if function.device else HOST_FUNCTION_LINES
        if function.lines > limit:
            findings.append(f"{where}: {function.lines} lines, limit {limit}")
        if function.nesting > NESTING:
            findings.append(f"{where}: nested {function.nesting} deep, limit {NESTING}")
        if function.parameters > PARAMETERS:
            findings.append(f"{where}: {function.parameters} parameters, limit {PARAMETERS}")
    return findings


def check_folders(paths: Iterable[str]) -> list[str]:
    """Returns a finding for every folder of src with too many files; `paths` are all files."""
    counts = Counter(path.rpartition("/")[0] for path in paths if path.startswith("src/"))
    return [f"{folder}: {count} files, limit {FOLDER_FILES}"
            for folder, count in sorted(counts.items()) if count > FOLDER_FILES]


def check_tree(root: Path) -> list[str]:
    files = [path for path in check_paths.project_files(root) if path.is_file()]
    findings = check_folders(path.relative_to(root).as_posix() for path in files)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in CPP | {".py", ".def", ".sh"} and path.is_file():
                findings += check_text(str(path.relative_to(root)), path.read_text())
    return findings


def self_test() -> list[str]:
    """Checks inputs that must be found, and one that must not."""

    def function(body_lines: int, signature: str = "int F(int a)") -> str:
        return f"namespace a {{\n{signature} {{\n" + "  a += 1;\n" * body_lines + "}\n}\n"

    nested = "void F() {" + "if (a) {" * 5 + "}" * 5 + "}\n"
    loops = "void F() {\n  for (int i = 0; i < 3; ++i) {\n" + "    G([&] { H(); });\n" * 80 + "}}\n"
    many = ", ".join(f"std::map<int, int> a{i}" for i in range(9))
    bound = ",\n".join(f"device int* a{i} [[buffer({i})]]" for i in range(9))
    method = "struct S {\n  void M() const {\n" + "    x();\n" * 80 + "  }\n};\n"
    constructor = "S::S(int a) : a_(a), b_{a} {\n" + "  x();\n" * 80 + "}\n"
    must_find = {
        "file": ("src/a.cc", "\n" * 801),
        "header": ("include/marlin/a.h", "\n" * 401),
        "columns": ("src/a.cc", "x" * 101),
        "function": ("src/a.cc", function(79)),
        "template": ("src/a.cc", function(79, "template <typename T>\nauto F(T a) -> T")),
        "operator": ("src/a.cc", function(79, "int operator()(int a)")),
        "method": ("src/a.h", method),
        "constructor": ("src/a.cc", constructor),
        "loop": ("src/a.cc", loops),
        "nesting": ("src/a.cc", nested),
        "parameters": ("src/a.cc", f"void F({many}) {{}}\n"),
        "device": ("src/a.cu", function(149, "__global__ void F(int a)")),
    }
    must_pass = {
        "short": ("src/a.cc", function(78)),
        "comment": ("src/a.cc", "// void F() {\n" + "// x\n" * 90),
        "device": ("src/a.cu", function(100, "__global__ void F(int a)")),
        "kernel": ("src/a.metal", f"[[kernel]] void F({bound}) {{\n" + "  x();\n" * 90 + "}\n"),
        "table": ("src/a.cc", "constexpr int kTable[] = {\n" + "  1,\n" * 90 + "};\n"),
        "class": ("src/a.h", "class A {\n public:\n" + "  int f() { return 1; }\n" * 90 + "};\n"),
        "else": ("src/a.cc", "void F() {" + "if (a) {}\nelse " * 9 + "{}}\n"),
    }
    failures = [f"not found: {name}" for name, case in must_find.items() if not check_text(*case)]
    for name, case in must_pass.items():
        failures += [f"found in {name}: {finding}" for finding in check_text(*case)]
    full = [f"src/a/{i}.cc" for i in range(FOLDER_FILES)]
    elsewhere = ["src/a/b/x.cc", *(f"tests/a/{i}.cc" for i in range(FOLDER_FILES + 1))]
    if check_folders([*full, "src/a/x.cc"]) != [f"src/a: 41 files, limit {FOLDER_FILES}"]:
        failures.append("not found: folder")
    return failures + [f"found in folders: {x}" for x in check_folders([*full, *elsewhere])]


if __name__ == "__main__":
    sys.exit(check_main.run(check_tree, self_test))
