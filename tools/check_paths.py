#!/usr/bin/env python3
"""Checks that no file of the project names a path of the machine it was written on, and that no
text describes itself as unfinished.

Usage: check_paths.py [ROOT] | --self-test
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import check_main

# Split in two parts so that this file does not match itself.
_LOCAL = re.compile(
    r"(?:(?<![\w.$}])|(?<=-[IL]))/(?:wor" r"k|roo" r"t|hom" r"e/[a-z]\w*|User" r"s/\w+)/"
)
_UNFINISHED = re.compile(
    r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK|not (?:yet )?implem" r"ented|for n" r"ow)\b"
)
TEXT = {".h", ".cc", ".cu", ".cuh", ".metal", ".py", ".md", ".txt", ".cmake", ".json", ".def",
        ".sh", ".yml", ".toml", ""}
LARGEST = 2_000_000


def check_text(path: str, text: str) -> list[str]:
    findings = []
    for number, line in enumerate(text.splitlines(), 1):
        local = _LOCAL.search(line)
        if local:
            findings.append(f"{path}:{number}: a path of one machine: {local.group(0)}")
        unfinished = _UNFINISHED.search(line)
        if unfinished:
            findings.append(f"{path}:{number}: unfinished work: {unfinished.group(0)}")
    return findings


def project_files(root: Path) -> list[Path]:
    """Returns tracked and new files; outside a git clone, everything but build folders."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others",
               "--exclude-standard"]
    if shutil.which("git"):
        listing = subprocess.run(command, capture_output=True, check=False)
        if listing.returncode == 0:
            return [root / name for name in listing.stdout.decode().split("\0") if name]
    return [p for p in root.rglob("*")
            if p.is_file() and not p.relative_to(root).parts[0].startswith(("build", "."))]


def check_tree(root: Path) -> list[str]:
    findings = []
    for path in sorted(project_files(root)):
        if path.suffix not in TEXT or not path.is_file() or path.stat().st_size > LARGEST:
            continue
        if path.name == "LICENSE":
            continue
        text = path.read_bytes()
        if b"\0" not in text[:4096]:
            relative = path.relative_to(root).as_posix()
            findings += check_text(relative, text.decode("utf-8", "replace"))
    return findings


def self_test() -> list[str]:
    must_find = ["see /wor" "k/shared/x", "'/roo" "t/.cache/'", "-I/hom" "e/ann/include",
                 "// TO" "DO(ann): later", "# FIX" "ME", "this is not yet implem" "ented"]
    must_pass = ["$HOME/wor" "k/x", "a/wor" "k/b", "/usr/include/x", "/hom" "epage/",
                 "a network/roo" "t/thing", "the work/rest ratio", "build/bin/metal-marlin"]
    failures = [f"not found: {line}" for line in must_find if not check_text("a", line)]
    return failures + [f"wrongly found: {line}" for line in must_pass if check_text("a", line)]


if __name__ == "__main__":
    sys.exit(check_main.run(check_tree, self_test))
