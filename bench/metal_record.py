#!/usr/bin/env python3
"""Tests this Mac's GPU, measures it, and records the results: ./dev test-metal.

    bench/metal_record.py BUILD_FOLDER [-o bench/records/metal-CHIP.json] [--quick]
                          [--filter REGEX] [--resume] [--compile]

Each kernel, each file of unit tests, each sample model and each benchmark is a step: a process with
a time limit. A step that crashes or hangs is recorded with the case in which it did, and the next
one follows. Everything that a compiler or Metal says is kept. After each step the results are
written to OUTPUT.partial; --resume goes on from there.

The record holds the chip, system, commit and date, what each source's compilation said, how many
conformance cases passed, failed and were declined per kernel, what unit tests on the device and
sample models gave, and times of GEMMs, also MLX's (pip install mlx). A virtual machine's GPU is not
timed. Exit code 1: something failed; 5: no Mac, and nothing is recorded; 130: interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import metal_steps
import record_form
from metal_steps import COUNTS, VIRTUAL_GPU, Context, Step

ROOT = Path(__file__).resolve().parent.parent
HEARTBEAT_SECONDS = 30


def slug(chip: str) -> str:
    """Returns the file name for a chip: "Apple M2 Pro" -> "apple-m2-pro"."""
    return "-".join("".join(c if c.isalnum() else " " for c in chip.lower()).split())


def class_of(device: dict[str, Any]) -> str:
    """The class of a record's device: results of a virtual machine's GPU need a second witness."""
    if device["name"] != "metal":
        return "simulator"
    return "apple-gpu-virtual" if VIRTUAL_GPU in device["features"] else "apple-gpu"


def make_record(results: dict[str, dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """Makes a record of the steps' results; facts: os, commit, date, chip, quick."""
    opened = results.get("open", {})
    device = opened.get("device") or {"name": "metal", "model": facts["chip"], "features": []}
    rows = {kind: [{**result, "step": name} for name, result in results.items()
                   if name.split(" ")[0] == kind]
            for kind in ("compile", "conformance", "unit", "model", "bench", "validation")}
    kernels = [row for row in rows["conformance"] if "kernel" in row]
    return {
        "chip": device["model"],
        **{key: facts[key] for key in ("os", "commit", "date", "quick")},
        "class": class_of(device),
        "device": device,
        "open": opened,
        "compile": rows["compile"],
        "conformance": {**{key: sum(row[key] for row in kernels) for key in COUNTS},
                        "kernels": kernels},
        **{kind: rows[kind] for kind in ("unit", "model", "bench", "validation")},
    }


def is_bad(result: dict[str, Any]) -> bool:
    """Whether a step found a fault."""
    state = result["state"]
    bad = ("FAILED", "crashed", "timed out", "hung", "printed", "no such", "exit", "does not")
    return bool(result.get("failed")) or any(word in state for word in bad)


def say_result(result: dict[str, Any]) -> str:
    """One line on a step's result."""
    text = str(result["state"])
    if "kernel" in result and "passed" in result:
        text += f": {result['passed']} passed, {result['failed']} failed"
        if result.get("unsupported"):
            text += f", {result['unsupported']} declined"
    for failure in result.get("failures", [])[:1]:
        text += f"; first: {failure['case']}" if isinstance(failure, dict) else f"; {failure}"
    if result.get("case"):
        text += f" in {result['case']}"
    return text


def summary(record: dict[str, Any]) -> str:
    lines = [f"{record['chip']} ({record['class']}), {record['os']}, commit {record['commit']}, "
             f"{record['date']}"]
    lines += [f"  {feature}" for feature in record["device"]["features"]]
    lines.append(f"{'kernel':<32}{'passed':>8}{'failed':>8}{'declined':>10}{'worst error':>13}")
    for row in record["conformance"]["kernels"]:
        lines.append(f"{row['kernel']:<32}{row['passed']:>8}{row['failed']:>8}"
                     f"{row['unsupported']:>10}{row['worst_ratio']:>13.3f}"
                     + ("" if row["state"] == "ran" else f"  {row['state']}"))
    for kind in ("compile", "unit", "model", "bench", "validation"):
        lines += [f"{row['step']}: {say_result(row)}" for row in record[kind]]
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


