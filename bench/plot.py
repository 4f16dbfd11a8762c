#!/usr/bin/env python3
"""Draws the pictures of docs/images from records, with matplotlib.

    bench/plot.py [-o FOLDER] [NAME...]

PICTURES, at the end, is the table of pictures: records, kind, height, caption. A picture is SVG
with text as text, follows the reader's light or dark colour scheme, and has the date and commit of
its records. Its metadata has a hash of their values and of this file, by which tests recognize a
stale picture without matplotlib. `./dev docs` installs matplotlib and draws all.
"""

import argparse
import hashlib
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "records"
IMAGES = ROOT / "docs" / "images"

# Colours on light and on dark paper. The dark ones replace the light ones by a style sheet.
Colour = tuple[str, str]
PAPER, INK = ("#ffffff", "#0d1117"), ("#1f2328", "#e6edf3")
SOFT, FAINT = ("#59636e", "#9198a1"), ("#d0d7de", "#30363d")
BLUE, ORANGE = ("#0969da", "#58a6ff"), ("#bc4c00", "#f0883e")
PURPLE, GREEN = ("#8250df", "#a371f7"), ("#1a7f37", "#3fb950")
COLOURS = (PAPER, INK, SOFT, FAINT, BLUE, ORANGE, PURPLE, GREEN)

INCHES = 830 / 96  # The width of a README on GitHub, in CSS pixels.
SMALL = 6.8  # The size of small print, in points.
STYLE = {
    "figure.dpi": 72, "figure.facecolor": PAPER[0], "savefig.facecolor": PAPER[0],
    "figure.titlesize": 11, "figure.titleweight": "bold",
    "svg.fonttype": "none", "svg.hashsalt": "metal-marlin",
    "font.family": "DejaVu Sans", "font.size": 8, "text.color": INK[0],
    "axes.facecolor": PAPER[0], "axes.edgecolor": SOFT[0], "axes.labelcolor": SOFT[0],
    "axes.titlesize": 8.8, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.grid": True, "grid.color": FAINT[0], "grid.linewidth": 0.6,
    "xtick.color": SOFT[0], "ytick.color": SOFT[0], "xtick.labelsize": 7.5, "ytick.labelsize": 7.5,
    "legend.frameon": False, "legend.fontsize": 7.5, "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
}  # fmt: skip

Row = dict[str, Any]
Record = dict[str, Any]
Point = tuple[float, float]


# --- what records say -----------------------------------------------------------------------------


def source(record: Record) -> str:
    """Returns a record's file, device, date and commit."""
    first = record["runs"][0] if "runs" in record else record
    device = first.get("device", {}).get("model") or first.get("processor", "").partition(" (")[0]
    parts = (record["file"], device, first["date"], f"commit {first['commit']}")
    return ", ".join(part for part in parts if part)


def peer_of(row: Row, name: str) -> Row:
    """Returns a row's entry of another library, or an empty one."""
    found: list[Row] = [entry for entry in row.get("peers", []) if entry["name"] == name]
    return found[0] if found else {}


def by_shape(record: Record) -> dict[tuple[int, int], list[Row]]:
    """Maps (k, n) to the planned kernels' rows by m, for the record's first kind of weights."""
    rows = [row for run in record["runs"] for row in run["results"]
            if row["op"] == "gemm" and row.get("planned") and "floor_seconds" in row]
    kind = ("format", "group_size", "scale_type", "activations")
    shapes: dict[tuple[int, int], dict[int, Row]] = {}
    for row in rows:
        # The first run of a shape has the baseline; later ones may have another accuracy class.
        if all(row[name] == rows[0][name] for name in kind):
            shapes.setdefault((row["k"], row["n"]), {}).setdefault(row["m"], row)
    return {shape: [by_m[m] for m in sorted(by_m)] for shape, by_m in shapes.items()
            if len(by_m) > 1}


def kind_of(record: Record) -> str:
    """Returns the weights that by_shape and by_level select."""
    row = record["runs"][0]["results"][0]
    return f"{row['format']} in groups of {row['group_size']}, {row['activations']} activations"


def cublas_of(record: Record) -> str:
    return f"cuBLAS {record['runs'][0]['roofline'].get('cublas_version', '')} bf16"


