"""./dev on a Mac's tools: stand-ins for sed, grep, find and others refuse what only GNU's take, and
nothing else is in PATH. Programs that build, install and test are stand-ins, too, so that only the
shell's part runs. Scripts must be bash 3.2's, which macOS has."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Real programs without options that differ, and programs whose options the stand-ins check.
PLAIN = ("bash", "sh", "cat", "mkdir", "rm", "tr", "cut", "dirname", "basename", "sleep", "tee",
         "id", "chmod", "mv", "ls", "env", "wc", "uniq", "printf", "true", "false")
CHECKED = ("sed", "grep", "awk", "find", "xargs", "sort", "head", "tail", "date", "mktemp", "stat",
           "readlink", "touch", "cp", "ln", "du")
# Options that BSD's tools lack, as a pattern of one argument, by tool. Of all: any long option.
REFUSED = {
    "sed": r"-[a-zA-Z]*[rsz]|-i",
    "grep": r"-[a-zA-Z]*[PTzZ]",
    "find": r"-(printf|regextype|executable|readable|writable|quit|delete-all)",
    "xargs": r"-[rda].*",
    "date": r"-d.*|-I.+|\+.*%(N|-|_|\^|P|:).*",
    "mktemp": r"-p|-t",
    "stat": r"-c.*",
    "readlink": r"-[em]",
    "head": r"-n-.*|-\d*[a-z]*q",
    "tail": r"-\d*[a-z]*[qz]",
    "touch": r"-d",
    "cp": r"-[a-zA-Z]*[tuT].*",
    "ln": r"-[a-zA-Z]*[rtT].*",
    "du": r"-[a-zA-Z]*b.*",
    "sort": r"-[a-zA-Z]*[hRVz]",
    "awk": r"-(e|i|l).*",
}
# Scripts that GNU's sed accepts and BSD's reads differently.
SED_SCRIPT = r"\\[bBwWsS<>`'+?|t]|[;{]\s*[tbT]\s*;|\}[^;\n}]*\}|/I[;p}]|[0-9]~[0-9]"
AWK_SCRIPT = r"\\[yBwWsS<>]|\b(gensub|strftime|systime|asort|PROCINFO|BEGINFILE)\b"
CHECK = """\
    import os, re, sys
    arguments = sys.argv[1:]
    def refuse(what):
        sys.stderr.write(f"NAME: illegal option or script: {what}\\n")
        with open("REFUSALS", "a") as log:
            log.write(f"NAME {what}\\n")
        sys.exit(2)
    for argument in arguments:
        if argument == "--":
            break
        if re.fullmatch(r"--[a-z].*", argument) or re.fullmatch(r'''REFUSED''', argument):
            refuse(argument)
    if "NAME" in ("sed", "awk"):
        for argument in arguments:
            if re.search(r'''SCRIPT''', argument):
                refuse(argument)
    os.execv("REAL", ["NAME", *arguments])
"""
BASH_4 = re.compile(
    r"\b(mapfile|readarray|coproc)\b|\b(declare|local|typeset)\s+-[a-zA-Z]*[Anglu]\b|&>>|\|&|"
    r"\$\{[A-Za-z_]\w*(\^|,)[\^,}]*|\bwait\s+-n\b|\$EPOCH|\$\{[A-Za-z_]\w*@[A-Za-z]\}|"
    r"\bprintf\s+'%\([^)]*\)T|\[\[?\s+-v\s|\bshopt\s+-s\s+(globstar|lastpipe)|;;&|;&")
# Programs that macOS lacks.
ABSENT = re.compile(r"(?:^|[|;&(]|\$\()\s*(timeout|tac|shuf|sha256sum|md5sum|setsid|flock|numfmt|"
                    r"realpath|free|ldd|lscpu|gsed)\b", re.MULTILINE)
# Scripts that only Linux runs: `./dev ci` and `nightly` say so.
LINUX_ONLY = ("tools/ci.sh", "tools/nightly.sh", "tools/sanitize.sh", "tools/sanitize_python.sh",
              "tools/fuzz.sh", "tests/acid/", "tests/conformance/compute_sanitizer.sh", ".ci/run")

PYTHON = """\
    #!/bin/sh
    echo "python $*" >>"$CALLS"
    case "$*" in
      "-m venv "*)
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        chmod +x "$3/bin/python"
        printf '#!/bin/sh\\necho "metal-marlin $*"\\n' >"$3/bin/metal-marlin"
        chmod +x "$3/bin/metal-marlin"
        ;;
      "-") cat >/dev/null ;;
      *get_metal_cpp.py*) mkdir -p build/metal_cpp/Metal && : >build/metal_cpp/Metal/Metal.hpp ;;
      *"tools/extras.py"*) echo "fastapi rich" ;;
      *"pip config list"*) echo "global.index-url='https://example.org/simple'" ;;
      *" wheel "*)
        while [ "$1" != --wheel-dir ]; do shift; done
        mkdir -p "$2" && : >"$2/metal_marlin.whl"
        ;;
      *"-m pytest"*) printf '%s\\n' "$PYTEST_LINE" ;;
      *metal_record.py*) echo "recorded" ;;
    esac
