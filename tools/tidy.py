#!/usr/bin/env python3
"""Runs clang-tidy in parallel, but not on a file in which it found nothing and that looks to it as
it did then.

Usage: tidy.py [-p BUILD] [FILE]...
FILE: a source with a compile command in BUILD (default: build); default: all those below src/ and
metal_sim/src/. Sources that BUILD compiles in batches (MARLIN_UNITY) are checked in batches, which
parses their headers once. Prints the findings; the exit status is 1 if there are any.

${XDG_CACHE_HOME:-~/.cache}/metal-marlin/clang-tidy holds an empty file for each source without a
finding. Its name is the hash of all that clang-tidy sees: its program, its configuration for that
source, the compile commands, and the path and bytes of every file that the compiler reads. The
preprocessed text, which other caches hash, lacks macro definitions and some comments, in which
there may be findings and NOLINT. Findings are never stored.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TIDY = "clang-tidy-14"
# The same version of the compiler reads the same files.
COMPILER = "clang++-14"
# The compile commands may be g++'s, with -W options that clang does not know.
OPTIONS = ["--quiet", "--extra-arg=-Wno-unknown-warning-option"]
# A batch includes sources, which is what that check looks for.
BATCH_OPTIONS = ["--checks=-bugprone-suspicious-include"]
FOLDERS = ("src", "metal_sim/src")
DAYS_KEPT = 30


def open_cache() -> Path | None:
    """Returns the folder of the cache, which it makes, and from which it removes what has not been
    used for a month; None if the folder cannot be written to."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache",
                  "metal-marlin/clang-tidy")
    oldest = time.time() - DAYS_KEPT * 24 * 60 * 60
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for marker in folder.iterdir():
            if marker.stat().st_mtime < oldest:
                marker.unlink()
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        print(f"{TIDY}: no cache: {error}", file=sys.stderr)
        return None


def output_of(command: list[str], folder: Path) -> str | None:
    """Returns what a command prints, or None if it fails or does not exist."""
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.decode("utf-8", "surrogateescape") if result.returncode == 0 else None


def files_of_rule(rule: str) -> list[str]:
    """Returns the prerequisites of a rule in make's syntax, as a compiler's -M writes it."""
    words = re.findall(r"(?:\\[^\n]|[^\\\s])+", rule.split(":", 1)[1])
    return [re.sub(r"\\(.)", r"\1", word).replace("$$", "$") for word in words]


def header_filter(configuration: str) -> re.Pattern[str] | None:
    """Returns the pattern of the headers whose findings are shown, from what --dump-config prints;
    None if it is not understood."""
    line = re.search(r"^HeaderFilterRegex: *(?:'(.*)'|([^'\"]*))$", configuration, re.MULTILINE)
    if line is None:
        return None
    try:
        return re.compile((line[1] or line[2] or "").replace("''", "'"))
    except re.error:
        return None


def members_of_batch(file: Path) -> list[Path]:
    """Returns the sources that a batch, as CMake writes it, includes; none for other files."""
    if file.parent.name != "Unity" or not file.is_file():
        return []
    return [Path(name) for name in re.findall(r'^#include "(.*)"$', file.read_text(), re.MULTILINE)]