def chip_of_machine() -> str:
    """The processor's name, for a record of a GPU that does not open."""
    try:
        return subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True,
                              text=True, check=True).stdout.strip() or "unknown"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Run:
    """Runs steps, and keeps their results in a file."""

    def __init__(self, context: Context, partial: Path, key: dict[str, Any]) -> None:
        self.context = context
        self.partial = partial
        self.key = key
        self.results: dict[str, dict[str, Any]] = {}
        self.started = time.monotonic()
        self.beat = 0.0
        context.tick = self.tick

    def resume(self) -> None:
        """Takes the results of an earlier run of the same commit and options."""
        try:
            kept = json.loads(self.partial.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return
        if kept.get("key") == self.key:
            self.results = {name: result for name, result in kept["results"].items()
                            if not result.get("again")}
            self.say(f"goes on after {len(self.results)} steps of {self.partial}")

    def say(self, text: str) -> None:
        seconds = time.monotonic() - self.started
        print(f"[{seconds:5.0f} s] {text}", file=sys.stderr, flush=True)

    def tick(self, seconds: float) -> None:
        if seconds < self.beat:
            self.beat = 0
        if seconds - self.beat >= HEARTBEAT_SECONDS:
            self.beat = seconds
            self.say(f"  ... {seconds:.0f} s")

    def step(self, name: str, body: Any, place: str = "") -> dict[str, Any]:
        """Returns the result of a step, which runs unless it is known."""
        if name not in self.results:
            self.say(f"{place}{name}")
            self.beat = 0
            self.results[name] = body()
            self.say(f"  {say_result(self.results[name])}")
            self.save()
        return self.results[name]

    def all(self, steps: list[Step], chosen: re.Pattern[str]) -> None:
        wanted = [(name, body) for name, body in steps if chosen.search(name)]
        for at, (name, body) in enumerate(wanted):
            self.step(name, body, f"{at + 1}/{len(wanted)} ")

    def save(self) -> None:
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.partial.with_name(self.partial.name + ".new")
        temporary.write_text(json.dumps({"key": self.key, "results": self.results}),
                             encoding="utf-8")
        temporary.replace(self.partial)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path, help="the build folder")
    parser.add_argument("-o", "--output", type=Path, help="the record")
    parser.add_argument("--quick", action="store_true",
                        help="a tenth of the cases of each kernel, few shapes")
    parser.add_argument("--filter", default="", metavar="REGEX",
                        help="only steps whose name matches: 'gemv', 'model', 'bench'; recorded "
                             "only with -o")
    parser.add_argument("--compile", action="store_true",
                        help="only Apple's compiler, which must be there; BUILD need not")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--limit", type=float, default=900, metavar="S",
                        help="seconds of a process; default 900")
    parser.add_argument("--silence", type=float, default=120, metavar="S",
                        help="seconds that one case may take; default 120")
    parser.add_argument("--device", default="metal", choices=["metal", "metal-sim"],
                        help="metal-sim tries this script without a Mac")
    return parser.parse_args(arguments)


def run_steps(run: Run, chosen: re.Pattern[str], compiles_only: bool) -> None:
    context = run.context
    run.all(metal_steps.compile_steps(context), chosen)
    if compiles_only:
        for result in run.results.values():
            if not result["rows"]:
                result["state"] = f"FAILED: {result['state']}"
        return
    opened = run.step("open", lambda: metal_steps.open_device(context))
    if opened["device"] is None:
        return
    context.self_test = opened["self_test"]
    context.virtual = VIRTUAL_GPU in opened["device"]["features"]
    if context.virtual:
        run.say("a virtual machine's GPU: no times are taken")
    run.all(metal_steps.device_steps(context), chosen)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.device == "metal" and platform.system() != "Darwin":
        print("metal_record.py: nothing is recorded: no Mac (--device metal-sim tries this script)",
              file=sys.stderr)
        return 5
    facts = {"os": os_of_machine(), "commit": commit_of_checkout(), "quick": options.quick,
             "date": datetime.date.today().isoformat(), "chip": chip_of_machine()}
    context = Context(options.build.resolve(), options.device, options.quick, options.limit,
                      options.silence)
    key = {"commit": facts["commit"], "device": options.device, "quick": options.quick}
    name = f"metal-{slug(facts['chip'])}.json"
    output = options.output or ROOT / "bench" / "records" / name
    run = Run(context, output.with_name(output.name + ".partial"), key)
    if options.resume:
        run.resume()
    try:
        run_steps(run, re.compile(options.filter), options.compile)
    except KeyboardInterrupt:
        print(f"metal_record.py: interrupted; --resume goes on from {run.partial}", file=sys.stderr)
        return 130
    record = make_record(run.results, facts)
    print(summary(record))
    partial = options.filter or options.compile
    if options.output or (not partial and record["class"] != "simulator"):
        record_form.write(output, record)
        print(f"recorded in {output}")
    if not any(result.get("again") for result in run.results.values()):
        run.partial.unlink(missing_ok=True)
    return 1 if any(map(is_bad, run.results.values())) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