"""
CMAKE = """\
    #!/bin/sh
    echo "cmake $*" >>"$CALLS"
    case "$*" in
      *"--build "*) mkdir -p build/bin && : >build/bin/metal-marlin ;;
      *"-B "*)
        while [ "$1" != -B ]; do shift; done
        mkdir -p "$2" && echo "MARLIN_BUILD_TESTS:BOOL=OFF" >"$2/CMakeCache.txt"
        ;;
    esac
"""
CTEST = """\
    #!/bin/sh
    echo "ctest $*" >>"$CALLS"
    while [ "$1" != --output-junit ]; do shift; done
    cat >"$2" <<XML
    <testsuite name="x"
       tests="5" failures="0" disabled="1" skipped="1">
    <testcase name="a" classname="a" time="0.25" status="run">
    </testcase>
    <testcase name="b" classname="b" time="1.5" status="notrun">
    <system-out>
    skipped: no such thing
    </system-out>
    </testcase>
    </testsuite>
    XML
"""
BREW = """\
    #!/bin/sh
    echo "brew $*" >>"$CALLS"
    [ "$1" != list ] || printf 'cmake\\nninja\\nccache\\nfmt\\npython@3.13\\nopenblas\\n'
"""
UNAME = """\
    #!/bin/sh
    case $1 in -m) echo arm64 ;; *) echo Darwin ;; esac
"""
SYSCTL = """\
    #!/bin/sh
    [ "$*" != "-n hw.ncpu" ] || echo 10
