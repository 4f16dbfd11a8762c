#!/usr/bin/env python3
"""Runs the conformance cases of every Metal kernel on this Mac's GPU and records the results.

    bench/metal_record.py BUILD_FOLDER [-o bench/records/metal-CHIP.json] [--filter REGEX]

The record holds the chip, system, commit and date, and how many conformance cases passed, failed
and were declined per kernel. Without an Apple GPU nothing is written. Exit code 1: cases failed; 5:
no such GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import record_form

ROOT = Path(__file__).resolve().parent.parent
COUNTS = ("passed", "failed", "unsupported", "mistrusted", "skipped")


def slug(chip: str) -> str:
    """Returns the file name for a chip: "Apple M2 Pro" -> "apple-m2-pro"."""
    return "-".join("".join(c if c.isalnum() else " " for c in chip.lower()).split())


def make_record(conformance: dict[str, Any], os_name: str, commit: str,
                date: str) -> dict[str, Any]:
    """Makes a record of marlin_conformance's output. Raises ValueError if no Apple GPU ran it."""
    device = conformance.get("devices", {}).get("metal")
    if device is None:
        reasons = {row["unavailable"] for row in conformance["kernels"] if row["unavailable"]}
        raise ValueError("; ".join(sorted(reasons)) or "no metal device")
    if device["name"] != "metal":
        raise ValueError(f"ran on {device['name']} ({device['model']}), no Apple GPU")
    kernels = [{"kernel": row["kernel"], **{key: row[key] for key in COUNTS},
                "worst_ratio": row["worst_ratio"], "worst_case": row["worst_case"]}
               for row in conformance["kernels"] if row["backend"] == "metal"]
    return {
        "chip": device["model"],
        "os": os_name,
        "commit": commit,
        "date": date,
        "device": device,
        "conformance": {
            **{key: sum(row[key] for row in kernels) for key in COUNTS},
            "kernels": kernels,
            "failures": conformance["failures"],
        },
    }


def summary(record: dict[str, Any]) -> str:
    lines = [f"{record['chip']}, {record['os']}, commit {record['commit']}, {record['date']}"]
    lines += [f"  {feature}" for feature in record["device"]["features"]]
    lines.append(f"{'kernel':<32}{'passed':>8}{'failed':>8}{'declined':>10}{'worst error':>13}")
    for row in record["conformance"]["kernels"]:
        lines.append(f"{row['kernel']:<32}{row['passed']:>8}{row['failed']:>8}"
                     f"{row['unsupported']:>10}{row['worst_ratio']:>13.3f}")
    counts = record["conformance"]
    lines.append(f"{counts['passed']} passed, {counts['failed']} failed, "
                 f"{counts['skipped']} skipped")
    return "\n".join(lines)


def commit_of_checkout() -> str:
    """Returns the commit, with "-changed" if files differ from it: then it is not reproducible."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True,
                              check=True).stdout.strip()
    try:
        changed = git("status", "--porcelain", "--untracked-files=no") != ""
        return git("rev-parse", "HEAD") + ("-changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def os_of_machine() -> str:
    version = platform.mac_ver()[0]
    return f"macOS {version}" if version else platform.platform()


def run_conformance(build: Path, pattern: str) -> dict[str, Any]:
    command = [str(build / "bin" / "marlin_conformance"), "--device", "metal", "--jobs", "0",
               "--json"]
    if pattern:
        command += ["--filter", pattern]
    # A kernel that fails the device's self-test must fail here, case by case, without keeping the
    # others from running.
    environment = {"MARLIN_METAL_SELF_TEST": "probe", **os.environ}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False,
                          env=environment)
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        sys.exit(f"{command[0]}: exit code {done.returncode}, and no JSON document")
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="the build folder")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--filter", default="", help="only cases whose name matches; not recorded")
    arguments = parser.parse_args()
    conformance = run_conformance(arguments.build, arguments.filter)
    try:
        record = make_record(conformance, os_of_machine(), commit_of_checkout(),
                             datetime.date.today().isoformat())
    except ValueError as error:
        print(f"metal_record.py: nothing is recorded: {error}", file=sys.stderr)
        return 5
    print(summary(record))
    if not arguments.filter:
        output = arguments.output
        output = output or ROOT / "bench" / "records" / f"metal-{slug(record['chip'])}.json"
        record_form.write(output, record)
        print(f"recorded in {output}")
    return 1 if record["conformance"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