def by_level(record: Record) -> dict[str, list[Row]]:
    """Maps MARLIN_CPU to the rows by m that OpenBLAS was timed with, for k = n = 4096."""
    levels: dict[str, dict[int, Row]] = {}
    for run in record["runs"]:
        for row in run["results"]:
            if (row["k"], row["n"]) == (4096, 4096) and peer_of(row, "openblas_fp32"):
                levels.setdefault(run["level"], {}).setdefault(row["m"], row)
    return {level: [rows[m] for m in sorted(rows)] for level, rows in levels.items()}


def losses(rows: list[Row], method: str, recipes: str = "uniform:") -> dict[str, Point]:
    """Maps the recipes that begin so to their bits per quantized weight and KL divergence."""
    found = [(row["recipe"].removeprefix(recipes), row["quantized_bits_per_weight"], row["kl_mean"])
             for row in rows if row["method"] == method and row["recipe"].startswith(recipes)]
    return {name: (bits, kl) for name, bits, kl in sorted(found, key=lambda one: one[1])}


# quality_peers.py asks every program for 4-bit codes in groups of 64, each with a scale of 16 bits
# and an integer zero, which our files keep in 16 bits and the files of the others in 4.
OUR_BITS, PEER_BITS = 4 + (16 + 16) / 64, 4 + (16 + 4) / 64


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one model and batch, and transformers' if recorded."""

    name: str
    ours: float
    theirs: float | None


def speeds(record: Record, phase: str) -> list[Speed]:
    """Returns the speeds of a phase, `prefill` or `decode`, of every model and batch."""
    theirs = {(run["shape"], row["batch"], row["prompt_tokens"]): row[phase]["seconds"]
              for run in record["runs"] if run["level"] == "peer" for row in run["results"]}
    found = []
    for run in (run for run in record["runs"] if "model" in run):
        model = run["model"]
        row = next(row for row in run["results"] if row["phase"] == phase)
        shape = model["path"].partition(",")[0]
        seconds = theirs.get((shape, model["batch"], model["prompt_tokens"]))
        name = f"{shape}\nbatch {model['batch']}, prompt {model['prompt_tokens']}"
        found.append(Speed(name, row["tokens"] / row["seconds"],
                           row["tokens"] / seconds if seconds else None))
    return found


def size_of(record: Record) -> str:
    """Returns what the models of a record have in common: layers and weights."""
    sizes = {run["model"]["path"].partition(", ")[2] for run in record["runs"] if "model" in run}
    return "; ".join(sorted(sizes))


# --- parts of pictures ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Points with one mark; `names` says whether their names are written next to them."""

    label: str
    colour: Colour
    mark: str
    points: dict[str, Point]
    line: str = ""
    names: bool = False
    hollow: bool = False


def small_print(figure: Any, *lines: str) -> None:
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=SMALL, color=SOFT[0])


