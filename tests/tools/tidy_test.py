"""tools/tidy.py: its cache saves runs of clang-tidy, and never a finding."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import tidy  # noqa: E402

CHECKS = "-*,google-explicit-constructor,bugprone-reserved-identifier"
HEADER = "struct Named { explicit Named(int); };\n"
IMPLICIT = "struct Named { Named(int); };\n"


class TidyTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve() / "a clone"
        self.cache = pathlib.Path(folder.name).resolve() / "cache"
        self.cache.mkdir()
        (self.root / "src").mkdir(parents=True)
        (self.root / "build").mkdir()
        self.write("src/named.h", HEADER)
        self.write("src/named.cc", '#include "named.h"\nint f();\nint g() { return 1; }\n')
        self.configure(CHECKS)
        self.set_options([])

    def write(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def configure(self, checks: str, headers: str = "/src/") -> None:
        self.write(".clang-tidy", f"Checks: '{checks}'\nWarningsAsErrors: '*'\n"
                   f"HeaderFilterRegex: '{headers}'\n")

    def set_options(self, options: list[str]) -> None:
        source = str(self.root / "src/named.cc")
        self.write("build/compile_commands.json", json.dumps([{
            "directory": str(self.root / "build"), "file": source,
            "arguments": ["c++", "-std=c++20", *options, "-o", "named.o", "-c", source]}]))

    def write_batch(self, other: str) -> pathlib.Path:
        """Compiles named.cc in a batch with other.cc."""
        batch = self.root / "build/src/Unity/unity_0_cxx.cxx"
        batch.parent.mkdir(parents=True, exist_ok=True)
        batch.write_text("".join(f'#include "{self.root}/src/{name}.cc"\n'
                                 for name in ("named", "other")))
        self.write("src/other.cc", other)
        self.write("build/compile_commands.json", json.dumps([{
            "directory": str(self.root / "build"), "file": str(batch),
            "arguments": ["c++", "-std=c++20", "-o", "batch.o", "-c", str(batch)]}]))
        return batch

    def test_sources_of_a_batch_are_checked_once(self) -> None:
        batch = self.write_batch(IMPLICIT.replace("Named", "Other"))
        self.configure("bugprone-*," + CHECKS)
        checker = tidy.Tidy(self.root, self.root / "build", self.cache)
        self.assertEqual(checker.sources(), [batch])
        self.assertEqual(checker.batches[self.root / "src/other.cc"], batch)
        findings = checker.check(batch)
        self.assertIn("other.cc:1:", findings)
        self.assertNotIn("suspicious-include", findings)

    def run_tidy(self) -> tuple[str, int]:
        """Returns the findings and how often clang-tidy ran."""
        checker = tidy.Tidy(self.root, self.root / "build", self.cache)
        self.assertEqual(checker.sources(), [self.root / "src/named.cc"])
        findings = "".join(checker.check(file) for file in checker.sources())
        return findings, len(checker.ran)

    def expect_clean(self, runs: int) -> None:
        self.assertEqual(self.run_tidy(), ("", runs))

    def expect_finding(self, check: str) -> None:
        # Twice, because a finding must not be stored.
        for _ in range(2):
            findings, runs = self.run_tidy()
            self.assertIn(check, findings)
            self.assertEqual(runs, 1)

    def fill(self) -> None:
        self.expect_clean(1)
        self.expect_clean(0)

    def test_finding_in_header_is_reported_until_it_is_gone(self) -> None:
        self.fill()
        self.write("src/named.h", IMPLICIT)
        self.expect_finding("google-explicit-constructor")
        self.write("src/named.h", HEADER)
        self.expect_clean(0)

    def test_comments_count(self) -> None:
        self.write("src/named.h", IMPLICIT.replace("\n", "  // NOLINT\n"))
        self.fill()
        self.write("src/named.h", IMPLICIT.replace("\n", "  // YESLINT\n"))
        self.expect_finding("google-explicit-constructor")

    def test_unused_macros_count(self) -> None:
        self.fill()
        self.write("src/named.h", HEADER + "#define _Reserved 1\n")
        self.expect_finding("bugprone-reserved-identifier")

    def test_configuration_counts(self) -> None:
        self.fill()
        self.configure(CHECKS + ",modernize-use-trailing-return-type")
        self.expect_finding("modernize-use-trailing-return-type")

    def test_configuration_of_subfolder_counts(self) -> None:
        self.fill()
        self.write("src/.clang-tidy", "InheritParentConfig: true\n"
                   "Checks: 'modernize-use-trailing-return-type'\n")
        self.expect_finding("modernize-use-trailing-return-type")

    def test_broken_configuration_is_reported(self) -> None:
        self.fill()
        self.write(".clang-tidy", "Checks: '*\n")
        self.expect_finding("rror")

    def test_compile_command_counts(self) -> None:
        self.write("src/named.h", f"#ifdef IMPLICIT\n{IMPLICIT}#else\n{HEADER}#endif\n")
        self.fill()
        self.set_options(["-DIMPLICIT"])
        self.expect_finding("google-explicit-constructor")

    def fill_with_header_in_second_folder(self) -> None:
        for folder in ("first", "second"):
            (self.root / "src" / folder).mkdir()
        self.write("src/second/other.h", HEADER)
        self.write("src/named.cc", '#include "other.h"\n')
        self.set_options([f"-I{self.root}/src/first", f"-I{self.root}/src/second"])
        self.fill()

    def test_header_found_earlier_counts(self) -> None:
        self.fill_with_header_in_second_folder()
        self.write("src/first/other.h", IMPLICIT)
        self.expect_finding("google-explicit-constructor")

    def test_path_of_header_counts(self) -> None:
        self.fill_with_header_in_second_folder()
        # Some checks depend on a header's path.
        self.write("src/first/other.h", HEADER)
        self.expect_clean(1)

    def test_code_for_analyzers_counts(self) -> None:
        self.write("src/other.h", HEADER)
        self.write("src/named.cc", '#ifdef __clang_analyzer__\n#include "other.h"\n#endif\n')
        self.fill()
        self.write("src/other.h", IMPLICIT)
        self.expect_finding("google-explicit-constructor")

    def test_each_compile_command_counts(self) -> None:
        commands = json.loads((self.root / "build/compile_commands.json").read_text())
        self.write("src/named.h", f"#ifdef IMPLICIT\n{IMPLICIT}#else\n{HEADER}#endif\n")
        self.fill()
        second = json.loads(json.dumps(commands[0]))
        second["arguments"].insert(1, "-DIMPLICIT")
        self.write("build/compile_commands.json", json.dumps([commands[0], second]))
        self.expect_finding("google-explicit-constructor")

    def test_error_of_compiler_is_reported(self) -> None:
        self.fill()
        self.write("src/named.h", "#include <no_such_header>\n")
        self.expect_finding("no_such_header")

    def replace_program(self, script: str) -> None:
        """Puts a shell script in the place of clang-tidy, whose path is TIDY in it."""
        other = self.cache.parent / "bin" / tidy.TIDY
        other.parent.mkdir()
        path = os.path.realpath(str(shutil.which(tidy.TIDY)))
        other.write_text(f"#!/bin/sh\nTIDY='{path}'\n{script}\n")
        other.chmod(0o755)
        patch = mock.patch.dict(os.environ, PATH=f"{other.parent}:{os.environ['PATH']}")
        patch.start()
        self.addCleanup(patch.stop)

    def test_program_counts(self) -> None:
        self.fill()
        self.replace_program('exec "$TIDY" "$@"')
        self.expect_clean(1)
        self.expect_clean(0)

    def test_failure_without_message_is_reported(self) -> None:
        self.replace_program('case $1 in --version | --dump-config) exec "$TIDY" "$@" ;; esac\n'
                             "exit 3")
        self.expect_finding("ended with status 3")

    def test_clone_in_another_folder_shares_results(self) -> None:
        self.fill()
        self.root = self.root.rename(self.root.with_name("another"))
        self.set_options([])
        self.expect_clean(0)

    def test_batch_of_clone_in_another_folder_shares_results(self) -> None:
        other = "int h() { return 2; }\n"
        for runs in (1, 0):
            batch = self.write_batch(other)
            checker = tidy.Tidy(self.root, self.root / "build", self.cache)
            self.assertEqual((checker.check(batch), len(checker.ran)), ("", runs))
            self.root = self.root.rename(self.root.with_name("another"))
        batch = self.write_batch(other + "int i() { return 3; }\n")
        checker = tidy.Tidy(self.root, self.root / "build", self.cache)
        self.assertEqual((checker.check(batch), len(checker.ran)), ("", 1))

    def test_clone_whose_path_matches_header_filter_does_not(self) -> None:
        (self.root / "include").mkdir()
        self.write("include/other.h", IMPLICIT)
        self.write("src/named.cc", '#include "../include/other.h"\n')
        self.configure(CHECKS, "/checked/")
        self.fill()
        (self.root.parent / "checked").mkdir()
        self.root = self.root.rename(self.root.parent / "checked/clone")
        self.set_options([])
        self.expect_finding("google-explicit-constructor")

    def test_change_during_run_is_not_stored(self) -> None:
        run = subprocess.run

        def mend_first(command: list[str], **options: object) -> object:
            if "--quiet" in command:
                self.write("src/named.h", HEADER)
            return run(command, **options)  # type: ignore[call-overload]

        self.write("src/named.h", IMPLICIT)
        with mock.patch.object(subprocess, "run", mend_first):
            self.expect_clean(1)
        self.write("src/named.h", IMPLICIT)
        self.expect_finding("google-explicit-constructor")

    def test_source_without_command_is_not_stored(self) -> None:
        checker = tidy.Tidy(self.root, self.root / "build", self.cache)
        for runs in (1, 2):
            self.assertEqual(checker.check(self.root / "src/named.h"), "")
            self.assertEqual(len(checker.ran), runs)

    def test_names_in_rule_of_make(self) -> None:
        self.assertEqual(tidy.files_of_rule("a.o: b.cc \\\n  a\\ b.h c$$d.h \\\n  e\\#f.h\n"),
                         ["b.cc", "a b.h", "c$d.h", "e#f.h"])

    def test_cache_folder(self) -> None:
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.cache)):
            folder = tidy.open_cache()
            self.assertEqual(folder, self.cache / "metal-marlin/clang-tidy")
            assert folder is not None
            old, new = folder / "old", folder / "new"
            new.touch()
            old.touch()
            os.utime(old, (0, time.time() - 31 * 24 * 60 * 60))
            self.assertEqual(tidy.open_cache(), folder)
            self.assertEqual(list(folder.iterdir()), [new])

    def test_without_cache_findings_are_reported(self) -> None:
        file = self.cache / "file"
        file.touch()
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(file)), \
                contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertIsNone(tidy.open_cache())
        self.assertIn("no cache: ", said.getvalue())
        self.write("src/named.h", IMPLICIT)
        checker = tidy.Tidy(self.root, self.root / "build", None)
        self.assertIn("google-explicit-constructor", checker.check(checker.sources()[0]))


if __name__ == "__main__":
    if not shutil.which(tidy.TIDY) or not shutil.which(tidy.COMPILER):
        print(f"skipped: no {tidy.TIDY} and {tidy.COMPILER}")
        sys.exit(77)
    unittest.main()
