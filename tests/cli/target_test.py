"""analyze --sensitivity and quantize --target-bpw: measurements, recipes, files, wrong input."""

from __future__ import annotations

import json
import re
import unittest
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

from command_line import GLM, IO, MALFORMED, QWEN, USAGE, CommandTestCase

TOKENS = Path(QWEN) / "validation_tokens.txt"
FORMATS = "int2/g64/frac,nf3/g64,nf4/g64,s8/g64"


class Target(CommandTestCase):
    """The sample models, few tokens."""

    def setUp(self) -> None:
        super().setUp()
        ids = TOKENS.read_text().split()
        self.ids = self.directory / "ids.txt"
        # Evaluation takes the first tokens of the text.
        self.ids.write_text(" ".join(ids[8000:8512]))
        self.file = self.directory / "sensitivity.json"

    def analyze(self, *arguments: object, source: object = QWEN) -> dict[str, Any]:
        document: dict[str, Any] = self.document(
            "analyze", source, "--sensitivity", "--calibration-ids", self.ids, *arguments)
        return document

    def measured(self, formats: dict[str, list[float]], source: object = QWEN) -> None:
        """Writes a file by hand: the cost of a projection, by the end of its name."""
        matrices = []
        for tensor in self.document("inspect", source)["tensors"]:
            for end, kl in formats.items():
                if tensor["name"].endswith(end):
                    n, k = tensor["shape"]
                    matrices.append({"name": tensor["name"], "experts": 1, "k": k, "n": n,
                                     "kl": kl})
        self.file.write_text(json.dumps({
            "model_type": "qwen3_moe", "identity": "0", "tokens": 1,
            "formats": ["nf3/g64", "nf4/g64"], "matrices": matrices}))

    def divergence(self, name: str) -> float:
        document = self.document("compare", self.directory / name, "--against", QWEN,
                                 "--tokens", TOKENS, "--max-windows", 6, "--exact")
        divergence: float = document["kl_mean"]
        return divergence

    def test_mixed_formats_beat_one(self) -> None:
        plot = self.directory / "plot.svg"
        document = self.analyze("-o", self.file, "--plot", plot)
        self.assertEqual(json.loads(self.file.read_text()), document)
        self.assertEqual((document["model_type"], document["tokens"]), ("qwen3_moe", 512))
        self.assertEqual(",".join(document["formats"]), FORMATS)
        self.assertEqual(len(document["matrices"]), 112)
        for matrix in document["matrices"]:
            self.assertEqual(len(matrix["kl"]), 4)
            self.assertGreater(matrix["kl"][0], matrix["kl"][3])
        self.assertFalse(any("gate.weight" in m["name"] for m in document["matrices"]))
        root = xml.etree.ElementTree.parse(plot).getroot()
        rectangles = [e for e in root.iter() if e.tag.endswith("rect")]
        # The background; four layers of seven projections in four formats.
        self.assertEqual(len(rectangles), 1 + 4 * 7 * 4)
        recipe = self.directory / "recipe.json"
        report = self.document(
            "quantize", QWEN, "-o", self.directory / "mixed", "--method", "mse", "--target-bpw",
            3.5, "--sensitivity", self.file, "--write-recipe", recipe)
        self.assertEqual(report["recipe"], "target-bpw:3.5")
        self.assertGreater(report["quantized_bits_per_weight"], 3.45)
        self.assertLessEqual(report["quantized_bits_per_weight"], 3.5)
        self.assertGreater(report["predicted_kl"], 0)
        written = json.loads(recipe.read_text())
        self.assertEqual(len(written["tensors"]), 112)
        self.assertGreaterEqual(len(set(written["tensors"].values())), 3)
        config = json.loads((self.directory / "mixed/config.json").read_text())
        self.assertEqual(config["quantization_config"]["recipe_document"], written)
        for name, choice in (("nf3", "nf3/g32"), ("int3", "int3/g64/frac")):
            self.succeed("quantize", QWEN, "-o", self.directory / name, "--method", "mse",
                         "--recipe", f"uniform:{choice}")
        best = min(self.divergence("nf3"), self.divergence("int3"))
        self.assertLess(self.divergence("mixed"), 0.75 * best)
        # The same bits from the recipe.
        self.succeed("quantize", QWEN, "-o", self.directory / "again", "--method", "mse",
                     "--recipe", recipe)
        self.assertEqual((self.directory / "again/model.safetensors").read_bytes(),
                         (self.directory / "mixed/model.safetensors").read_bytes())

    def test_measures_without_a_file(self) -> None:
        ids = ("--calibration-ids", self.ids, "--calibration-tokens", 256, "--formats",
               "nf3/g64,s8/g64")
        quantize = ("quantize", GLM, "-o", self.directory / "out", "--dry-run", "--target-bpw", 5)
        first = self.document(*quantize, *ids)
        self.analyze("-o", self.file, *ids[2:], source=GLM)
        second = self.document(*quantize, "--sensitivity", self.file)
        self.assertEqual(first["predicted_kl"], second["predicted_kl"])
        self.assertLessEqual(first["quantized_bits_per_weight"], 5)

    def test_a_target_that_no_format_meets_is_refused_before_measuring(self) -> None:
        self.refuse(USAGE, "quantize", GLM, "-o", self.directory / "out", "--target-bpw", 1.5,
                    "--calibration-ids", self.ids, says=("target: 1.5 bits per weight", "2.5"))
        self.refuse(USAGE, "quantize", GLM, "-o", self.directory / "out", "--target-bpw", 1.5,
                    says=("target: 1.5 bits per weight", "2.5"))
        self.assertFalse((self.directory / "out").exists())

    def test_the_summary_says_what_the_target_counts(self) -> None:
        self.measured({"up_proj.weight": [0.2, 0.1]})
        quantize = ("quantize", QWEN, "-o", self.directory / "out", "--target-bpw", 3.5,
                    "--sensitivity", self.file, "--overwrite")
        report = self.document(*quantize)
        self.assertGreaterEqual(report["seconds"], report["search_seconds"])
        text = self.succeed(*quantize)
        self.assertIn("--target-bpw 3.5: ", text)
        self.assertIn("bits per weight, scales and zeros included, over the ", text)
        self.assertIn(" parameters that got a format\n", text)
        self.assertRegex(text, r"; found in \d+\.\d s of the time\n")
        reasons = re.findall(r"\((the recipe keeps \w+)\)", text)
        self.assertEqual(len(reasons), len(set(reasons)), text)

    def test_text_report(self) -> None:
        text = self.succeed("analyze", QWEN, "--sensitivity", "--calibration-ids", self.ids,
                            "--calibration-tokens", 256, "--formats", "nf3/g64")
        self.assertIn("KL of 256 tokens", text)
        self.assertEqual(sum("moe_expert" in line for line in text.splitlines()), 4)
        self.assertIn("####", text)

    def test_resume(self) -> None:
        options = ("--calibration-tokens", 256, "--formats", "int2/g64/frac", "-o", self.file)
        document = self.analyze(*options)
        partial = self.directory / "sensitivity.json.partial"
        self.assertFalse(partial.exists())
        changed = json.loads(self.file.read_text())
        changed["matrices"] = changed["matrices"][:28]
        changed["matrices"][5]["kl"] = [3.0]
        partial.write_text(json.dumps(changed))
        self.file.unlink()
        resumed = self.analyze(*options, "--resume")
        self.assertEqual(resumed["matrices"][5]["kl"], [3.0])
        resumed["matrices"][5] = document["matrices"][5]
        self.assertEqual(resumed, document)
        # Without --resume everything is measured.
        partial.write_text(json.dumps(changed))
        self.assertEqual(self.analyze(*options), document)
        partial.write_text("{")
        self.refuse(MALFORMED, "analyze", QWEN, "--sensitivity", "--calibration-ids", self.ids,
                    *options, "--resume", says=("sensitivity.json.partial",))

    def test_the_formats_of_a_file(self) -> None:
        self.measured({"up_proj.weight": [0.2, 0.1], "o_proj.weight": [9, 0.1]})
        report = self.document("quantize", QWEN, "-o", self.directory / "out", "--target-bpw", 3.5,
                               "--sensitivity", self.file)
        formats = {tensor["name"]: tensor["format"] for tensor in
                   self.document("inspect", self.directory / "out")["tensors"]}
        self.assertEqual({formats[n] for n in formats if n.endswith("o_proj.weight")}, {"nf4"})
        self.assertIn("nf3", {formats[n] for n in formats if "up_proj" in n})
        # Tensors without a measurement are kept.
        self.assertEqual({formats[n] for n in formats if "down_proj" in n}, {"bf16"})
        self.assertLess(report["coverage"], 0.5)

    def test_refusals(self) -> None:
        out = self.directory / "out"
        quantize = ("quantize", QWEN, "-o", out)
        self.measured({"up_proj.weight": [0.2, 0.1]})
        target = ("--target-bpw", 4, "--sensitivity", self.file)
        self.refuse(USAGE, *quantize, "--target-bpw", 3.1, "--sensitivity", self.file,
                    says=("3.1 bits per weight", "3.2500"))
        self.refuse(USAGE, *quantize, "--target-bpw", 0, says=("--target-bpw",))
        self.refuse(USAGE, *quantize, "--sensitivity", self.file, says=("needs --target-bpw",))
        self.refuse(USAGE, *quantize, "--formats", "nf3/g64", says=("needs --target-bpw",))
        for options in (("--recipe", "default_moe"), ("--format", "nf4"), ("--group-size", 64),
                        ("--override", "a=keep"), ("--scale-dtype", "bf16")):
            self.refuse(USAGE, *quantize, *target, *options, says=("--target-bpw",))
        self.refuse(USAGE, *quantize, *target, "--formats", "s8/g64", says=("was not measured",))
        self.refuse(USAGE, *quantize, *target, "--formats", "s8/g64,", says=("--formats",))
        self.refuse(USAGE, *quantize, *target, "--calibration-ids", self.ids,
                    says=("uses no calibration",))
        self.refuse(USAGE, "quantize", GLM, "-o", out, *target, says=("another model",))
        self.refuse(IO, *quantize, "--target-bpw", 4, "--sensitivity", self.directory / "absent",
                    says=("absent",))
        self.refuse(IO, *quantize, *target, "--write-recipe", self.directory / "no/r.json",
                    says=("r.json",))
        self.file.write_text("{}")
        self.refuse(MALFORMED, *quantize, *target, says=("sensitivity.json", "model_type"))
        recipe = self.directory / "recipe.json"
        recipe.write_text('{"tensors": {"model.layers.77.mlp.up_proj.weight": "s8/g64"}}')
        self.refuse(USAGE, *quantize, "--recipe", recipe, says=("layers.77",))
        analyze = ("analyze", QWEN, "--sensitivity")
        modes = "expected one of --routing, --sensitivity, --importance and --sparsity"
        self.refuse(USAGE, "analyze", QWEN, says=(modes,))
        self.refuse(USAGE, *analyze, "--routing", says=(modes,))
        self.refuse(USAGE, *analyze, "--tokens", self.ids, says=("--tokens",))
        self.refuse(USAGE, *analyze, "--resume", says=("-o FILE",))
        self.refuse(USAGE, *analyze, "--formats", "bf16", "--calibration-ids", self.ids,
                    says=("bf16 is not quantized",))
        self.refuse(USAGE, "analyze", QWEN, "--routing", "--tokens", self.ids, "--plot", "x",
                    says=("--plot",))
        self.refuse(IO, *analyze, "--calibration-ids", self.ids, "--plot",
                    self.directory / "no/x.svg", says=("x.svg",))
        self.refuse(IO, *analyze, "--calibration-ids", self.ids, "-o",
                    self.directory / "no/x.json", says=("x.json",))
        self.assertFalse(out.exists())


if __name__ == "__main__":
    unittest.main()
