"""The pictures of docs/images: of their records, and drawn as the numbers say.

Without matplotlib, only committed files and what is read from records are tested.
"""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "tools")]

import plot  # noqa: E402
from gpu_record_test import model_runs, record, row  # noqa: E402

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
if HAS_MATPLOTLIB:
    import matplotlib
    from matplotlib.axis import Axis
    from matplotlib.text import Text

DUBLIN = "{http://purl.org/dc/elements/1.1/}"
SVG = "{http://www.w3.org/2000/svg}"
COMMAND = [sys.executable, "-B", str(ROOT / "bench/plot.py")]


def committed(name: str) -> str:
    return (plot.IMAGES / f"{name}.svg").read_text()


def made_up() -> dict[str, Any]:
    return {"file": "made-up.json", **record()}


def loss(recipe: str, method: str, bits: float, kl: float) -> dict[str, Any]:
    return {"recipe": recipe, "method": method, "quantized_bits_per_weight": bits, "kl_mean": kl}


class Committed(unittest.TestCase):
    def test_every_picture_is_of_its_records(self) -> None:
        for name, picture in plot.PICTURES.items():
            with self.subTest(name):
                root = ElementTree.fromstring(committed(name))
                hashes = [element.text for element in root.iter(f"{DUBLIN}identifier")]
                self.assertEqual(hashes, [plot.digest(picture)], "run ./dev docs")
                texts = {element.text for element in root.iter(f"{SVG}text")}
                for of in picture.records:
                    small_print = plot.source(plot.load(of))
                    self.assertRegex(small_print, r"\d{4}-\d\d-\d\d, commit [0-9a-f]{7}")
                    self.assertIn(small_print, texts)

    def test_the_table_has_all_pictures(self) -> None:
        drawn = {path.stem for path in plot.IMAGES.glob("*.svg")} - {"layers"}
        self.assertEqual(drawn, set(plot.PICTURES))

    def test_every_picture_is_shown(self) -> None:
        pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
        for name in plot.PICTURES:
            self.assertIn(f"](images/{name}.svg)", pages)

    def test_every_picture_is_small_and_dark_at_night(self) -> None:
        for name in plot.PICTURES:
            text = committed(name)
            self.assertLess(len(text), 80_000, name)
            self.assertIn("prefers-color-scheme: dark", text)
            self.assertIn('[style*="fill: #ffffff"] { fill: #0d1117 !important }', text)


class Records(unittest.TestCase):
    def test_only_the_first_kind_of_weights_and_planned_kernels(self) -> None:
        document = made_up()
        other = {**row(64, 4096, 4096), "format": "u4"}
        slow = {**row(1, 4096, 4096), "planned": False, "seconds": 1.0}
        document["runs"][0]["results"] = [slow, *document["runs"][0]["results"], other]
        self.assertEqual(plot.by_shape(document), plot.by_shape(made_up()))
        self.assertEqual([found["m"] for found in plot.by_shape(document)[4096, 768]], [1, 4, 16])

    def test_levels_beside_openblas(self) -> None:
        def run(level: str, *results: dict[str, Any]) -> dict[str, Any]:
            return {"level": level, "results": list(results)}

        def case(m: int, speedup: float | None, n: int = 4096) -> dict[str, Any]:
            peers = [{"name": "openblas_fp32", "speedup": speedup}] if speedup else []
            return {"m": m, "n": n, "k": 4096, "peers": peers}

        runs = [run("best", case(4, 3.0), case(1, 9.0, n=768)), run("best", case(1, 2.0)),
                run("best", case(16, None)), run("avx2", case(1, 1.5))]
        levels = plot.by_level({"runs": runs})
        speedups = {level: [(found["m"], found["peers"][0]["speedup"]) for found in rows]
                    for level, rows in levels.items()}
        self.assertEqual(speedups, {"best": [(1, 2.0), (4, 3.0)], "avx2": [(1, 1.5)]})

    def test_losses_by_bits(self) -> None:
        rows = [loss("uniform:b", "gptq", 4.5, 0.02), loss("uniform:a", "gptq", 3.0, 0.3),
                loss("uniform:a", "rtn", 3.0, 0.8), loss("target-bpw:3", "gptq", 3.0, 0.1)]
        self.assertEqual(list(plot.losses(rows, "gptq").items()),
                         [("a", (3.0, 0.3)), ("b", (4.5, 0.02))])
        self.assertEqual(plot.losses(rows, "gptq", "target-bpw:"), {"3": (3.0, 0.1)})

    def test_speeds_beside_transformers(self) -> None:
        first, second = plot.speeds({"runs": model_runs()}, "decode")
        self.assertEqual((first.name, first.theirs), ("made-up\nbatch 1, prompt 128", None))
        self.assertAlmostEqual(second.ours, 8 / 0.001)
        self.assertAlmostEqual(second.theirs or 0, 8 / 0.0025)


