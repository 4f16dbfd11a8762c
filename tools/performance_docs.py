#!/usr/bin/env python3
"""Writes the tables of docs/performance.md, docs/log and other pages from the records, or with
--check compares them.

Usage: tools/performance_docs.py [--check]

Every page with a mark `<!-- record: FILE -->` gets all tables of that record there, and with
`<!-- summary: FILE -->` one short table; pages in docs get its pictures, too.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench"))

import plot  # noqa: E402

DOCS = ROOT / "docs"
MARK = re.compile(r"(<!-- (record|summary): (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
SUMMARY_ROWS = (1, 8, 16, 64, 256, 1024, 4096)  # m of a GPU's summary.
SUMMARY_LENGTH = 3  # The fewest m of a row that is in a CPU's summary.
SUMMARY_SIDE = 4096  # n and k of the rows that summarize a record of a CPU.


def ratio(row: dict[str, Any], peer: str, key: str = "speedup") -> str:
    """Returns the speedup over a baseline of the same run."""
    for entry in row.get("peers", []):
        if entry["name"] == peer and key in entry:
            return f"{entry[key]:.2f}x"
    return ""


def shared_memory_ceilings(roof: dict[str, Any]) -> str:
    """Formats the peak rates of a CPU, or of a GPU with unified memory."""
    if "call_us" in roof:
        return (
            f"read {roof['read_gbps']:.1f} GB/s; fp32 matrices "
            f"{roof['fp32_matrix_tflops'] * 1e3:.0f} GFLOP/s; an empty call "
            f"{roof['call_us']:.2f} us"
        )
    dots = ""
    if "bf16_dot_tflops" in roof:
        dots = f"bf16 dot products {roof['bf16_dot_tflops'] * 1e3:.0f} GFLOP/s; "
    return (
        f"read {roof['read_gbps']:.1f} GB/s in one stream per thread, "
        f"{roof['read_streams_gbps']:.1f} in four; fp32 FMA {roof['fp32_fma_tflops'] * 1e3:.0f} "
        f"GFLOP/s; bf16 tiles {roof['bf16_tile_tflops'] * 1e3:.0f} GFLOP/s; {dots}"
        f"fork and join {roof['fork_join_us']:.2f} us"
    )


def shared_memory_table(run: dict[str, Any]) -> list[str]:
    """Formats one run on a CPU or a GPU with unified memory as Markdown, without its command."""
    lines = [
        f"Ceilings of this run: {shared_memory_ceilings(run['roofline'])}.",
        "",
        "| format | m, n, k | kernel | ms (10 to 90 %) | GB/s | GFLOP/s | of the roofline "
        "| of plain reading | speedup over OpenBLAS fp32 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in run["results"]:
        spread = f"{row['seconds_p10'] * 1e3:.3f} to {row['seconds_p90'] * 1e3:.3f}"
        lines.append(
            f"| `{row['format']}` g{row['group_size']} {row['scale_type']} "
            f"| {row['m']}, {row['n']}, {row['k']} | `{row['kernel']}` "
            f"| {row['seconds'] * 1e3:.3f} ({spread}) | {row['gbps']:.1f} "
            f"| {row['tflops'] * 1e3:.0f} | {row['roofline_fraction'] * 100:.0f} % "
            f"| {row['read_probe_fraction'] * 100:.0f} % | {ratio(row, 'openblas_fp32')} |"
        )
    return lines


def microseconds(timing: dict[str, Any]) -> str:
    low, high = timing["seconds_p10"] * 1e6, timing["seconds_p90"] * 1e6
    return f"{timing['seconds'] * 1e6:.2f} ({low:.2f} to {high:.2f})"


def gpu_row(row: dict[str, Any]) -> str:
    """Formats one kernel on one problem."""
    chain = row.get("chain")
    dense = [entry for entry in row.get("peers", []) if entry["name"] == "cublas_bf16"]
    cells = [
        f"`{row['format']}` g{row['group_size']} {row['scale_type']}",
        f"{row['m']}, {row['n']}, {row['k']}",
        f"`{row['kernel']}`" + (" *" if row["planned"] else ""),
        f"{row['floor_seconds'] * 1e6:.2f}",
        microseconds(row),
        f"{row['floor_fraction'] * 100:.0f} %",
        microseconds(chain) if chain else "",
        f"{chain['floor_fraction'] * 100:.0f} %" if chain else "",
        microseconds(dense[0]) if dense else "",
        ratio(row, "cublas_bf16"),
        ratio(row, "cublas_bf16", "chain_speedup"),
    ]
    return f"| {' | '.join(cells)} |"


def gpu_table(run: dict[str, Any]) -> list[str]:
    """Formats one run on a GPU as Markdown, without its command."""
    roof = run["roofline"]
    ceilings = (
        f"Ceilings of this run: read {roof['read_bulk_gbps']:.0f} GB/s by TMA bulk copies, "
        f"{roof['read_loads_gbps']:.0f} by loads; an empty kernel {roof['empty_kernel_us']:.2f} us"
    )
    if "cublas_version" in roof:
        rate = roof["bf16_tensor_tflops"]
        ceilings += f"; cuBLAS {roof['cublas_version']} bf16 at 8192^3 {rate:.0f} TFLOP/s"
    return [
        f"{ceilings}.",
        "",
        "| format | m, n, k | kernel | floor us | us isolated | of the floor | us back-to-back "
        "| of the floor | cuBLAS bf16 us | speedup over it, isolated | back-to-back |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(gpu_row(row) for row in run["results"]),
        *(line for text in run["warnings"] for line in ("", f"Not the best plan: {text}.")),
    ]


def of_peer(runs: list[dict[str, Any]], model: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the same model, batch and prompt in transformers, if the record has it."""
    shape = model["path"].partition(",")[0]
    for run in runs:
        for row in run["results"] if run.get("shape") == shape else []:
            if (row["batch"], row["prompt_tokens"]) == (model["batch"], model["prompt_tokens"]):
                return dict(row)
    return None


