#!/usr/bin/env python3
"""Writes the tables of docs/quality.md from bench/records/quality-tiny.json, or with --check
compares them.

Usage: tools/quality_docs.py [--check]
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quality.md"
RECORD = ROOT / "bench" / "records" / "quality-tiny.json"
MARK = re.compile(r"(<!-- begin quality -->\n).*?(<!-- end quality -->)", re.DOTALL)


def change(row: dict[str, Any]) -> str:
    """Formats the perplexity relative to the source, with the standard error of the difference."""
    cost, error = 100 * (row["perplexity_ratio"] - 1), 100 * row["perplexity_ratio_error"]
    return f"{cost:+.2f} ± {error:.2f} %"


def tables(record: dict[str, Any]) -> str:
    """Returns both tables of every model."""
    lines = [f"Measured {record['date']} at commit {record['commit']}.", ""]
    for name, model in record["models"].items():
        rows = model["rows"]
        lines += [
            f"`{name}`, {rows[0]['tokens']} tokens",
            "",
            "| recipe | method | bits per weight | perplexity | vs. bf16 | KL mean | KL p99 "
            "| top-1 agreement |",
            "|---|---|---|---|---|---|---|---|",
            f"| bf16 | | 16 | {rows[0]['reference']:.3f} | | | | |",
        ]
        lines += [
            f"| {row['recipe']} | {row['method']} | {row['bits_per_weight']:.3f} "
            f"| {row['perplexity']:.3f} ± {row['standard_error']:.3f} | {change(row)} "
            f"| {row['kl_mean']:.4f} | {row['kl_p99']:.3f} | {100 * row['top1_agreement']:.1f} % |"
            for row in rows
        ]
        lines += ["", "| `default_moe` (rtn), only this class | format | cost |", "|---|---|---|"]
        lines += [f"| {row['recipe']} | {row['choice']} | {change(row)} |"
                  for row in model["classes"]]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    text = PAGE.read_text()
    fresh = MARK.sub(lambda m: m[1] + tables(json.loads(RECORD.read_text())) + m[2], text)
    if "--check" in sys.argv[1:]:
        if fresh != text:
            print("docs/quality.md differs from its record: run tools/quality_docs.py")
            return 1
        return 0
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
