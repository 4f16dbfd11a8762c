"""What a build does on a Mac, by a project that calls itself one: it finds or gets metal-cpp, says
why it leaves the device out, and goes on where Xcode's compiler refuses a kernel."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
import zipfile
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools")]

import get_metal_cpp  # noqa: E402

PROJECT = f"""\
    cmake_minimum_required(VERSION 3.22)
    project(mac LANGUAGES NONE)
    set(CMAKE_SYSTEM_NAME ${{SYSTEM}})
    set(CMAKE_CXX_COMPILER_ID AppleClang)
    set(MARLIN_GENERATED_DIR ${{CMAKE_BINARY_DIR}}/generated)
    include({ROOT}/cmake/MarlinMetalCpp.cmake)
    message(STATUS "why: ${{MARLIN_METAL_WHY}}")
    if(MARLIN_HAVE_METAL)
      marlin_metal_library(source ${{CMAKE_SOURCE_DIR}}/kernels)
      add_custom_target(library ALL DEPENDS ${{source}})
    endif()
"""
# The fetch's script is replaced; everything else is the real Python.
PYTHON = """\
    #!/bin/sh
    case "$*" in
      *get_metal_cpp.py*)
        [ "$FETCHES" = yes ] || { echo "no network" >&2; exit 1; }
        mkdir -p "$2/Metal" && : >"$2/Metal/Metal.hpp"
        ;;
      *) exec "REAL" "$@" ;;
    esac
"""
XCRUN = """\
    #!/bin/sh
    echo "$*" >>"$CALLS"
    for last; do :; done
    case "$*" in
      *halfs.metal*) echo "halfs.metal:1: error: unknown type name 'halfs'" >&2; exit 1 ;;
      *one.metal*) echo "one.metal:1: warning: unused" >&2; echo code >"$last" ;;
      *) echo code >"$last" ;;
    esac
"""


class MetalBuild(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "kernels").mkdir()
        (self.root / "tools").mkdir()
        (self.root / "kernels" / "one.metal").write_text("// one\n")
        (self.root / "CMakeLists.txt").write_text(textwrap.dedent(PROJECT))
        self.tool("python3", PYTHON.replace("REAL", sys.executable))

    def tool(self, name: str, text: str) -> pathlib.Path:
        path = self.root / "tools" / name
        path.write_text(textwrap.dedent(text))
        path.chmod(0o755)
        return path

    def run_cmake(self, *arguments: str, fetches: str = "yes") -> str:
        environment = {**os.environ, "FETCHES": fetches, "CALLS": str(self.root / "calls"),
                       "PATH": f"{self.root / 'tools'}:{os.environ['PATH']}"}
        environment.pop("MARLIN_METAL_CPP_DIR", None)
        done = subprocess.run(["cmake", *arguments], env=environment, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return f"{done.stdout}\nexit {done.returncode}"

    def configure(self, system: str = "Darwin", fetches: str = "yes", *options: str) -> str:
        return self.run_cmake(
            "-S", str(self.root), "-B", str(self.root / "build"), f"-DSYSTEM={system}",
            f"-DPython3_EXECUTABLE={self.root / 'tools' / 'python3'}", *options, fetches=fetches)

    def build(self) -> str:
        return self.run_cmake("--build", str(self.root / "build"))

    def library(self) -> str:
        return (self.root / "build/generated/metal/built_library.cc").read_text()

    def test_gets_metal_cpp(self) -> None:
        said = self.configure()
        self.assertIn("getting metal-cpp", said)
        self.assertIn(f"Metal: ON (metal-cpp in {self.root}/build/metal_cpp)", said)
        self.assertNotIn("getting", self.configure())

    def test_says_why_the_device_is_left_out(self) -> None:
        said = self.configure("Darwin", "no")
        self.assertIn("no network", said)
        self.assertIn("CMake Warning", said)
        self.assertIn("Metal: OFF (metal-cpp was not found", said)
        self.assertIn("leaves out the device", " ".join(said.split()))
        self.assertIn("why: metal-cpp was not found", said)
        self.assertIn("exit 0", said)
        # A second try that succeeds is not kept from it by the first.
        self.assertIn("Metal: ON", self.configure())

    def test_can_be_switched(self) -> None:
        said = self.configure("Darwin", "yes", "-DMARLIN_METAL_CPP_FETCH=OFF")
        self.assertNotIn("getting", said)
        self.assertIn("Metal: OFF", said)
        self.assertIn("exit 1", self.configure("Darwin", "no", "-DMARLIN_METAL=ON"))
        said = self.configure("Darwin", "yes", "-DMARLIN_METAL=OFF")
        self.assertIn("Metal: OFF (switched off)", said)
        self.assertNotIn("getting", said)

    def test_other_systems_get_nothing(self) -> None:
        said = self.configure("Linux")
        self.assertNotIn("getting", said)
        self.assertNotIn("Warning", said)
        self.assertIn("Metal: OFF (only for macOS)", said)

    def test_kernels_without_xcode(self) -> None:
        self.tool("xcrun", "#!/bin/sh\nexit 72\n")
        self.assertIn("no compiler for kernels", self.configure())
        self.assertIn("exit 0", self.build())
        self.assertIn("{\n\n0}", self.library())

    def test_kernels_with_xcode(self) -> None:
        self.tool("xcrun", XCRUN)
        self.configure()
        said = self.build()
        self.assertIn("warning: unused", said)
        self.assertIn("exit 0", said)
        self.assertIn("0x63,0x6f,0x64,0x65,0x0a", self.library())
        logs = list(self.root.glob("build/**/one.air.log"))
        self.assertIn("warning: unused", logs[0].read_text())

    def test_a_kernel_that_the_compiler_refuses(self) -> None:
        self.tool("xcrun", XCRUN)
        (self.root / "kernels" / "halfs.metal").write_text("halfs x;\n")
        self.configure()
        said = self.build()
        self.assertIn("unknown type name 'halfs'", said)
        self.assertIn("the compiler refuses halfs.metal", said)
        self.assertIn("exit 0", said)
        self.assertIn("{\n\n0}", self.library())


class GetMetalCpp(unittest.TestCase):
    def test_tries_the_python_under_an_isolated_one(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            log = pathlib.Path(folder) / "log"
            python = pathlib.Path(folder) / "python"
            # Like the environment in which pip builds: pip is there with -I alone.
            python.write_text(f'#!/bin/sh\necho "$*" >>{log}\n[ "$1" = -I ] || exit 1\n'
                              'while [ "$1" != -d ]; do shift; done\n'
                              f'cp {folder}/made.whl "$2/mlx_metal.whl"\n')
            python.chmod(0o755)
            with zipfile.ZipFile(f"{folder}/made.whl", "w") as wheel:
                wheel.writestr("mlx/include/metal_cpp/Metal/Metal.hpp", "// here\n")
                wheel.writestr("mlx/lib/libmlx.dylib", "no")
            with mock.patch.object(sys, "executable", str(python)), \
                    mock.patch.object(get_metal_cpp, "installed", return_value=None):
                self.assertEqual(get_metal_cpp.main([f"{folder}/headers"]), 0)
            self.assertEqual((pathlib.Path(folder) / "headers/Metal/Metal.hpp").read_text(),
                             "// here\n")
            self.assertIn("-I -m pip", log.read_text())


if __name__ == "__main__":
    if shutil.which("cmake") is None:
        print("skipped: no cmake")
        sys.exit(77)
    unittest.main()