"""
OK = "#!/bin/sh\nexit 0\n"


class BsdTools(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name) / "checkout"
        self.tools = pathlib.Path(folder.name) / "tools"
        self.tools.mkdir()
        self.root.mkdir()
        for name in PLAIN:
            if found := shutil.which(name):
                (self.tools / name).symlink_to(found)
        for name in CHECKED:
            self.make_checked(name)
        for name, text in (("python3", PYTHON), ("cmake", CMAKE), ("ctest", CTEST), ("brew", BREW),
                           ("uname", UNAME), ("sysctl", SYSCTL), ("caffeinate", '#!/bin/sh\nshift\n'
                                                                  'exec "$@"\n'),
                           ("ninja", OK), ("ccache", OK), ("c++", OK), ("clang++", OK)):
            self.write_tool(name, text)
        shutil.copy(ROOT / "dev", self.root / "dev")
        for name in ("tools", "bench", "src", "include", "metal_sim", "python", "cmake", "tests"):
            (self.root / name).mkdir()
        shutil.copy(ROOT / "tools/site.sh", self.root / "tools")
        for name in ("CMakeLists.txt", "pyproject.toml", "src/a b.cc"):
            (self.root / name).write_text("")

    def write_tool(self, name: str, text: str) -> None:
        (self.tools / name).write_text(textwrap.dedent(text))
        (self.tools / name).chmod(0o755)

    def make_checked(self, name: str) -> None:
        real = shutil.which(name)
        assert real is not None, name
        script = {"sed": SED_SCRIPT, "awk": AWK_SCRIPT}.get(name, "(?!)")
        text = textwrap.dedent(CHECK).replace("NAME", name).replace("REAL", real)
        text = text.replace("REFUSALS", str(self.root / "refusals"))
        text = text.replace("REFUSED", REFUSED.get(name, "(?!)"), 1).replace("SCRIPT", script)
        self.write_tool(name, f"#!{sys.executable} -IS\n{text}")

    def dev(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        given = {"PATH": str(self.tools), "CALLS": str(self.root / "calls"), "HOME": str(self.root),
                 "PYTEST_LINE": "12 passed, 3 skipped in 4.51s", **environment}
        done = subprocess.run([str(self.tools / "bash"), "./dev", *arguments], cwd=self.root,
                              env=given, capture_output=True, text=True, check=False, timeout=60)
        refusals = self.root / "refusals"
        self.assertFalse(refusals.exists(), refusals.exists() and refusals.read_text())
        return done

    def succeed(self, *arguments: str, **environment: str) -> str:
        done = self.dev(*arguments, **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def calls(self) -> str:
        return (self.root / "calls").read_text()

    def test_the_stand_ins_refuse(self) -> None:
        for command in (["sed", "-r", "s/a/b/"], ["sed", "-i", "s/a/b/"], ["date", "-d", "now"],
                        ["sed", "-n", "s/.*\\b\\([0-9]*\\)/\\1/p;t"], ["head", "--lines=1"],
                        ["grep", "-oP", "a"], ["find", ".", "-printf", "%p"], ["xargs", "-r", "ls"],
                        ["stat", "-c", "%s", "x"], ["awk", "{ print gensub(/a/, 1, 1) }"],
                        ["date", "+%s%N"], ["mktemp", "-p", "x"], ["readlink", "-e", "x"]):
            done = subprocess.run([str(self.tools / command[0]), *command[1:]], text=True,
                                  capture_output=True, check=False)
            self.assertEqual(done.returncode, 2, command)
            (self.root / "refusals").unlink()
            self.assertIn("illegal option or script", done.stderr)

    def test_build_and_demo(self) -> None:
        self.succeed("build")
        self.assertIn("-DMARLIN_WERROR=OFF", self.calls())
        self.assertIn("brew install --quiet nlohmann-json cli11 xxhash eigen\n", self.calls())
        self.assertIn("get_metal_cpp.py", self.calls())
        self.assertIn("-j 10", self.calls())
        self.assertIn("metal-marlin demo --x", self.succeed("demo", "--x"))

    def test_test(self) -> None:
        done = self.dev("test")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("3 passed, 0 failed, 2 skipped", done.stdout)
        self.assertIn("skipped: b: no such thing", done.stderr)
        self.assertIn("slow:     1.5 s  b", done.stderr)

    def test_test_metal(self) -> None:
        self.assertIn("recorded", self.succeed("test-metal", "--quick"))
        self.assertIn("bench/metal_record.py build --quick", self.calls())
        self.assertIn("-DMARLIN_METAL=ON", self.calls())
        self.assertNotIn("WERROR=ON", self.calls())

    def test_integrations_count(self) -> None:
        self.assertIn("12 passed, 0 failed, 3 skipped", self.succeed("test-integrations"))
        self.assertIn("mlx mlx-lm", self.calls())
        self.assertNotIn("mlx[cpu]", self.calls())
        for line, counts in (("2 failed, 30 passed in 9s", "30 passed, 2 failed, 0 skipped"),
                             ("== 1 passed, 11 errors in 2s ==", "1 passed, 11 failed, 0 skipped")):
            done = self.dev("test-integrations", PYTEST_LINE=line)
            self.assertEqual(done.returncode, 1)
            self.assertIn(counts, done.stdout)

    def test_others(self) -> None:
        self.assertIn("usage: ./dev", self.succeed("help"))
        self.succeed("install", "build")
        self.succeed("docs")
        self.write_tool("clang-format-14", '#!/bin/sh\necho "format $*" >>"$CALLS"\n')
        self.succeed("format")
        self.assertIn("format -i src/a b.cc\n", self.calls())
        (self.root / "build").mkdir(exist_ok=True)
        self.succeed("clean")
        self.assertFalse((self.root / "build").exists())
        for command in ("ci", "nightly"):
            done = self.dev(command)
            self.assertEqual(done.returncode, 1)
            self.assertIn("needs Linux", done.stderr)

    def test_without_homebrew(self) -> None:
        (self.tools / "brew").unlink()
        done = self.dev("build")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("no Homebrew", done.stderr)
        (self.tools / "cmake").unlink()
        done = self.dev("build")
        self.assertEqual(done.returncode, 1)
        self.assertIn("Homebrew is missing", done.stderr)

    def test_scripts_are_of_bash_3_and_of_programs_that_a_mac_has(self) -> None:
        scripts = [ROOT / "dev", *ROOT.glob("tools/*.sh"), *ROOT.glob("tests/**/*.sh")]
        checked = 0
        for script in scripts:
            path = script.relative_to(ROOT).as_posix()
            if path.startswith(LINUX_ONLY) or "/build" in path:
                continue
            checked += 1
            code = re.sub(r"(?m)^\s*#.*$", "", script.read_text())
            for pattern in (BASH_4, ABSENT):
                found = pattern.search(code)
                self.assertIsNone(found, f"{path}: {found and found[0]}")
        self.assertGreater(checked, 4)
        for bad in ("mapfile -t x", "local -n y=x", "echo ${x^^}", "declare -A map", "a |& b"):
            self.assertRegex(bad, BASH_4)
        self.assertRegex("x | timeout 3 y", ABSENT)


if __name__ == "__main__":
    if not shutil.which("bash") or not all(map(shutil.which, CHECKED)):
        print("skipped: a tool that the stand-ins run is missing")
        sys.exit(77)
    unittest.main()
