"""The command line that the checks of the sources share: check_X.py [ROOT] | --self-test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def run(check_tree: Callable[[Path], Iterable[str]],
        self_test: Callable[[], Iterable[str]]) -> int:
    """Prints the findings below ROOT (default: the working directory), or the failures of the
    check's own test; returns the exit status, 1 if there are any."""
    arguments = sys.argv[1:]
    if arguments == ["--self-test"]:
        findings = list(self_test())
    else:
        findings = list(check_tree(Path(arguments[0] if arguments else ".")))
    return report(findings)


def report(findings: list[str]) -> int:
    """Prints findings; returns the exit status."""
    for finding in findings:
        print(finding)
    return 1 if findings else 0
