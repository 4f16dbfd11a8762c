#!/usr/bin/env python3
"""Keeps bench/records/nightly.json: one row per stage, each with the commit that it ran on.

Usage: nightly_record.py RECORD begin [--device TEXT] STAGE...   drops rows of other stages
       nightly_record.py RECORD add STAGE ok|FAILED SECONDS COMMIT [RESULT]
       nightly_record.py RECORD commit STAGE           prints the commit of a row that is ok

A row is written as soon as its stage ends, so that an interrupted run can resume.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import record_form  # noqa: E402

Record = dict[str, Any]


def read(path: Path) -> Record:
    if not path.exists():
        return {"order": [], "stages": []}
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def summarise(record: Record) -> Record:
    """Returns the overall result: complete means every stage, ok, at one clean commit."""
    rows = {row["stage"]: row for row in record["stages"]}
    order = record["order"]
    commits = {row["commit"] for row in rows.values()}
    missing = [stage for stage in order if stage not in rows]
    failed = [stage for stage in order if stage in rows and not rows[stage]["ok"]]
    one = len(commits) == 1 and not next(iter(commits)).endswith("-dirty")
    return {
        "device": record.get("device", ""),
        "one_commit": one,
        "complete": one and not missing and not failed,
        "missing": missing,
        "failed": failed,
        "order": order,
        "stages": [rows[stage] for stage in order if stage in rows],
    }


def write(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    record_form.write(partial, summarise(record))
    partial.replace(path)


def add(record: Record, row: Record) -> None:
    record["stages"] = [old for old in record["stages"] if old["stage"] != row["stage"]] + [row]


def main(arguments: list[str]) -> int:
    path, action, *rest = Path(arguments[0]), *arguments[1:]
    record = read(path)
    if action == "begin":
        if rest[:1] == ["--device"]:
            record["device"] = rest[1]
            rest = rest[2:]
        record["order"] = rest
        write(path, record)
    elif action == "add":
        stage, outcome, seconds, commit, result = (*rest, "")[:5]
        add(record, {
            "stage": stage, "ok": outcome == "ok", "result": result, "seconds": int(seconds),
            "date": datetime.now(timezone.utc).date().isoformat(), "commit": commit,
        })
        write(path, record)
    elif action == "commit":
        rows = [row for row in record["stages"] if row["stage"] == rest[0] and row["ok"]]
        print(rows[0]["commit"] if rows else "")
    else:
        raise SystemExit(f"unknown action: {action}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