def log_ticks(axis: Any, values: Iterable[float]) -> None:
    """Makes an axis logarithmic, with ticks at the values that it shows."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    shown = [value for value in values if low <= value <= high]
    axis.set_ticks(shown, [f"{value:g}" if value % 1000 else f"{value / 1000:.0f}k"
                           for value in shown])
    axis.set_ticks([], minor=True)


def draw_series(axes: Any, series: Iterable[Series]) -> None:
    for one in series:
        axes.plot(*zip(*one.points.values(), strict=True), marker=one.mark, linestyle=one.line,
                  color=one.colour[0], label=one.label,
                  markerfacecolor=PAPER[0] if one.hollow else one.colour[0])


def write_names(axes: Any, series: Iterable[Series]) -> None:
    """Writes the names of points where they cover no other name, no mark and no line."""
    from matplotlib.transforms import Bbox

    axes.get_figure(root=True).draw_without_rendering()  # Decides the size of the axes.
    taken = [Bbox.from_bounds(x - 2.5, y - 2.5, 5, 5) for line in axes.lines
             for path in [line.get_transform().transform_path(line.get_path())]
             for x, y in path.interpolated(20 if line.get_linestyle() == "-" else 1).vertices]
    # Next to the point, otherwise below or above with a line to it.
    places = [(x, y, side) for y in (0, -8, 8, -15, 15, -22, 22, -29, 29)
              for x, side in ((6, "left"), (-6, "right"))]
    named = [(name, one, point) for one in series if one.names
             for name, point in one.points.items()]
    for name, one, point in sorted(named, key=lambda item: -item[2][1]):
        for x, y, side in places:
            text = axes.annotate(name, point, (x, y), textcoords="offset points", ha=side,
                                 va="center", fontsize=SMALL, color=one.colour[0], in_layout=False)
            box = text.get_window_extent()
            if axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1 and not any(
                    box.overlaps(other) for other in taken):
                break
            text.remove()
        else:
            raise ValueError(f"{name}: no place for this name")
        taken.append(box)
        if y:
            axes.annotate("", point, (x, y), textcoords="offset points", in_layout=False,
                          arrowprops={"arrowstyle": "-", "color": one.colour[0], "linewidth": 0.5,
                                      "shrinkA": 0, "shrinkB": 0})


def loss_axes(axes: Any, title: str, series: list[Series]) -> None:
    """Draws KL divergences against bits per weight."""
    draw_series(axes, series)
    log_ticks(axes.yaxis, (base * 10.0**power for power in range(-5, 1) for base in (1, 2, 5)))
    axes.set(title=title, xlabel="bits per quantized weight", ylabel="KL divergence, log scale")
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + (high - low) / 12)  # Room for the last names.
    axes.legend(loc="upper right")


def speed_axes(axes: Any, title: str, record: Record, phase: str) -> None:
    """Draws tokens per second of a phase next to transformers', and the ratio."""
    found = speeds(record, phase)
    peers = [run for run in record["runs"] if run["level"] == "peer"]
    for row, speed in enumerate(found):
        if speed.theirs:
            axes.plot((speed.theirs, speed.ours), (row, row), color=FAINT[0], linewidth=3)
            axes.annotate(f"{speed.ours / speed.theirs:.1f}x", (speed.ours, row), (7, -3),
                          textcoords="offset points", fontweight="bold")
    theirs = [(speed.theirs, row) for row, speed in enumerate(found) if speed.theirs]
    if theirs:
        axes.plot(*zip(*theirs, strict=True), "s", color=ORANGE[0],
                  label=f"transformers {peers[0]['transformers']}, bf16")
    axes.plot([speed.ours for speed in found], range(len(found)), "o", color=BLUE[0],
              markersize=6, label="metal-marlin, FP4")
    axes.set_yticks(range(len(found)), [speed.name for speed in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.margins(x=0.18)
    log_ticks(axes.xaxis, (base * 10.0**power for power in range(7) for base in (1, 3)))
    axes.set(xlabel="tokens/s, log scale")
    axes.set_title(title, pad=30)
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 0.98))


# --- kinds of pictures ----------------------------------------------------------------------------


def quality_and_speed(
    figure: Any, formats: Record, mixed: Record, peers: Record, models: Record
) -> None:
    """Loss against bits per weight, and decode speed, next to other programs."""
    model = "tiny-qwen3-moe"
    rows = formats["models"][model] + mixed["models"][model]
    loss = {row["program"]: row["kl_mean"] for row in peers["models"][model]}
    version = peers["packages"]
    series = [
        Series("round to nearest", SOFT, ".", losses(rows, "rtn")),
        Series("gptq, one format", BLUE, "o", losses(rows, "gptq"), names=True),
        Series("gptq, mixed formats (--target-bpw)", GREEN, "D",
               losses(rows, "gptq", "target-bpw:"), line="-"),
        Series("gptq, u4/g64, the peers' calibration text", BLUE, "o",
               {"": (OUR_BITS, loss["metal-marlin, gptq"])}, hollow=True),
        Series(f"GPTQModel {version['gptqmodel']}", ORANGE, "s",
               {"": (PEER_BITS, loss["GPTQModel, gptq"])}),
        Series(f"llm-compressor {version['llmcompressor']}", PURPLE, "^",
               {"": (PEER_BITS, loss["llm-compressor, GPTQ"])}),
    ]
    left, right = figure.subfigures(1, 2, width_ratios=(1.3, 1))
    tokens = {row["tokens"] for row in rows + peers["models"][model] if "tokens" in row}
    small_print(left, f"{model}, 2 M parameters; metal-marlin compare --exact, "
                f"{' or '.join(map(str, tokens))} tokens",
                "calibration: text the model wrote; peers, hollow: other windows of the held-out "
                "text", *map(source, (formats, mixed, peers)))
    small_print(right, size_of(models), source(models))
    speed_axes(right.subplots(), "Decode speed", models, "decode")
    axes = left.subplots()
    loss_axes(axes, f"KL divergence from bf16, {model}", series)
    write_names(axes, series)