def phase_cells(tokens: int, phase: dict[str, Any], peer: dict[str, Any] | None) -> list[str]:
    """Formats a prefill or a decode step, next to transformers'."""
    theirs = peer["seconds"] if peer else None
    return [
        f"{phase['seconds'] * 1e3:.2f}",
        f"{tokens / phase['seconds']:,.0f}",
        f"{theirs * 1e3:.2f} ({theirs / phase['seconds']:.1f}x)" if theirs else "",
    ]


def model_tables(runs: list[dict[str, Any]]) -> list[str]:
    """Formats a record of models as one Markdown table."""
    peers = [run for run in runs if run["level"] == "peer"]
    against = f"transformers {peers[0]['transformers']} bf16" if peers else "transformers bf16"
    lines = [
        f"| model | batch, tokens of a prompt | prefill ms | tokens/s | {against} ms "
        f"| decode step ms | tokens/s | {against} ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    shown = ""
    for run in (run for run in runs if "model" in run):
        model = run["model"]
        title = f"{model['path']}, {model['bits_per_weight']:.2f} bits per weight"
        phases = {row["phase"]: row for row in run["results"]}
        peer = of_peer(peers, model) or {}
        cells = [
            "" if title == shown else title,
            f"{model['batch']}, {model['prompt_tokens']}",
        ]
        for name in ("prefill", "decode"):
            cells += phase_cells(phases[name]["tokens"], phases[name], peer.get(name))
        shown = title
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sparsity_table(runs: list[dict[str, Any]]) -> list[str]:
    """Formats runs of dense and 2:4 weights as Markdown, a row for each pair."""
    lines = [
        "| m x n x k | format | threads | dense, ms | 2:4, ms | dense / 2:4 |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        pairs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
        for row in run["results"]:
            key = (row["m"], row["n"], row["k"], row["format"], row["group_size"])
            pairs.setdefault(key, {})[row["sparsity"]] = row
        for (m, n, k, name, group), pair in pairs.items():
            dense, sparse = (pair[how]["seconds"] * 1e3 for how in ("dense", "2:4"))
            lines.append(
                f"| {m} x {n} x {k} | `{name}` g{group} | {run['device']['threads']} "
                f"| {dense:.3f} | {sparse:.3f} | {dense / sparse:.2f} |"
            )
    return lines


def gpu_sparsity_table(runs: list[dict[str, Any]]) -> list[str]:
    """Formats runs of dense and 2:4 weights on a GPU as Markdown, a row for each pair."""
    lines = [
        "Microseconds back-to-back.",
        "",
        "| m x n x k | format | dense | 2:4 | dense / 2:4 | cuBLAS bf16 | cuSPARSELt bf16 |",
        "|---|---|---|---|---|---|---|",
    ]
    peers = {
        (row["m"], row["n"], row["k"]): row["sparse_seconds"]
        for run in runs
        for row in (run["results"] if run["level"] == "peer" else [])
    }
    for run in runs:
        pairs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
        for row in run["results"] if run["level"] != "peer" else []:
            key = (row["m"], row["n"], row["k"], row["format"], row["group_size"])
            pairs.setdefault(key, {})[row["sparsity"]] = row
        for (m, n, k, name, group), pair in pairs.items():
            dense, sparse = (pair[how]["chain"]["seconds"] * 1e6 for how in ("dense", "2:4"))
            cublas = "".join(
                f"{entry['chain_speedup'] * dense:.1f}"
                for entry in pair["dense"].get("peers", [])
                if "chain_speedup" in entry
            )
            sparse_peer = f"{peers[m, n, k] * 1e6:.1f}" if cublas and (m, n, k) in peers else ""
            lines.append(
                f"| {m} x {n} x {k} | `{name}` g{group} | {dense:.1f} | {sparse:.1f} "
                f"| {dense / sparse:.2f} | {cublas} | {sparse_peer} |"
            )
    return lines


def server_table(runs: list[dict[str, Any]]) -> list[str]:
    """Formats a record of servers as one Markdown table."""
    lines = [
        "| program, weights | clients | tokens of a prompt, cached | tokens/s | first token, s "
        "| between chunks, ms | errors |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (row for run in runs for row in run["results"]):
        first, gap = row["first_token_seconds"] or {}, row["gap_seconds"] or {}
        cells = [
            f"{row['program']} ({row['version']}), {row['weights']}",
            str(row["clients"]),
            f"{row['prompt_tokens']:.0f}, {row['cached_tokens']:.0f}",
            f"{row['tokens_per_second']:,.1f}",
            ", ".join(f"{name} {value:.3g}" for name, value in first.items()),
            ", ".join(f"{name} {value * 1e3:,.1f}" for name, value in gap.items()),
            str(sum(row["errors"].values())),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def server_summary(runs: list[dict[str, Any]]) -> list[str]:
    """Formats a record of servers as a row per program and kind of prompts."""
    rows = [row for run in runs for row in run["results"]]
    columns = sorted({row["clients"] for row in rows})
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        kind = "prompts that begin alike" if row["shared_words"] else "other prompts"
        first = row["first_token_seconds"]
        text = f"{row['tokens_per_second']:,.1f}" + (f" ({first['p50']:.2g} s)" if first else "")
        cells.setdefault(f"{row['program']}, {kind}", {})[row["clients"]] = text
    return [
        "Tokens per second (median time to the first token):",
        "",
        f"| clients | {' | '.join(map(str, columns))} |",
        f"|{'---|' * (1 + len(columns))}",
        *(f"| {name} | {' | '.join(row.get(count, '') for count in columns)} |"
          for name, row in cells.items()),
    ]


def table(run: dict[str, Any]) -> list[str]:
    """Formats one run as Markdown."""
    level = f" with `MARLIN_CPU={run['level']}`" if run["level"] != "best" else ""
    lines = gpu_table(run) if "read_bulk_gbps" in run["roofline"] else shared_memory_table(run)
    return [f"`bench {' '.join(run['arguments'])}`{level}", "", *lines]


def short_grid(cells: dict[str, dict[int, str]], corner: str) -> list[str]:
    """Formats a table with a row per name and a column per m."""
    columns = sorted({m for row in cells.values() for m in row})
    return [
        f"| {' | '.join([corner, *(f'm = {m}' for m in columns)])} |",
        f"|{'---|' * (1 + len(columns))}",
        *(
            f"| {name} | {' | '.join(row.get(m, '') for m in columns)} |"
            for name, row in cells.items()
        ),
    ]


def gpu_summary(runs: list[dict[str, Any]]) -> list[str]:
    """Formats the planned kernels of the first kind of weights: times back-to-back, and the speedup
    over cuBLAS, by matrix and m."""
    first = runs[0]["results"][0]
    kind = [first[key] for key in ("format", "group_size", "scale_type")]
    cells: dict[str, dict[int, str]] = {}
    for run in (run for run in runs if "--accuracy" not in run["arguments"]):
        for row in run["results"]:
            other = [row[key] for key in ("format", "group_size", "scale_type")] != kind
            speedup = ratio(row, "cublas_bf16", "chain_speedup")
            if other or not row["planned"] or not speedup or row["m"] not in SUMMARY_ROWS:
                continue
            time = f"{row['chain']['seconds'] * 1e6:,.1f} ({speedup})"
            cells.setdefault(f"{row['n']} x {row['k']}", {})[row["m"]] = time
    name = f"`{kind[0]}` g{kind[1]} {kind[2]}, n x k"
    return [
        "Microseconds back-to-back (speedup over cuBLAS bf16):",
        "",
        *short_grid(cells, name),
    ]


def shared_memory_summary(runs: list[dict[str, Any]]) -> list[str]:
    """Formats the square matrices of a record of a CPU: times by weights, kernel and m."""
    cells: dict[str, dict[int, str]] = {}
    for run in (run for run in runs if "--activations" not in run["arguments"]):
        for row in run["results"]:
            if (row["n"], row["k"]) != (SUMMARY_SIDE, SUMMARY_SIDE):
                continue
            name = f"`{row['format']}` g{row['group_size']} {row['scale_type']}, `{row['kernel']}`"
            speedup = ratio(row, "openblas_fp32")
            time = f"{row['seconds'] * 1e3:#.3g}" + (f" ({speedup})" if speedup else "")
            cells.setdefault(name, {}).setdefault(row["m"], time)
    kept = {name: row for name, row in cells.items() if len(row) >= SUMMARY_LENGTH}
    return [
        f"Milliseconds for {SUMMARY_SIDE} x {SUMMARY_SIDE} (speedup over OpenBLAS fp32):",
        "",
        *short_grid(kept, "weights, kernel"),
    ]


def rows_of(path: Path, runs: list[dict[str, Any]], summary: bool) -> list[str]:
    """Formats the runs of a record, or their summary."""
    on_gpu = "read_bulk_gbps" in runs[0].get("roofline", {})
    if "model" in runs[0]:
        return [*model_tables(runs), ""]
    if path.stem.startswith("serve"):
        return [*(server_summary(runs) if summary else server_table(runs)), ""]
    if path.stem.startswith("sparsity"):
        return [*(gpu_sparsity_table(runs) if on_gpu else sparsity_table(runs)), ""]
    if summary:
        return [*(gpu_summary(runs) if on_gpu else shared_memory_summary(runs)), ""]
    return [line for run in runs for line in (*table(run), "")]


def tables(path: Path, with_pictures: bool = False, summary: bool = False) -> str:
    """Formats all runs of a record, or their summary, if it exists."""
    if not path.exists():
        return "Not measured yet.\n"
    runs = json.loads(path.read_text())["runs"]
    first = runs[0]
    device = first["device"]["model"]
    if first["device"]["threads"] > 1:
        device += f", {first['device']['threads']} threads"
    lines = [f"{device}, {first['date']}, commit {first['commit']}.", ""]
    lines += plot.markdown(path.stem) if with_pictures else []
    return "\n".join([*lines, *rows_of(path, runs, summary), ""])


def fill(text: str, with_pictures: bool = False) -> str:
    """Returns the page with the tables of its records between the marks."""
    return MARK.sub(
        lambda m: m[1] + tables(ROOT / m[3], with_pictures, m[2] == "summary") + m[4], text
    )


def pages() -> dict[Path, str]:
    """Returns the texts of all pages that have a mark."""
    texts = {page: page.read_text() for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]}
    return {page: text for page, text in sorted(texts.items()) if MARK.search(text)}


def main() -> int:
    old = pages()
    fresh = {page: fill(text, with_pictures=page.parent == DOCS) for page, text in old.items()}
    stale = [page for page in old if old[page] != fresh[page]]
    if "--check" in sys.argv[1:]:
        for page in stale:
            name = page.relative_to(ROOT)
            print(f"{name} differs from its records: run tools/performance_docs.py")
        return 1 if stale else 0
    for page in stale:
        page.write_text(fresh[page])
    return 0


if __name__ == "__main__":
    sys.exit(main())
