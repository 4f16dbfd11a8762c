#!/usr/bin/env python3
"""Checks what headers cost the sources that include them: which libraries they bring along, and how
many lines the compiler reads.

Usage: check_headers.py [--list] [ROOT [BUILD]] | --self-test
BUILD (default: ROOT/build) is a configured build folder: its compile commands name the compiler and
the include folders. --list prints the lines of every header, the largest last.

The lines of a header are the lines of the project's files that it includes and of the library's
files that these include, each counted once, without blank lines, comments and directives. Only the
library's headers are preprocessed, each alone, which takes a tenth of the time of preprocessing all
headers and gives the same numbers to within a few lines in a hundred.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import check_main

FOLDERS = ("include", "src", "metal_sim/src", "python/src")
# What quoted includes are relative to, besides the folder of the file.
SEARCHED = ("src", "include", "metal_sim/src", "python/src")

# The standard headers that most headers of the project reach.
EVERYDAY = ("atomic", "cmath", "cstdint", "functional", "map", "memory", "mutex", "optional",
            "span", "string", "string_view", "thread", "unordered_map", "variant", "vector")
# A header may have this many times their lines: a number of lines would be one for each standard
# library.
LIMIT = 1.2

# Sources include these themselves. <nlohmann/json_fwd.hpp> declares what headers need.
FORBIDDEN = re.compile(r"(?:fmt|nlohmann|CLI|Eigen|unsupported/Eigen)/(?!json_fwd\.hpp$)"
                       r"|(?:condition_variable|fstream|future|iomanip|iostream|random|ranges|regex"
                       r"|coroutine|execution|syncstream)$")
# Reasons why a header is not checked. No other header includes it.
EXCEPTIONS = {
    "src/base/eigen_cholesky.inl.h": "the body of a source, which each instruction set compiles",
}
# Headers that reach these are for one device, instruction set or interpreter: few sources include
# them, and the host's compiler may not have them.
DEVICES = re.compile(r"(?:cuda|cublas|cooperative_groups|mma\.h|metal_|Metal/|Foundation/|mlx/"
                     r"|nanobind/|arm_neon\.h|immintrin\.h)")
# Their headers are the kernels' language and its emulation.
NOT_HOST = re.compile(r"src/backends/metal/kernels|metal_sim/src/metal_sim/shim/")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE = re.compile(r"[ \t]*#[ \t]*(\w+)[ \t]*(.*)")
_TARGET = re.compile(r'([<"])([^>"]+)[>"]')
_MARKER = re.compile(r'# \d+ "([^"]+)"')

# The lines of each file that an include of the library brings along; None: there is no such header.
Library = Callable[[str], "Mapping[str, int] | None"]


class Header:
    """A file of the project, by what the host's compiler reads of it without further options: of a
    condition, which asks for a device or a sanitizer, the other branch."""

    def __init__(self, text: str) -> None:
        self.lines = 0
        self.quoted: list[str] = []
        self.library: list[str] = []
        read = [True]
        for line in _COMMENT.sub("", text).splitlines():
            directive = _DIRECTIVE.match(line)
            if directive is None:
                self.lines += all(read) and line.strip() != ""
                continue
            word, rest = directive.groups()
            if word in ("if", "ifdef", "ifndef"):
                read.append(word == "ifndef" or rest.strip() == "__cplusplus")
            elif word in ("else", "elif", "endif"):
                last = read.pop()
                if word != "endif":
                    read.append(word == "else" and not last)
            elif word == "include" and (target := _TARGET.match(rest)) and all(read):
                (self.quoted if target[1] == '"' else self.library).append(target[2])


class Tree:
    """The headers below `files`, by path from the root."""

    def __init__(self, files: Mapping[str, str], searched: Iterable[str], library: Library) -> None:
        self._headers = {path: Header(text) for path, text in files.items()}
        self._searched = tuple(searched)
        self._library = library
        self.findings: list[str] = []
        self.everyday = self._library_lines(EVERYDAY)
        self.lines: dict[str, int] = {}
        for path in files:
            if path.endswith(".h") and path not in EXCEPTIONS and not NOT_HOST.match(path):
                self._check(path)

    def _library_lines(self, names: Iterable[str]) -> int:
        files: dict[str, int] = {}
        for name in names:
            for file, lines in (self._library(name) or {}).items():
                files[file] = max(lines, files.get(file, 0))
        return sum(files.values())

    def _resolve(self, path: str, name: str) -> str | None:
        for folder in (path.rpartition("/")[0], *self._searched):
            if f"{folder}/{name}" in self._headers:
                return f"{folder}/{name}"
        return None

    def _check(self, path: str) -> None:
        reached: dict[str, str] = {path: ""}  # Each file with the one that includes it.
        library: dict[str, str] = {}
        queue = [path]
        while queue:
            file = queue.pop()
            for name in self._headers[file].quoted:
                found = self._resolve(file, name)
                if found is None:
                    self.findings.append(f'{file}: "{name}" is not found')
                elif found not in reached:
                    reached[found] = file
                    queue.append(found)
            for name in self._headers[file].library:
                library.setdefault(name, file)
        for name, file in library.items():
            if FORBIDDEN.match(name):
                way = "" if file == path else f", which {file} includes"
                self.findings.append(f"{path}: brings <{name}> along{way}")
        self.findings += [f"{path}: includes {file}, {EXCEPTIONS[file]}"
                          for file in reached if file in EXCEPTIONS]
        if any(DEVICES.match(name) for name in library):
            return
        self.findings += [f"{path}: <{name}> is not found" for name in library
                          if not FORBIDDEN.match(name) and self._library(name) is None]
        lines = sum(self._headers[file].lines for file in reached) + self._library_lines(library)
        self.lines[path] = lines
        if lines > LIMIT * self.everyday:
            self.findings.append(f"{path}: {lines} lines with all that it includes, limit "
                                 f"{int(LIMIT * self.everyday)}")


def compiler_of(build: Path) -> list[str]:
    """The compiler of src/ with all include folders."""
    with open(build / "compile_commands.json", encoding="utf-8") as file:
        commands = [(entry["directory"], shlex.split(entry["command"])) for entry in json.load(file)
                    if entry["file"].endswith((".cc", ".cxx"))]
    launchers = ("ccache", "sccache")
    compiler = next(word for word in commands[0][1] if Path(word).name not in launchers)
    folders: dict[str, str] = {}
    for directory, words in commands:
        for index, word in enumerate(words):
            if word.startswith("-I"):
                folders.setdefault(os.path.join(directory, word[2:]), "-I")
            elif word == "-isystem":
                folders.setdefault(os.path.join(directory, words[index + 1]), "-isystem")
    return [compiler, "-std=c++20", *(f"{option}{folder}" for folder, option in folders.items())]


def preprocess(compiler: list[str], name: str) -> dict[str, int] | None:
    """The lines of every file that <name> includes."""
    run = subprocess.run([*compiler, "-E", "-x", "c++", "-"], input=f"#include <{name}>\n",
                         capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return None
    lines: dict[str, int] = {}
    file = ""
    for line in run.stdout.splitlines():
        if marker := _MARKER.match(line):
            file = marker[1]
        elif line and not line.startswith("#") and not line.isspace():
            lines[file] = lines.get(file, 0) + 1
    return lines


def read_tree(root: Path, build: Path) -> Tree:
    files = {path.relative_to(root).as_posix(): path.read_text() for folder in FOLDERS
             for path in sorted((root / folder).rglob("*"))
             if path.suffix in (".h", ".def", ".inc", ".cuh")}
    files |= {f"generated/{path.relative_to(build / 'generated').as_posix()}": path.read_text()
              for path in sorted((build / "generated").rglob("*.h"))}
    names = {name for text in files.values() for name in Header(text).library} | {*EVERYDAY}
    names = {name for name in names if not DEVICES.match(name) and not FORBIDDEN.match(name)}
    compiler = compiler_of(build)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        library = dict(pool.map(lambda name: (name, preprocess(compiler, name)), names))
    return Tree(files, (*SEARCHED, "generated"), lambda name: library.get(name, {}))


def self_test() -> list[str]:
    """Checks headers that must be found, and some that must not."""
    library = {name: {f"/{name}": 100} for name in EVERYDAY}
    library |= {"sstream": {"/sstream": 1, "/string": 100}, "boost/a.hpp": {"/a.hpp": 1000}}

    def tree(files: dict[str, str]) -> Tree:
        return Tree(files, (*SEARCHED, "generated"), library.get)

    everyday = "".join(f"#include <{name}>\n" for name in EVERYDAY)
    limit = int(LIMIT * 100 * len(EVERYDAY))
    rest = limit - 100 * len(EVERYDAY)
    must_find = [
        {"src/base/a.h": "#include <fmt/core.h>"},
        {"include/marlin/a.h": "#  include <nlohmann/json.hpp>  // Parses."},
        {"src/cli/a.h": "#include <CLI/CLI.hpp>"},
        {"src/base/a.h": "#include <Eigen/Core>"},
        {"src/base/a.h": "#include <regex>"},
        {"src/base/a.h": "#ifndef A_H_\n#define A_H_\n#include <regex>\n#endif"},
        {"src/base/a.h": "#if __CUDACC__\n#else\n#include <regex>\n#endif"},
        {"src/base/a.h": "#include <unknown.h>"},
        {"src/base/a.h": '#include "base/b.h"'},
        {"src/base/a.h": '#include "base/eigen_cholesky.inl.h"',
         "src/base/eigen_cholesky.inl.h": "#include <Eigen/Core>"},
        {"src/base/a.h": everyday + "#include <boost/a.hpp>\n"},
        {"src/base/a.h": everyday + "int a;\n" * (rest + 1)},
        {"src/base/a.h": '#include "b.def"', "src/base/b.def": "A(1)\n" * (limit + 1)},
    ]
    must_pass = [
        {"src/base/a.h": "#include <nlohmann/json_fwd.hpp>\n#include <string>",
         "src/base/eigen_cholesky.inl.h": "#include <Eigen/Core>"},
        {"src/base/a.h": '#include "formats/b.h"', "generated/formats/b.h": "#include <vector>"},
        {"src/base/a.h": "// #include <regex>\n/*\n#include <regex>\n*/"},
        {"src/base/a.h": "#if __CUDACC__\n#include <unknown.h>\n#endif"},
        {"src/backends/cuda/a.h": "#include <cuda_runtime_api.h>" + "\nint a;" * 9999},
        {"src/backends/metal/kernels/a.h": "#include <metal_stdlib>\n#include <regex>"},
        {"src/base/a.h": everyday + "#include <sstream>\n" + "// a\n" * limit},
        {"src/base/a.h": everyday + "int a;\n" * rest},
    ]
    library["nlohmann/json_fwd.hpp"] = {"/string": 100}
    failures = [f"not found: {files}" for files in must_find if not tree(files).findings]
    for files in must_pass:
        failures += [f"wrongly found: {finding}" for finding in tree(files).findings]
    indirect = tree({"src/base/a.h": '#include "base/b.h"', "src/base/b.h": '#include "base/c.h"',
                     "src/base/c.h": "#include <fmt/core.h>"}).findings
    expected = "src/base/a.h: brings <fmt/core.h> along, which src/base/c.h includes"
    if len(indirect) != 3 or expected not in indirect:
        failures.append(f"of an indirect include: {indirect}")
    shared = tree({"src/base/a.h": '#include <sstream>\n#include "base/b.h"\nint a;',
                   "src/base/b.h": "#include <string>\nint b;"}).lines
    if shared != {"src/base/a.h": 103, "src/base/b.h": 101}:
        failures.append(f"lines: {shared}")
    return failures


def main() -> int:
    arguments = sys.argv[1:]
    if arguments == ["--self-test"]:
        return check_main.report(self_test())
    listed = "--list" in arguments
    places = [argument for argument in arguments if argument != "--list"] or ["."]
    root = Path(places[0])
    tree = read_tree(root, Path(places[1]) if len(places) > 1 else root / "build")
    if listed:
        for path, lines in sorted(tree.lines.items(), key=lambda item: item[1]):
            print(f"{lines:7} {path}")
        print(f"{tree.everyday:7} the standard headers that most headers reach")
    return check_main.report(tree.findings)


if __name__ == "__main__":
    sys.exit(main())