class Tidy:
    """clang-tidy for the compile commands of a build folder, below `root`; without a cache if that
    is None."""

    def __init__(self, root: Path, build: Path, cache: Path | None) -> None:
        self.root = root.resolve()
        self.build = build.resolve()
        self.cache = cache
        self.ran: list[Path] = []
        self.commands: dict[Path, list[dict[str, Any]]] = {}
        for entry in json.loads((self.build / "compile_commands.json").read_text()):
            file = Path(os.path.normpath(os.path.join(entry["directory"], entry["file"])))
            self.commands.setdefault(file, []).append(entry)
        self.batches = {member: file for file in self.commands
                        for member in members_of_batch(file)}
        program = Path(os.path.realpath(shutil.which(TIDY) or TIDY))
        state = program.stat()
        # The version does not tell apart a distribution's patched packages.
        self.program = f"{output_of([TIDY, '--version'], self.root)} {state.st_size} " \
            f"{state.st_mtime_ns}"
        self.digests: dict[tuple[str, int, int, int], bytes] = {}

    def sources(self) -> list[Path]:
        """Returns the files that are checked unless others are named."""
        folders = [self.root / folder for folder in FOLDERS]
        sources = [*self.commands, *self.batches]
        return sorted({self.batches.get(file, file) for file in sources
                       if file.suffix == ".cc" and any(f in file.parents for f in folders)})

    def options(self, file: Path) -> list[str]:
        return OPTIONS + (BATCH_OPTIONS if file in self.batches.values() else [])

    def digest(self, path: str) -> bytes:
        state = os.stat(path)
        # Not only the path: the file may have been changed since.
        known = (path, state.st_ino, state.st_size, state.st_mtime_ns)
        if known not in self.digests:
            data = Path(path).read_bytes()
            if Path(path) in self.batches.values():
                # A batch names its sources by their paths in this clone.
                data = data.replace(os.fsencode(f"{self.root}/"), b"./")
            self.digests[known] = hashlib.sha256(data).digest()
        return self.digests[known]

    def key(self, file: Path) -> str | None:
        """Returns the hash of all that clang-tidy sees of a source; None if it cannot be told."""
        if file not in self.commands:
            return None
        configuration = output_of([TIDY, "--dump-config", "-p", str(self.build), str(file)],
                                  self.root)
        shown = header_filter(configuration or "")
        if configuration is None or shown is None:
            return None
        seen = hashlib.sha256()

        def add(data: str | bytes) -> None:
            if isinstance(data, str):
                data = data.encode("utf-8", "surrogateescape")
            seen.update(len(data).to_bytes(8, "little") + data)

        def add_path(text: str) -> None:
            # A clone in another folder has the same findings,
            add(text.replace(f"{self.root}/", "./"))

        for part in [self.program, configuration, *self.options(file)]:
            add(part)
        for entry in self.commands[file]:
            arguments = entry.get("arguments") or shlex.split(entry["command"])
            if "-o" in arguments:
                output = arguments.index("-o")
                arguments = arguments[:output] + arguments[output + 2:]
            add_path("\0".join(arguments))
            folder = Path(entry["directory"])
            # clang-tidy defines this macro.
            rule = output_of([COMPILER, *arguments[1:], "-D__clang_analyzer__", "-w", "-M"], folder)
            if rule is None:
                return None
            for name in files_of_rule(rule):
                path = os.path.join(folder, name)
                add_path(path)
                # unless the header filter takes the folder for one of its own.
                add(b"shown" if shown.search(path) else b"")
                add(self.digest(path))
        return seen.hexdigest()

    def check(self, file: Path) -> str:
        """Returns the findings in a source; empty if there are none."""
        key = self.key(file) if self.cache else None
        marker = self.cache / key if self.cache and key else None
        if marker and marker.is_file():
            marker.touch()
            return ""
        self.ran.append(file)
        result = subprocess.run([TIDY, "-p", str(self.build), *self.options(file), str(file)],
                                cwd=self.root, capture_output=True, text=True, errors="replace",
                                check=False)
        # On stderr it also counts the warnings that it suppresses, in system headers.
        errors = [line for line in result.stderr.splitlines() if re.search("error:|Error", line)]
        findings = result.stdout + "".join(line + "\n" for line in errors)
        if result.returncode != 0 and not findings:
            findings = f"{file}: {TIDY} ended with status {result.returncode}: {result.stderr}\n"
        # A file that has changed since its hash was taken may have had findings before.
        if marker and not findings and self.key(file) == key:
            marker.touch()
        return findings


def main() -> int:
    parser = argparse.ArgumentParser(description="clang-tidy, with a cache of what has no findings")
    parser.add_argument("-p", dest="build", type=Path, default=Path("build"))
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    if not shutil.which(TIDY):
        parser.error(f"{TIDY} is missing")
    try:
        tidy = Tidy(Path(__file__).parents[1], options.build, open_cache())
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"no compile commands: {error}")
    named = [file.resolve() for file in options.files]
    files = sorted({tidy.batches.get(file, file) for file in named}) or tidy.sources()
    if not files:
        parser.error(f"no source has a compile command in {options.build}")
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for findings in pool.map(tidy.check, files):
            print(findings, end="", flush=True)
            failed += findings != ""
    print(f"{TIDY}: {len(files)} files, of which {len(tidy.ran)} new or changed and {failed} with "
          "findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
