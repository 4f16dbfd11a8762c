"""import, and the other commands on a file of another program."""

from __future__ import annotations

import struct
import unittest

from command_line import MALFORMED, QWEN, ROOT, USAGE, CommandTestCase, run

ALL_TYPES = ROOT / "tests/golden/gguf_types/all_types.gguf"
PERMUTED = ROOT / "tests/golden/checkpoint_permuted"


class Import(CommandTestCase):
    """Every block type of GGUF, through the commands."""

    def test_every_type_is_exact(self) -> None:
        out = self.directory / "out"
        report = self.document("import", ALL_TYPES, "-o", out)
        self.assertEqual(report["output"], str(out))
        self.assertEqual(report["method"], "gguf")
        self.assertEqual(len(report["modules"]), 71)
        self.assertEqual({module["exactness"] for module in report["modules"]}, {"exact"})
        growth = {module["name"]: module["growth"] for module in report["modules"]}
        self.assertEqual(growth["a.Q4_0.weight"], 1)
        self.assertAlmostEqual(growth["a.Q4_K.weight"], 4.625 / 4.5)
        self.assertAlmostEqual(growth["a.Q6_K.weight"], 1)
        self.assertAlmostEqual(growth["a.IQ2_XXS.weight"], 3.3125 / 2.0625)
        skipped = {tensor["name"]: tensor["reason"] for tensor in report["skipped"]}
        self.assertEqual(skipped["dense.f16"], "the source stores it in f16")
        listing = self.document("inspect", out)
        self.assertTrue(listing["quantized"])
        self.assertEqual(listing["bytes"], report["bytes"])
        self.assertEqual(listing["parameters"], report["parameters"])
        self.assertTrue(self.document("verify", out)["ok"])

    def test_the_report_is_readable(self) -> None:
        text = self.succeed("import", ALL_TYPES, "-o", self.directory / "out")
        self.assertIn("% of parameters quantized; skipped:\n  dense.f16 (", text)
        self.assertRegex(text, r"u4/g32 +3 +3\.33 K +exact, 1\.03x larger")
        self.assertRegex(text, r"s4/g32 +3 +3\.33 K +exact\n")

    def test_model_cards(self) -> None:
        out = self.directory / "out"
        self.succeed("import", ALL_TYPES, "-o", out)
        card = (out / "README.md").read_text()
        self.assertIn("library_name: metal-marlin\n", card)
        self.assertIn("| method | codes of gguf, kept |\n", card)
        self.succeed("import", ALL_TYPES, "-o", out, "--overwrite", "--no-model-card")
        self.assertFalse((out / "README.md").exists())
        own = self.directory / "own"
        self.succeed("quantize", QWEN, "-o", own, "--format", "s4", "--group-size", "32")
        self.assertIn("| method | rtn |\n", (own / "README.md").read_text())
        gptq = self.directory / "gptq"
        self.succeed("export", own, "-o", gptq, "--to", "gptq", "--no-model-card")
        self.assertFalse((gptq / "README.md").exists())
        (gptq / "README.md").write_text("Mine.\n")
        self.succeed("export", own, "-o", gptq, "--to", "gptq", "--overwrite")
        self.assertEqual((gptq / "README.md").read_text(), "Mine.\n")

    def test_a_dry_run_writes_nothing(self) -> None:
        out = self.directory / "out"
        text = self.succeed("import", ALL_TYPES, "-o", out, "--dry-run")
        self.assertIn("(dry run)", text)
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_an_output_is_replaced_only_if_asked(self) -> None:
        out = self.directory / "out"
        self.succeed("import", ALL_TYPES, "-o", out)
        self.refuse(USAGE, "import", ALL_TYPES, "-o", out, says=(str(out),))
        self.succeed("import", ALL_TYPES, "-o", out, "--overwrite")

    def test_sources_that_are_not_foreign(self) -> None:
        out = self.directory / "out"
        self.refuse(USAGE, "import", QWEN, "-o", out, says=("there is nothing to import",))
        own = self.directory / "own"
        self.succeed("quantize", QWEN, "-o", own)
        self.refuse(USAGE, "import", own, "-o", out,
                    says=("is a directory of metal-marlin already",))

    def test_other_commands_take_the_file(self) -> None:
        listing = self.document("inspect", ALL_TYPES)
        self.assertFalse(listing["quantized"])
        self.assertEqual(listing["method"], "gguf")
        self.assertTrue(self.document("verify", ALL_TYPES)["ok"])
        plain = self.directory / "plain"
        self.succeed("dequantize", ALL_TYPES, "-o", plain, "--dtype", "fp32")
        checked = self.document("verify", ALL_TYPES, "--against", plain)
        self.assertEqual({tensor["max_error"] for tensor in checked["tensors"]}, {0})
        self.refuse(USAGE, "quantize", ALL_TYPES, "-o", self.directory / "q",
                    says=("is quantized already, with gguf",))
        # The file says which architecture it has, and none of its sizes.
        done = run("generate", ALL_TYPES, "--tokens", QWEN / "validation_tokens.txt")
        self.assertEqual(done.returncode, MALFORMED)
        self.assertIn("hidden_size", done.stderr)

    def test_a_malformed_file_leaves_no_output(self) -> None:
        path = self.directory / "model.gguf"
        infinite = b"\x00\x7c" + bytes(16)
        header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t"
        header += struct.pack("<IQQIQ", 2, 32, 1, 2, 0)
        path.write_bytes(header + bytes(-len(header) % 32) + infinite)
        self.refuse(MALFORMED, "import", path, "-o", self.directory / "out",
                    says=("module \"t\"", "NaN or Inf"))
        path.write_bytes(header)
        self.refuse(MALFORMED, "import", path, "-o", self.directory / "out",
                    says=("tensor \"t\"", "18 bytes"))
        self.assertEqual([entry.name for entry in self.directory.iterdir()], ["model.gguf"])


class ActOrder(CommandTestCase):
    """A directory whose groups lie across k, through the commands."""

    def test_inspect(self) -> None:
        self.assertIn("u4/g32 permuted", self.succeed("inspect", PERMUTED))
        rows = {row["name"]: row for row in self.document("inspect", PERMUTED)["tensors"]}
        weight = rows["model.layers.0.self_attn.q_proj.weight"]
        self.assertEqual((weight["format"], weight["permutation"]), ("u4", True))
        self.assertIsNone(rows["model.norm.weight"]["permutation"])
        self.assertTrue(self.document("verify", PERMUTED)["ok"])

    def test_the_numbers_are_those_of_the_source(self) -> None:
        dense = ROOT / "tests/golden/checkpoint_permuted_dense.safetensors"
        plain = self.directory / "plain"
        self.succeed("dequantize", PERMUTED, "-o", plain, "--dtype", "fp32")
        for path in (PERMUTED, plain):
            for row in self.document("verify", PERMUTED, "--against", dense)["tensors"]:
                self.assertEqual(row["max_error"], 0, (path, row))

    def test_targets(self) -> None:
        for target in ("awq", "compressed-tensors", "mlx"):
            self.refuse(USAGE, "export", PERMUTED, "-o", self.directory / target, "--to",
                        target, says=("self_attn.o_proj.weight", "act-order", "which only gptq"))
        # GPTQ's groups divide k, which is 80 here.
        self.refuse(USAGE, "export", PERMUTED, "-o", self.directory / "gptq", "--to", "gptq",
                    says=("a last group of 16 k in groups of 32",))


if __name__ == "__main__":
    unittest.main()
