"""inspect: the summary, ranges of equal layers, --all."""

from __future__ import annotations

import re
import unittest

from command_line import GLM, QWEN, CommandTestCase, bf16, write_safetensors


class Inspect(CommandTestCase):
    """The text that people read."""

    def rows(self, text: str, header: str) -> list[list[str]]:
        """The cells of the table whose first column has this header."""
        table = text[text.index(f"\n{header} "):].strip("\n").split("\n\n")[0]
        return [re.split(r" {2,}", line) for line in table.splitlines()[2:]]

    def test_the_summary_comes_first(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out)
        document = self.document("inspect", out)
        text = self.succeed("inspect", out)
        lines = text.splitlines()
        self.assertEqual(lines[0], str(out))
        self.assertRegex(lines[1], r"^  model type +qwen3_moe$")
        self.assertRegex(lines[2], r"^  parameters +2\.04 M in 135 tensors$")
        self.assertRegex(lines[3], r"^  size +1\.16 MB, 4\.571 bits per weight$")
        self.assertRegex(lines[4], r"^  recipe +default_moe, method rtn$")
        formats = self.rows(text, "format")
        self.assertEqual([row[0] for row in formats],
                         ["fp4_e2m1/g128", "fp4_e2m1/g64", "int6/g64", "s8/g64", "bf16", "total"])
        self.assertEqual(formats[0][3], "77.2 %")
        self.assertEqual(formats[-1][1:4], ["135", "2.04 M", "100.0 %"])
        self.assertAlmostEqual(float(formats[-1][4]), document["bits_per_weight"], places=3)

    def test_equal_layers_are_one_row(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out)
        rows = {row[0]: row[1:] for row in self.rows(self.succeed("inspect", out), "tensor")}
        self.assertEqual(rows["model.layers.0-3.mlp.experts.0-7.up_proj.weight"],
                         ["fp4_e2m1/g128", "[128, 128]", "32", "4.125", "270.34 kB"])
        self.assertEqual(rows["model.layers.0-3.self_attn.q_proj.weight"][:3],
                         ["fp4_e2m1/g64", "[128, 128]", "4"])
        # A plain checkpoint stores its experts one by one.
        rows = {row[0]: row[1:] for row in self.rows(self.succeed("inspect", QWEN), "tensor")}
        self.assertEqual(rows["model.layers.0-3.mlp.experts.0-7.up_proj.weight"][:3],
                         ["bf16", "[128, 128]", "32"])

    def test_layers_in_other_formats_stay_apart(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out, "--override",
                     r"layers\.[02]\.self_attn\.q_proj=nf4/g32", "--override",
                     r"layers\.3\.self_attn\.q_proj=keep")
        rows = {row[0]: row[1:] for row in self.rows(self.succeed("inspect", out), "tensor")}
        kinds = {name: row[0] for name, row in rows.items() if "q_proj" in name}
        self.assertEqual(kinds, {"model.layers.0,2.self_attn.q_proj.weight": "nf4/g32",
                                 "model.layers.1.self_attn.q_proj.weight": "fp4_e2m1/g64",
                                 "model.layers.3.self_attn.q_proj.weight": "bf16"})

    def test_layers_with_other_scales_stay_apart(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out, "--recipe", "uniform:s4/g32", "--override",
                     r"layers\.0\.self_attn\.q_proj=s4/g32/fp32")
        rows = {row[0]: row[1:] for row in self.rows(self.succeed("inspect", out), "tensor")}
        bits = {name: row[3] for name, row in rows.items() if "q_proj" in name}
        self.assertEqual(bits, {"model.layers.0.self_attn.q_proj.weight": "5.000",
                                "model.layers.1-3.self_attn.q_proj.weight": "4.500"})

    def test_norms_are_counted(self) -> None:
        text = self.succeed("inspect", QWEN)
        self.assertNotIn("norm.weight", text)
        self.assertIn("and 17 vectors, such as norms and biases: 2.82 kB\n", text)
        # A vector that is neither is listed.
        path = self.directory / "model.safetensors"
        write_safetensors(path, {"a.weight": ("BF16", [2], bf16([1.0, 2.0])),
                                 "b.ids": ("I32", [1], bytes(4))})
        text = self.succeed("inspect", path)
        self.assertRegex(text, r"\nb\.ids +i32 +\[1\] ")
        self.assertIn("and 1 vector, such", text)
        self.assertIn("recipe      none: not quantized", text)

    def test_all_lists_every_tensor(self) -> None:
        for model in (QWEN, GLM):
            names = {tensor["name"] for tensor in self.document("inspect", model)["tensors"]}
            listed = {row[0] for row in self.rows(self.succeed("inspect", model, "--all"),
                                                  "tensor")}
            self.assertEqual(listed, names)

    def test_the_document_keeps_every_tensor(self) -> None:
        document = self.document("inspect", QWEN)
        self.assertEqual(document, self.document("inspect", QWEN, "--all"))
        self.assertEqual(len(document["tensors"]), 135)
        for key in ("name", "format", "shape", "group_size", "bits_per_weight", "bytes",
                    "layer_class"):
            self.assertIn(key, document["tensors"][0])


if __name__ == "__main__":
    unittest.main()
