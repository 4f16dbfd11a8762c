#!/usr/bin/env python3
"""Checks the size limits of CONTRIBUTING.md for files, functions, classes and folders of src.

Usage: check_sizes.py [ROOT] | --self-test
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import check_main
import check_paths
import cpp_source

FOLDER_FILES = 40
FILE_LINES = 800
PUBLIC_HEADER_LINES = 400
FUNCTION_LINES = 60
FUNCTION_LINES_OUTSIDE = 80  # In tests, bindings and the simulator.
CLASS_LINES = 300
NESTING = 4
PARAMETERS = 8
COLUMNS = 100

CPP = {".h", ".cc", ".cu", ".cuh", ".metal"}
FOLDERS = ("include", "src", "metal_sim", "tests", "bench", "tools", "examples", "python")

# The longer functions (by file) and classes (by folder), with their own limits.
EXCEPTIONS = {
    # A kernel's state is in registers from its first line to its last: a function for a part of it
    # would take and return all of that state.
    ("src/backends/cuda/attention/latent/expand_latents.cu", "ExpandLatentsKernel"): 90,
    ("src/backends/cuda/gemm/gemv/gemv_kernel.cuh", "GemvKernel"): 132,
    ("src/backends/cuda/gemm/gemv/gemv_kernel.cuh", "Run"): 70,
    ("src/backends/cuda/gemm/gemv/sparse_product.cuh", "Run"): 70,
    ("src/backends/cuda/moe/experts/experts_gemv.cuh", "ExpertGemvKernel"): 110,
    # Device classes whose members are those registers: their functions are the steps of one kernel.
    ("src/backends/cuda/attention/latent", "TileSoftmax"): 330,
    ("src/backends/cuda/persistent", "PersistentBlock"): 450,
    ("src/backends/cuda/persistent", "TokenAttention"): 430,
    ("src/backends/cuda/sampling", "RowSampler"): 330,
}


def function_limit(path: str, name: str) -> int:
    usual = FUNCTION_LINES if path.startswith("src/") else FUNCTION_LINES_OUTSIDE
    return EXCEPTIONS.get((path, name), usual)


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
        limit = function_limit(path, function.name)
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


def check_classes(texts: Mapping[str, str],
                  exceptions: Mapping[tuple[str, str], int] = EXCEPTIONS) -> list[str]:
    """Returns a finding for every class that is too long, and for every exception that no function
    or class needs; `texts` are all C++ files of src, by path."""
    found = {path: cpp_source.definitions(text) for path, text in texts.items()}
    long = {key: lines for key, lines in cpp_source.class_lines(found).items()
            if lines > CLASS_LINES}
    needed = {*long, *((path, row.name) for path, those in found.items() for row in those
                       if row.kind == "function" and row.lines > FUNCTION_LINES)}
    findings = []
    for (folder, name), lines in sorted(long.items()):
        limit = exceptions.get((folder, name), CLASS_LINES)
        if lines > limit:
            findings.append(f"{folder}: {name}: {lines} lines, limit {limit}")
    return findings + [f"{where}: {name}: is within the limits and needs no exception"
                       for where, name in exceptions if (where, name) not in needed]


def check_tree(root: Path) -> list[str]:
    files = [path for path in check_paths.project_files(root) if path.is_file()]
    findings = check_folders(path.relative_to(root).as_posix() for path in files)
    findings += check_classes({path.relative_to(root).as_posix(): path.read_text()
                               for path in sorted((root / "src").rglob("*"))
                               if path.suffix in CPP and path.is_file()})
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
        "function": ("src/a.cc", function(59)),
        "elsewhere": ("tests/a.cc", function(79)),
        "template": ("src/a.cc", function(59, "template <typename T>\nauto F(T a) -> T")),
        "operator": ("src/a.cc", function(59, "int operator()(int a)")),
        "method": ("src/a.h", method),
        "constructor": ("src/a.cc", constructor),
        "loop": ("src/a.cc", loops),
        "nesting": ("src/a.cc", nested),
        "parameters": ("src/a.cc", f"void F({many}) {{}}\n"),
        "device": ("src/a.cu", function(59, "__global__ void F(int a)")),
        "exception": ("src/backends/cuda/gemm/gemv/gemv_kernel.cuh",
                      function(199, "__global__ void GemvKernel(int a)")),
    }
    must_pass = {
        "short": ("src/a.cc", function(58)),
        "elsewhere": ("tests/a.cc", function(78)),
        "comment": ("src/a.cc", "// void F() {\n" + "// x\n" * 90),
        "exception": ("src/backends/cuda/gemm/gemv/gemv_kernel.cuh",
                      function(100, "__global__ void GemvKernel(int a)")),
        "kernel": ("src/a.metal", f"[[kernel]] void F({bound}) {{\n" + "  x();\n" * 40 + "}\n"),
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
    classes = {"src/a/x.h": "class A {\n" + "  int a;\n" * 200 + "};\n",
               "src/a/x.cc": "void A::F() {\n" + "  x();\n" * 57 + "}\n",
               "src/a/y.cc": "void A::G() {\n" + "  x();\n" * 37 + "}\n",
               "src/b/y.cc": "void A::H() {\n" + "  x();\n" * 57 + "}\n"}
    longer = {**classes, "src/a/z.cc": "A::A() {}\n"}
    if check_classes(longer, {}) != ["src/a: A: 301 lines, limit 300"]:
        failures.append("not found: class")
    if check_classes(classes, {("src/a", "A"): 310}) != [
            "src/a: A: is within the limits and needs no exception"]:
        failures.append("not found: exception without need")
    elsewhere_found = check_classes(classes, {}) + check_classes(longer, {("src/a", "A"): 310})
    failures += [f"found in classes: {x}" for x in elsewhere_found]
    return failures + [f"found in folders: {x}" for x in check_folders([*full, *elsewhere])]


if __name__ == "__main__":
    sys.exit(check_main.run(check_tree, self_test))