@unittest.skipUnless(HAS_MATPLOTLIB, "no matplotlib: see ./dev docs")
class Drawing(unittest.TestCase):
    figures: dict[str, Any]

    @classmethod
    def setUpClass(cls) -> None:
        style = plot.style()
        style.__enter__()
        cls.addClassCleanup(style.__exit__, None, None, None)
        cls.figures = {name: cls.figure(picture, *map(plot.load, picture.records))
                       for name, picture in plot.PICTURES.items()}

    @staticmethod
    def figure(picture: plot.Picture, *records: dict[str, Any]) -> Any:
        """Returns a figure whose sizes are final."""
        figure = plot.figure_of(picture, list(records))
        figure.draw_without_rendering()
        return figure

    @staticmethod
    def tick_labels(axis: Any) -> list[Any]:
        """Returns the labels that are drawn, of ticks in view."""
        low, high = sorted(axis.get_view_interval())
        return [tick.label1 for tick in axis.get_major_ticks()
                if low <= tick.get_loc() <= high and tick.label1.get_visible()]

    def test_drawing_again_makes_the_committed_file(self) -> None:
        for name, picture in plot.PICTURES.items():
            text = committed(name)
            if f"Matplotlib v{matplotlib.__version__}," not in text:
                self.skipTest(f"drawn by another version than {matplotlib.__version__}")
            self.assertTrue(plot.render(picture) == text, f"{name}.svg differs: run ./dev docs")

    def test_ticks_do_not_collide(self) -> None:
        for name, figure in self.figures.items():
            for axis in figure.findobj(Axis):
                boxes = [label.get_window_extent().padded(2) for label in self.tick_labels(axis)]
                for one, other in combinations(boxes, 2):
                    self.assertFalse(one.overlaps(other), f"{name}: {one} {other}")

    def test_texts_lie_within_the_picture(self) -> None:
        for name, figure in self.figures.items():
            ticks = {label for axis in figure.findobj(Axis)
                     for tick in axis.get_major_ticks() for label in (tick.label1, tick.label2)}
            drawn = {label for axis in figure.findobj(Axis) for label in self.tick_labels(axis)}
            for text in set(figure.findobj(Text)) - ticks | drawn:
                box = text.get_window_extent()
                inside = (figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1
                          and figure.bbox.y0 - 1 <= box.y0 and box.y1 <= figure.bbox.y1 + 1)
                self.assertTrue(inside or not text.get_text(), f"{name}: {text}")

    def test_times_lie_where_the_numbers_say(self) -> None:
        figure = self.figure(plot.PICTURES["gemm-h200-floor"], made_up())
        shown = [axes for axes in figure.axes if axes.axison]
        self.assertEqual([axes.get_title(loc="left") for axes in shown],
                         ["k 4096, n 4096", "k 4096, n 768"])
        for axes in shown:
            alone, chain, peer, one = axes.lines
            self.assertEqual(list(alone.get_xdata()), [1, 4, 16])
            for line, over in ((alone, 2), (chain, 1.25), (peer, 4), (one, 1)):
                for value in line.get_ydata():
                    self.assertAlmostEqual(value, over)
            self.assertEqual((axes.get_xscale(), axes.get_yscale()), ("log", "log"))

    def test_times_without_a_peer(self) -> None:
        document = made_up()
        for result in document["runs"][0]["results"]:
            del result["peers"]
        figure = self.figure(plot.PICTURES["gemm-h200-floor"], document)
        self.assertEqual([line.get_label() for line in figure.axes[0].lines][:2],
                         ["isolated", "back-to-back with PDL"])
        self.assertEqual(len(figure.axes[0].lines), 3)

    def test_speedups_are_written_and_have_a_colour_bar(self) -> None:
        figure = self.figure(plot.PICTURES["gemm-h200-cublas"], made_up())
        alone, chain, bar = figure.axes
        self.assertEqual([text.get_text() for text in alone.texts], ["2.00"] * 6)
        self.assertEqual([text.get_text() for text in chain.texts], ["3.20"] * 6)
        self.assertEqual(bar.get_ylabel(), "cuBLAS time / ours")

    def test_ratios_of_models(self) -> None:
        document = {"file": "made-up.json", "runs": model_runs()}
        figure = self.figure(plot.PICTURES["model-h200"], document)
        for axes in figure.axes:
            self.assertEqual([text.get_text() for text in axes.texts],
                             ["2.5x" if axes.get_title(loc="left") == "Decode" else "2.0x"])
            self.assertIn("transformers 5.0, bf16",
                          [text.get_text() for text in axes.get_legend().get_texts()])

    def test_names_cover_no_other(self) -> None:
        for name, figure in self.figures.items():
            boxes = [text.get_window_extent() for axes in figure.axes
                     for text in axes.texts if text.get_text()]
            for one, other in combinations(boxes, 2):
                self.assertFalse(one.overlaps(other), name)

    def test_a_name_without_a_place_is_an_error(self) -> None:
        many = [loss(f"uniform:format{i}", "gptq", 4.0, 0.1) for i in range(40)]
        document = {"file": "made-up.json", "date": "2026-01-02", "commit": "abc1234",
                    "models": {"one": many, "two": many}}
        picture = plot.PICTURES["quality-formats"]
        with self.assertRaisesRegex(ValueError, "no place for this name"):
            self.figure(picture, document)

    def test_text_is_escaped(self) -> None:
        document = made_up()
        self.assertIn("Made-up <GPU>", plot.source(document))
        text = plot.svg(plot.PICTURES["gemm-h200-floor"], [document], "id")
        self.assertIn(plot.source(document),
                      [element.text for element in ElementTree.fromstring(text).iter(f"{SVG}text")])

    def test_the_command_draws_what_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*COMMAND, "-o", folder, "model-h100"], check=True)
            self.assertEqual([path.name for path in pathlib.Path(folder).iterdir()],
                             ["model-h100.svg"])


class Command(unittest.TestCase):
    def refuse(self, command: list[str], code: int, message: str) -> None:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        self.assertEqual(done.returncode, code)
        self.assertIn(message, done.stderr)

    def test_an_unknown_name(self) -> None:
        self.refuse([*COMMAND, "no-such"], 2, "no-such: expected one of quality-and-speed, ")

    def test_without_matplotlib(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            # -S: without installed packages.
            command = [COMMAND[0], "-S", *COMMAND[1:], "-o", folder, "model-h100"]
            self.refuse(command, 1, "bench/plot.py: No module named 'matplotlib'; ./dev docs")


if __name__ == "__main__":
    unittest.main()
