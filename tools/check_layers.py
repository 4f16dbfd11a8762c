#!/usr/bin/env python3
"""Checks the include rules between layers: the arrows of CONTRIBUTING.md, and that metal_sim/
includes nothing of the project.

Usage: check_layers.py [ROOT] | --self-test
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from pathlib import Path

import check_main

# The layers that a folder of src/ may include besides itself and the public headers.
MAY_INCLUDE: dict[str, tuple[str, ...]] = {
    "base": (),
    "formats": ("base",),
    "layout": ("formats", "base"),
    "quantize": ("layout", "formats", "base"),
    "reference": ("layout", "formats", "base"),
    "plan": ("layout", "formats", "base"),
    "backends/cpu": ("plan", "layout", "formats", "base"),
    "backends/cuda": ("plan", "layout", "formats", "base"),
    # The simulator of Metal kernels, a component next to the library: metal_sim/src/metal_sim/.
    "metal_sim": (),
    "backends/metal": ("metal_sim", "plan", "layout", "formats", "base"),
    "ops": ("backends/cpu", "backends/cuda", "backends/metal", "plan", "layout", "formats", "base"),
    "recipe": ("quantize", "layout", "formats", "base"),
    "checkpoint": ("recipe", "quantize", "layout", "formats", "base"),
    # plan: only the description of a decoder's step.
    "model": ("ops", "plan", "checkpoint", "recipe", "quantize", "layout", "formats", "base"),
    "engine": ("model", "ops", "plan", "checkpoint", "recipe", "quantize", "layout", "formats",
               "base"),
    "calibrate": ("engine", "model", "ops", "plan", "checkpoint", "recipe", "quantize", "layout",
                  "formats", "base"),
    "text": ("base",),
    "c": ("base",),
}
# The Python extension, python/src: of the command it runs the command line, nothing else.
PYTHON_MAY_INCLUDE = ("text", "model", "recipe", "checkpoint", "layout", "formats", "base",
                      "backends/metal", "backends/cuda/plan/kernel_table.h", "cli/command_line.h")
# Measuring reaches into the backends; the command stands on top of everything.
MAY_INCLUDE["bench"] = tuple(MAY_INCLUDE)
MAY_INCLUDE["cli"] = tuple(MAY_INCLUDE)



def read_host_only() -> re.Pattern[str]:
    """The parts of the CUDA backend that are built everywhere, and so include no CUDA header: the
    sources that CMake builds without CUDA, the headers next to them, and a few other headers."""
    cmake = Path(__file__).resolve().parents[1] / "cmake/MarlinLayers.cmake"
    found = re.search(r'^set\(MARLIN_CUDA_HOST_ONLY "([^"]+)"\)$', cmake.read_text(), re.MULTILINE)
    assert found, f"{cmake} sets no MARLIN_CUDA_HOST_ONLY"
    sources = found[1].replace("\\\\", "\\")
    headers = sources.replace(r"\.cc$", r"\.(?:h|def)$")
    others = r"/cuda/(?:.*_layout|measure/graph_timer|[^/]*)\.h$"
    return re.compile(f".*(?:{sources}|{headers}|{others})")


CUDA_HOST_ONLY = read_host_only()
CUDA_HEADERS = re.compile(r"cuda|cublas|cooperative_groups")

# The only standard headers of the C interface.
C_HEADERS = ("stddef.h", "stdint.h")

FRAMEWORKS = re.compile(r"^(?:torch|ATen|c10|mlx|Python\.h|pybind11|nanobind|numpy)\b")
# Libraries that the simulator may use in addition to the standard library and the system's headers.
SIMULATOR_LIBRARIES = re.compile(r"^(?:boost|fmt|gtest|gmock|sanitizer|sys)/")
# Sources that a test holds as text.
_RAW_STRING = re.compile(r'R"(\w*)\(.*?\)\1"', re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+([<"])([^>"]+)[>"]', re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*from \.(\w+) import", re.MULTILINE)
_FROM_PACKAGE = re.compile(r"^[ \t]*from \. import ([\w, ]+)", re.MULTILINE)
SOURCES = {".h", ".cc", ".cu", ".cuh", ".metal", ".mm"}


def layer_of(path: str) -> str | None:
    """Returns the layer of a path below src/: "base/status.cc" -> "base"."""
    parts = path.split("/")
    if len(parts) >= 3 and parts[0] == "backends":
        return "/".join(parts[:2])
    return parts[0] if len(parts) >= 2 else None


def check_public(path: str, text: str) -> list[str]:
    """Checks that a public header includes only public headers and the standard library."""
    findings = []
    for quote, name in _INCLUDE.findall(text):
        if quote == '"' and not name.startswith("marlin/"):
            findings.append(f'{path}: a public header includes "{name}"')
        elif name in C_HEADERS and path.endswith("_c.h"):
            continue
        elif quote == "<" and ("/" in name or name.endswith((".h", ".hpp"))):
            findings.append(f"{path}: a public header includes <{name}>, not a standard one")
    return findings


def check_source(path: str, text: str, exists: set[str]) -> list[str]:
    """`path` is relative to src/; `exists` holds the valid targets of quoted includes."""
    layer = layer_of(path)
    if layer not in MAY_INCLUDE:
        return [f"src/{path}: no layer {layer!r} is known to tools/check_layers.py"]
    findings = []
    codec = layer == "formats" and path.endswith(".h")
    host_only = CUDA_HOST_ONLY.match(path) is not None
    for quote, name in _INCLUDE.findall(text):
        if quote == "<":
            if layer.startswith("backends/") and FRAMEWORKS.match(name):
                findings.append(f"src/{path}: a backend includes the framework header <{name}>")
            if host_only and CUDA_HEADERS.match(name):
                findings.append(f"src/{path}: host-only code of the CUDA backend includes <{name}>")
            if codec and path != "formats/codec.h":
                findings.append(f"src/{path}: a codec header includes <{name}>, which devices lack")
            continue
        if name not in exists:
            findings.append(f'src/{path}: "{name}" is not a path below src/ or include/')
        elif host_only and name.startswith("backends/cuda/") and not CUDA_HOST_ONLY.match(name):
            findings.append(f'src/{path}: host-only code of the CUDA backend includes "{name}"')
        elif name.startswith("marlin/"):
            if codec:
                findings.append(f'src/{path}: a codec header includes "{name}", host code')
        else:
            target = layer_of(name)
            if target != layer and target not in MAY_INCLUDE[layer]:
                findings.append(f'src/{path}: {layer} may not include {target} ("{name}")')
    return findings


def check_python(path: str, text: str, exists: set[str], own: Collection[str]) -> list[str]:
    """`path` is relative to python/src/, whose files `own` holds."""
    findings = []
    for quote, name in _INCLUDE.findall(text):
        if quote == "<" or name in own or name.startswith("marlin/"):
            continue
        if name not in exists:
            findings.append(f'python/src/{path}: "{name}" is not a path below src/ or include/')
        elif name not in PYTHON_MAY_INCLUDE and layer_of(name) not in PYTHON_MAY_INCLUDE:
            findings.append(f'python/src/{path}: the Python extension may not include "{name}"')
    return findings


def find_circles(needs: dict[str, set[str]]) -> list[list[str]]:
    """The circles of a graph, one of each set of parts that need each other."""
    circles: list[list[str]] = []
    done: set[str] = set()

    def visit(part: str, trail: list[str]) -> None:
        if part in trail:
            circles.append([*trail[trail.index(part):], part])
        elif part not in done:
            for target in sorted(needs.get(part, set()) - {part}):
                visit(target, [*trail, part])
            done.add(part)

    for part in sorted(needs):
        visit(part, [])
    return circles


def python_circles(files: dict[str, str]) -> list[str]:
    """Circles of python/metal_marlin, imports within functions included, and of python/src, where
    a header and a source of one name are one part; `files` has their texts by path."""
    needs: dict[str, set[str]] = {}
    for path, text in files.items():
        part, suffix = path.rsplit(".", 1)
        folder = part.rsplit("/", 1)[0]
        if suffix == "py":
            names = set(_IMPORT.findall(text))
            names |= {name for names in _FROM_PACKAGE.findall(text)
                      for name in re.findall(r"\w+", names)}
        else:
            names = {name.rsplit(".", 1)[0] for quote, name in _INCLUDE.findall(text)}
        known = {f"{folder}/{name}" for name in names}
        needs.setdefault(part, set()).update(
            name for name in known if {f"{name}.py", f"{name}.h"} & files.keys())
    return [" -> ".join(circle) + ": need each other in a circle" for circle in find_circles(needs)]


def check_simulator(path: str, text: str, own: set[str]) -> list[str]:
    """`path` is relative to the root; `own` holds what quoted includes may name: the simulator's
    headers, and headers next to a test of it."""
    findings = []
    for quote, name in _INCLUDE.findall(_RAW_STRING.sub("", text)):
        if quote == '"' and name not in own:
            findings.append(f'{path}: metal_sim includes "{name}", which is not its own')
        elif quote == "<" and "/" in name and not SIMULATOR_LIBRARIES.match(name):
            findings.append(f"{path}: metal_sim includes <{name}>, a library that it does not use")
    return findings


def check_simulator_tree(root: Path) -> list[str]:
    folder = root / "metal_sim"
    files = [p for p in sorted(folder.rglob("*")) if p.suffix in SOURCES]
    own = {p.relative_to(folder / "src").as_posix() for p in (folder / "src").rglob("*")}
    own |= {p.name for p in (folder / "tests").glob("*.h")}
    findings = []
    for path in files:
        findings += check_simulator(path.relative_to(root).as_posix(), path.read_text(), own)
    return findings


def check_tree(root: Path) -> list[str]:
    source, public = root / "src", root / "include"
    files = [p for p in sorted(source.rglob("*")) if p.suffix in SOURCES]
    headers = [p for p in sorted(public.rglob("*")) if p.is_file()]
    exists = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()}
    exists |= {p.relative_to(public).as_posix() for p in headers}
    exists.add("formats/codecs.h")  # Generated from formats.def.
    simulator = root / "metal_sim/src"
    exists |= {p.relative_to(simulator).as_posix() for p in simulator.rglob("*.h")}
    findings = check_simulator_tree(root)
    for path in headers:
        findings += check_public(f"include/{path.relative_to(public).as_posix()}", path.read_text())
    python = root / "python/src"
    own = {p.relative_to(python).as_posix(): p.read_text()
           for p in sorted(python.rglob("*")) if p.suffix in SOURCES}
    for name, text in own.items():
        findings += check_python(name, text, exists, own.keys())
    modules = {p.relative_to(root).as_posix(): p.read_text()
               for p in sorted((root / "python/metal_marlin").glob("*.py"))}
    findings += python_circles(modules | {f"python/src/{name}": own[name] for name in own})
    for path in files:
        findings += check_source(path.relative_to(source).as_posix(), path.read_text(), exists)
    return findings


def python_self_test(exists: set[str]) -> list[str]:
    own = {"core.h", "core.cc", "weights.h"}
    exists = exists | {"cli/command_line.h", "text/a.h"}
    failures = [f"not found in the Python extension: {include}"
                for include in ('"cli/a.h"', '"backends/cuda/a.h"', '"ops/a.h"', '"absent.h"')
                if not check_python("b.cc", f"#include {include}", exists, own)]
    failures += [f"wrongly found in the Python extension: {include}"
                 for include in ('"cli/command_line.h"', '"core.h"', '"text/a.h"', "<vector>")
                 if check_python("b.cc", f"#include {include}", exists, own)]
    line = {"p/a.py": "from .b import x", "p/b.py": "from . import c", "p/c.py": "",
            "s/core.h": "", "s/core.cc": '#include "core.h"', "s/b.cc": '#include "core.h"'}
    if python_circles(line):
        failures.append("a circle found where there is none")
    lazy = {**line, "p/c.py": "def f():\n    from .a import x\n"}
    headers = {**line, "s/b.h": "", "s/core.cc": '#include "b.h"'}
    if not all(python_circles(files) for files in (lazy, headers)):
        failures.append("a circle not found")
    return failures


def self_test() -> list[str]:
    exists = {"base/a.h", "ops/a.h", "plan/a.h", "backends/cpu/a.h", "backends/cuda/a.h",
              "backends/cuda/runtime/a.h", "backends/cuda/gemm/toy/toy_plan.h",
              "formats/codec.h", "marlin/status.h", "reference/a.h", "bench/a.h", "cli/a.h",
              "metal_sim/a.h"}
    must_find = [
        ("base/b.cc", '#include "plan/a.h"'),
        ("plan/b.cc", '#include "backends/cpu/a.h"'),
        ("backends/cpu/b.cc", '#include "ops/a.h"'),
        ("backends/cpu/b.cc", '#include "backends/cuda/a.h"'),
        ("backends/cpu/b.cc", "#include <torch/torch.h>"),
        ("reference/b.cc", '  #  include "plan/a.h"'),
        ("ops/b.cc", '#include "reference/a.h"'),
        ("checkpoint/b.cc", '#include "ops/a.h"'),
        ("base/b.cc", '#include "a.h"'),
        ("formats/u4.h", '#include "marlin/status.h"'),
        ("formats/u4.h", "#include <vector>"),
        ("gadgets/b.cc", ""),
        ("bench/b.cc", '#include "cli/a.h"'),
        ("model/b.cc", '#include "bench/a.h"'),
        ("backends/cpu/b.cc", '#include "metal_sim/a.h"'),
        ("ops/b.cc", '#include "metal_sim/a.h"'),
        ("backends/cuda/plan/b.cc", "#include <cuda_runtime_api.h>"),
        ("backends/cuda/gemm/toy/toy_plan.cc", '#include "backends/cuda/runtime/a.h"'),
        ("backends/cuda/without_cuda.cc", "#include <cuda.h>"),
    ]
    must_pass = [
        ("base/b.cc", '#include "base/a.h"\n#include <vector>\n#include "marlin/status.h"'),
        ("ops/b.cc", '#include "backends/cpu/a.h"'),
        ("cli/b.cc", '#include "ops/a.h"'),
        ("cli/b.cc", '#include "bench/a.h"'),
        ("bench/b.cc", '#include "backends/cuda/runtime/a.h"'),
        ("backends/metal/b.cc", '#include "metal_sim/a.h"'),
        ("cli/b.cc", '#include "metal_sim/a.h"'),
        ("formats/u4.h", '#include "formats/codec.h"'),
        ("base/c.cc", '// #include "ops/a.h"'),
        ("backends/cuda/gemm/toy/toy_launch.cc", '#include "backends/cuda/runtime/a.h"'),
        ("backends/cuda/cuda_backend.cc", "#include <cuda_runtime_api.h>"),
        ("backends/cuda/plan/b.cc", '#include "backends/cuda/gemm/toy/toy_plan.h"'),
    ]
    failures = [f"not found: {case}" for case in must_find if not check_source(*case, exists)]
    failures += [f"wrongly found: {case}" for case in must_pass if check_source(*case, exists)]
    failures += python_self_test(exists)
    own = {"metal_sim/a.h", "fixture.h"}
    for include in ('"base/a.h"', '"marlin/status.h"', '"a.h"', "<marlin/status.h>",
                    "<nlohmann/json.hpp>"):
        if not check_simulator("metal_sim/src/metal_sim/b.cc", f"#include {include}", own):
            failures.append(f"not found in the simulator: {include}")
    allowed = ('"metal_sim/a.h"', '"fixture.h"', "<vector>", "<sys/mman.h>", "<fmt/format.h>",
               "<boost/context/detail/fcontext.hpp>")
    for include in allowed:
        if check_simulator("metal_sim/src/metal_sim/b.cc", f"#include {include}", own):
            failures.append(f"wrongly found in the simulator: {include}")
    for include in ('"base/a.h"', "<fmt/core.h>", "<sys/mman.h>", "<unistd.h>"):
        if not check_public("include/marlin/a.h", f"#include {include}"):
            failures.append(f"not found in a public header: {include}")
    if check_public("include/marlin/a.h", '#include "marlin/status.h"\n#include <vector>'):
        failures.append("wrongly found in a public header")
    return failures


if __name__ == "__main__":
    sys.exit(check_main.run(check_tree, self_test))