def loss_by_bits(figure: Any, *records: Record) -> None:
    """KL divergence of every format and method against bits per weight, a panel for each model."""
    panels = figure.subplots(1, len(records[0]["models"]), sharey=True)
    drawn = []
    for axes, model in zip(panels, records[0]["models"], strict=True):
        rows = [row for record in records for row in record["models"][model]]
        mixed = losses(rows, "gptq", "target-bpw:")
        series = [
            Series("rtn", SOFT, ".", losses(rows, "rtn")),
            Series("mse", ORANGE, "^", losses(rows, "mse")),
            Series("gptq", BLUE, "o", losses(rows, "gptq"), names=True),
        ]
        if mixed:
            series.append(Series("gptq, mixed formats", GREEN, "D", mixed, line="-"))
        loss_axes(axes, model, series)
        drawn.append((axes, series))
    small_print(figure, *map(source, records))
    for axes, series in drawn:
        write_names(axes, series)


def over_floor(figure: Any, record: Record) -> None:
    """Times over the floor against m, a panel for each matrix; all have the same axes."""
    shapes = by_shape(record)
    timings: list[tuple[str, Colour, str, Callable[[Row], Row | None]]] = [
        ("isolated", BLUE, "-", lambda row: row),
        ("back-to-back with PDL", GREEN, "-", lambda row: row.get("chain")),
        (cublas_of(record), ORANGE, ":", lambda row: peer_of(row, "cublas_bf16")),
    ]
    panels = list(figure.subplots(-(-len(shapes) // 3), 3, sharex=True, sharey=True).flat)
    for axes, ((k, n), rows) in zip(panels, shapes.items(), strict=False):
        for label, colour, line, timing_of in timings:
            points = {str(row["m"]): (row["m"], timing["seconds"] / row["floor_seconds"])
                      for row in rows if (timing := timing_of(row))}
            draw_series(axes, [Series(label, colour, ".", points, line)])
        axes.axhline(1, color=INK[0], linewidth=0.8, linestyle="--")
        axes.set_title(f"k {k}, n {n}")
        log_ticks(axes.xaxis, (8.0**power for power in range(6)))
        log_ticks(axes.yaxis, (2.0**power for power in range(-2, 6)))
    for axes in panels[::3]:
        axes.set_ylabel("time / floor, log scale")
    for axes in panels[max(0, len(shapes) - 3):len(shapes)]:
        axes.set_xlabel("rows (m)")
        axes.tick_params(labelbottom=True)
    for axes in panels[len(shapes):]:
        axes.set_axis_off()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    small_print(figure, kind_of(record), source(record))


def over_cublas(figure: Any, record: Record) -> None:
    """Speedups over cuBLAS as numbers and colours, a row for each matrix, a column for each m."""
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, ListedColormap

    # White is within 5 % of cuBLAS; the depth of a colour is the logarithm of the ratio.
    bounds = [0.5, 0.65, 0.8, 0.95, 1.05, 1.25, 1.6, 2, 2.5, 3.2, 4]
    depths = [math.log(low * high) / 2 / math.log(4) for low, high in zip(bounds, bounds[1:],
                                                                         strict=False)]
    colours = ListedColormap([colormaps["RdBu"](0.5 + depth / 2) for depth in depths])
    shapes = by_shape(record)
    ms = sorted({row["m"] for rows in shapes.values() for row in rows})
    panels = figure.subplots(2, 1, sharex=True)
    for axes, key, how in zip(panels, ("speedup", "chain_speedup"),
                              ("isolated", "back-to-back with PDL"), strict=True):
        found = {(shape, row["m"]): peer_of(row, "cublas_bf16").get(key)
                 for shape, rows in shapes.items() for row in rows}
        values = [[found.get((shape, m)) or math.nan for m in ms] for shape in shapes]
        mesh = axes.pcolormesh(values, norm=BoundaryNorm(bounds, len(depths)), cmap=colours,
                               edgecolors=PAPER[0], linewidth=0.8)
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                if not math.isnan(value):
                    axes.text(x + 0.5, y + 0.5, f"{value:.2f}", ha="center", va="center",
                              fontsize=7, color="#fefefe" if value > 2.5 else "#000000")
        axes.set(title=f"Speedup over {cublas_of(record)}, {how}", ylabel="k, n")
        axes.set_xticks([x + 0.5 for x in range(len(ms))], ms)
        axes.set_yticks([y + 0.5 for y in range(len(shapes))], [f"{k}, {n}" for k, n in shapes])
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.tick_params(length=0)
    panels[-1].set_xlabel("rows (m)")
    figure.colorbar(mesh, ax=panels, label="cuBLAS time / ours", aspect=40, pad=0.01,
                    ticks=bounds, format="%g", extend="both")
    small_print(figure, kind_of(record), source(record))


def over_openblas(figure: Any, record: Record) -> None:
    """Speedups over OpenBLAS and throughput against m, a line for each choice of instructions."""
    left, right = figure.subplots(1, 2)
    styles = {"best": ("all instructions of this CPU", BLUE, "o"),
              "avx512": ("MARLIN_CPU=avx512", GREEN, "D"), "avx2": ("MARLIN_CPU=avx2", PURPLE, "^")}
    levels = by_level(record)
    for level, rows in levels.items():
        speedups = {str(row["m"]): (row["m"], peer_of(row, "openblas_fp32")["speedup"])
                    for row in rows}
        ours = {str(row["m"]): (row["m"], row["tflops"] * 1e3) for row in rows}
        draw_series(left, [Series(*styles[level], speedups, "-")])
        draw_series(right, [Series(*styles[level], ours, "-")])
        if level == "best":
            theirs = {m: (x, flops / speedups[m][1]) for m, (x, flops) in ours.items()}
            draw_series(right, [Series("OpenBLAS fp32", ORANGE, "s", theirs, ":")])
    for axes in (left, right):
        axes.set_xlabel("rows (m)")
        log_ticks(axes.xaxis, [row["m"] for row in levels["best"]])
        log_ticks(axes.yaxis, (base * 10.0**power for power in range(-1, 5) for base in (1, 2, 5)))
    left.axhline(1, color=INK[0], linewidth=0.8, linestyle="--")
    left.set(title="Speedup over OpenBLAS fp32", ylabel="OpenBLAS time / ours, log scale")
    right.set(title="Throughput", ylabel="GFLOP/s, log scale")
    right.legend()
    threads = record["runs"][0]["device"]["threads"]
    small_print(figure, f"{kind_of(record)}; k = n = 4096; {threads} threads", source(record))


def model_speed(figure: Any, record: Record) -> None:
    """Decode and prefill speed of every model and batch next to transformers."""
    left, right = figure.subplots(1, 2, sharey=True)
    speed_axes(left, "Decode", record, "decode")
    speed_axes(right, "Prefill", record, "prefill")
    small_print(figure, size_of(record), source(record))


@dataclass(frozen=True)
class Picture:
    """One file of docs/images: its records, its kind, its height in CSS pixels, its caption."""

    records: tuple[str, ...]
    draw: Callable[..., None]
    height: int
    caption: str


GEMM_CAPTION = "Speed against m compared with OpenBLAS, for each choice of instructions"
MODEL_CAPTION = "Tokens per second of {} compared with transformers, for each batch and prompt"
PICTURES = {
    "quality-and-speed": Picture(
        ("quality-formats", "quality-bits", "quality-peers", "model-h200"), quality_and_speed, 440,
        "KL divergence against bits per weight, with GPTQModel and llm-compressor, and decode "
        "speed on an NVIDIA H200, with transformers",
    ),
    "quality-formats": Picture(
        ("quality-formats",), loss_by_bits, 400,
        "KL divergence from bf16 against bits per quantized weight, of every format and method",
    ),
    "quality-bits": Picture(
        ("quality-bits",), loss_by_bits, 400,
        "KL divergence from bf16 against bits per quantized weight, of mixed formats and of one "
        "format for all",
    ),
    "gemm-h200-cublas": Picture(
        ("gemm-h200",), over_cublas, 470,
        "Speedup over cuBLAS for each matrix and m; white is within 5 %",
    ),
    "gemm-h200-floor": Picture(
        ("gemm-h200",), over_floor, 560,
        "Time as a multiple of the floor, against m, for each matrix",
    ),
    "gemm-zen5-openblas": Picture(("gemm-zen5",), over_openblas, 330, GEMM_CAPTION),
    "gemm-xeon-amx-openblas": Picture(("gemm-xeon-amx",), over_openblas, 330, GEMM_CAPTION),
    "model-h200": Picture(
        ("model-h200",), model_speed, 400, MODEL_CAPTION.format("an NVIDIA H200")),
    "model-h100": Picture(
        ("model-h100",), model_speed, 400, MODEL_CAPTION.format("an NVIDIA H100")),
}  # fmt: skip


# --- files ----------------------------------------------------------------------------------------


def digest(picture: Picture) -> str:
    """Returns a hash of what a picture is made from: this file and the values of its records."""
    values = [json.dumps(load(name), sort_keys=True) for name in picture.records]
    return hashlib.sha256(Path(__file__).read_bytes() + "\n".join(values).encode()).hexdigest()


def markdown(record: str) -> list[str]:
    """Returns the lines that show the pictures of one record, with captions, on a page of docs."""
    return [line for name, picture in PICTURES.items() if picture.records == (record,)
            for line in (f"![{picture.caption}](images/{name}.svg)", "", f"*{picture.caption}.*",
                         "")]


def load(name: str) -> Record:
    return {"file": f"{name}.json", **json.loads((RECORDS / f"{name}.json").read_text())}


def figure_of(picture: Picture, records: list[Record]) -> Any:
    """Draws a picture; call it and save the figure within `style`."""
    from matplotlib.figure import Figure

    figure = Figure((INCHES, picture.height / 96), layout="constrained")
    picture.draw(figure, *records)
    return figure


def style() -> Any:
    """Returns a context in which matplotlib draws as it does everywhere else."""
    import matplotlib.style

    return matplotlib.style.context(["default", STYLE])


def style_sheet() -> str:
    """Returns fonts like those that the text was set with, and the dark colours."""
    dark = [f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
            for light, dark in COLOURS for what in ("fill", "stroke")]
    fonts = 'text { font-family: "DejaVu Sans", Verdana, sans-serif }'
    return "\n".join([fonts, "@media (prefers-color-scheme: dark) {", *dark, "}"])


# What a browser does not need: 40 % of a file.
NEEDLESS = (
    (r"<!--.*?-->\n?", ""),
    (r"\n\s+", "\n"),
    (r"(?<=[0-9z]) ?\n(?=[LQCz\"])", ""),
    (r" transform=\"rotate\(-0 [^\"]*\"", ""),
    (r"font-family: 'DejaVu Sans'; ", ""),
    (r"(?<=[0-9]\.[0-9]{2})[0-9]+(?=[^<>]*>)", ""),
)


def svg(picture: Picture, records: list[Record], identifier: str) -> str:
    """Returns the file of a picture. The same matplotlib makes the same bytes."""
    out = io.StringIO()
    with style():
        figure_of(picture, records).savefig(out, format="svg", metadata={
            "Title": picture.caption, "Source": "; ".join(map(source, records)),
            "Identifier": identifier, "Date": None})
    text = out.getvalue()
    for pattern, instead in NEEDLESS:
        text = re.sub(pattern, instead, text, flags=re.DOTALL)
    return text.replace("</svg>", f"<style>{style_sheet()}</style>\n</svg>")


def render(picture: Picture) -> str:
    return svg(picture, [load(name) for name in picture.records], digest(picture))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    parser.add_argument("-o", "--output", default=IMAGES, type=Path, help="default: docs/images")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in PICTURES]
    if unknown:
        parser.error(f"{unknown[0]}: expected one of {', '.join(PICTURES)}")
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        (options.output / f"{name}.svg").write_text(render(PICTURES[name]))


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as error:
        sys.exit(f"bench/plot.py: {error}; ./dev docs installs matplotlib")
