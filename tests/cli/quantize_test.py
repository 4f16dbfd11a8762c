"""quantize, inspect, verify and dequantize on the sample models."""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import unittest
from unittest import mock

from command_line import (COMMAND, GLM, IO, MALFORMED, QWEN, USAGE, CommandTestCase, bf16,
                          read_directory, read_safetensors, run, write_safetensors)


class SampleModels(CommandTestCase):
    """The main workflow from end to end."""

    def check_model(self, source: pathlib.Path, recipe: str) -> None:
        out = self.directory / "out"
        report = self.document("quantize", source, "-o", out, "--recipe", recipe)
        self.assertEqual(report["output"], str(out))
        for key in ("tensors", "parameters", "bits_per_weight", "bytes", "coverage", "skipped",
                    "seconds"):
            self.assertIn(key, report)
        self.assertEqual(report["recipe"], recipe)

        plain = self.document("inspect", source)
        listing = self.document("inspect", out)
        self.assertFalse(plain["quantized"])
        self.assertTrue(listing["quantized"])
        self.assertEqual(listing["recipe"], recipe)
        self.assertEqual(plain["parameters"], report["parameters"])
        self.assertEqual(listing["parameters"], report["parameters"])
        self.assertEqual(listing["bytes"], report["bytes"])
        self.assertAlmostEqual(listing["bits_per_weight"], report["bits_per_weight"])
        self.assertEqual(sum(tensor["bytes"] for tensor in listing["tensors"]), listing["bytes"])
        quantized = 0
        for tensor in listing["tensors"]:
            self.assertEqual(set(tensor), {"name", "format", "shape", "group_size",
                                           "sparsity", "permutation", "input_scale",
                                           "input_hadamard", "bits_per_weight", "bytes",
                                           "layer_class"})
            if tensor["group_size"] is not None:
                count = 1
                for dim in tensor["shape"]:
                    count *= dim
                quantized += count
        self.assertEqual(report["coverage"], quantized / report["parameters"])

        verdict = self.document("verify", out, "--against", source)
        self.assertTrue(verdict["ok"])
        self.assertEqual(len(verdict["tensors"]), len(listing["tensors"]))
        self.assertEqual(sum(row["parameters"] for row in verdict["tensors"]),
                         report["parameters"])
        for row in verdict["tensors"]:
            for key in ("name", "relative_error", "sqnr_db", "max_error"):
                self.assertIn(key, row)
            exact = row["format"] in ("bf16", "f32")
            self.assertEqual(row["max_error"] == 0, exact, row)
            self.assertEqual(row["sqnr_db"] is None, exact, row)
            self.assertLess(row["relative_error"], 0.3, row)

        # The plan from config.json alone equals the written sizes, to the byte.
        plan = self.document("plan", source, "--recipe", recipe, "--bandwidth", 10)
        for key in ("parameters", "quantized_parameters", "bytes", "bits_per_weight"):
            self.assertEqual(plan[key], report[key], key)
        for end in ("embedding", "head"):
            kept = report["ends"][end]["format"] == "bf16"
            shown = "16 bits" if kept else report["ends"][end]["format"]
            self.assertEqual(plan["ends"][end]["format"], shown)
            self.assertAlmostEqual(plan["ends"][end]["bits_per_weight"],
                                   report["ends"][end]["bits_per_weight"])

    def test_qwen_default(self) -> None:
        self.check_model(QWEN, "default_moe")

    def test_qwen_aggressive(self) -> None:
        self.check_model(QWEN, "aggressive_moe")

    def test_qwen_uniform(self) -> None:
        self.check_model(QWEN, "uniform:fp4_e2m1/g32")

    def test_glm_default(self) -> None:
        self.check_model(GLM, "default_moe")

    def test_glm_zero_points(self) -> None:
        self.check_model(GLM, "uniform:u4/g128")

    def test_ends(self) -> None:
        self.assertIn("\nembedding s8/g64 (8.250 bits per weight), head int6/g64 (6.250)\n",
                      self.succeed("quantize", QWEN, "-o", self.directory / "out", "--dry-run"))
        # Options for the whole recipe leave them as they are.
        dry = ("quantize", QWEN, "-o", self.directory / "out", "--dry-run", "--json")
        ends = self.document(*dry)["ends"]
        self.assertEqual((ends["embedding"]["format"], ends["tied"]), ("s8/g64", False))
        for options in (("--group-size", 32), ("--scale-dtype", "e8m0"), ("--sparsity", "2:4"),
                        ("--hadamard", 64, "--method", "gptq", "--calibration-tokens", 256)):
            self.assertEqual(self.document(*dry, *options)["ends"], ends, options)
        kept = self.document(*dry, "--override", "lm_head|embed_tokens=keep")["ends"]
        self.assertEqual(kept["head"], {"format": "bf16", "bits_per_weight": 16})

    def test_a_tied_table_is_one_matrix(self) -> None:
        model, out = self.directory / "model", self.directory / "out"
        shutil.copytree(QWEN, model)
        config = json.loads((QWEN / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        tensors = read_safetensors(QWEN / "model.safetensors")
        del tensors["lm_head.weight"]
        write_safetensors(model / "model.safetensors", tensors)
        text = self.succeed("quantize", model, "-o", out)
        self.assertIn("\nembedding, also the head: s8/g64 (8.250 bits per weight)\n", text)
        plan = self.document("plan", out, "--bandwidth", 1)
        self.assertTrue(plan["ends"]["tied"])
        self.assertEqual(plan["ends"]["head"], plan["ends"]["embedding"])
        bench = self.document("bench", "model", out, "-p", 0, "-n", 2, "--max-time", 0.01)["model"]
        self.assertEqual(bench["ends"]["embedding"], {"format": "s8/g64", "bits_per_weight": 8.25})
        self.assertTrue(bench["ends"]["tied"])
        # Both uses read the same weights: as the dequantized table gives in both.
        plain = self.directory / "plain"
        self.succeed("dequantize", out, "-o", plain, "--dtype", "fp32")
        rows = [self.document("perplexity", path, "--tokens", QWEN / "validation_tokens.txt",
                              "--max-windows", 1, "--exact")["nll"] for path in (out, plain)]
        self.assertAlmostEqual(rows[0], rows[1], places=5)

    def test_people_read_tables(self) -> None:
        out = self.directory / "out"
        text = self.succeed("quantize", GLM, "-o", out)
        self.assertRegex(text, r"\d+\.\d % of parameters quantized; skipped:\n  ")
        reasons = re.findall(r"\((the recipe keeps \w+)\)", text)
        self.assertEqual(len(reasons), len(set(reasons)), text)
        self.assertIn("default_moe", text)
        self.assertIn("moe_shared_expert", self.succeed("inspect", out))
        self.assertIn("SQNR", self.succeed("verify", out, "--against", GLM))
        self.assertIn(", all checksums match\n", self.succeed("verify", out))

    def test_requantizing_gives_identical_codes(self) -> None:
        first, plain, second = (self.directory / name for name in ("first", "plain", "second"))
        self.succeed("quantize", GLM, "-o", first, "--recipe", "default_moe")
        report = self.document("dequantize", first, "-o", plain, "--dtype", "fp32")
        self.assertEqual(report["dtype"], "fp32")
        self.succeed("quantize", plain, "-o", second, "--recipe", "default_moe")
        before, after = read_directory(first), read_directory(second)
        self.assertEqual(set(before), set(after))
        codes = [name for name in before if name.endswith(".qweight")]
        self.assertGreater(len(codes), 10)
        for name in codes:
            self.assertEqual(before[name], after[name], name)

    def test_dequantized_names_and_shapes_are_the_sources(self) -> None:
        out, plain = self.directory / "out", self.directory / "plain"
        self.succeed("quantize", QWEN, "-o", out)
        self.assertIn("bf16", self.succeed("dequantize", out, "-o", plain))
        before, after = read_directory(QWEN), read_directory(plain)
        self.assertEqual({name: tensor[:2] for name, tensor in before.items()},
                         {name: tensor[:2] for name, tensor in after.items()})


class OtherLayouts(CommandTestCase):
    """Checkpoints with other layouts of their matrices."""

    def write_model(self, model_type: str,
                    tensors: dict[str, tuple[str, list[int], bytes]]) -> pathlib.Path:
        source = self.directory / "source"
        source.mkdir()
        (source / "config.json").write_text(json.dumps({"model_type": model_type}))
        write_safetensors(source / "model.safetensors", tensors)
        return source

    @staticmethod
    def random_tensor(*shape: int) -> tuple[str, list[int], bytes]:
        """Every matrix is different, with different numbers of rows and columns: a mix-up shows."""
        count = 1
        for dim in shape:
            count *= dim
        generator = random.Random(count)
        scales = [2.0 ** generator.randint(-3, 0) for _ in range(64)]
        values = [generator.uniform(-1, 1) * scales[(i // shape[-1]) % 64] for i in range(count)]
        return "BF16", list(shape), bf16(values)

    def check_errors(self, source: pathlib.Path) -> None:
        out, plain = self.directory / "out", self.directory / "plain"
        self.succeed("quantize", source, "-o", out, "--strict", "--recipe", "uniform:s8/g16")
        rows = self.document("verify", out, "--against", source)["tensors"]
        for row in rows:
            self.assertEqual(row["format"], "s8")
            # A transposed or shifted matrix would be wrong by more than 1.
            self.assertTrue(0 < row["relative_error"] < 0.02, row)
        self.succeed("dequantize", out, "-o", plain)
        self.assertEqual({name: tensor[:2] for name, tensor in read_directory(source).items()},
                         {name: tensor[:2] for name, tensor in read_directory(plain).items()})

    def test_fused_experts(self) -> None:
        self.check_errors(self.write_model("qwen3_moe", {
            "model.layers.0.mlp.experts.gate_up_proj": self.random_tensor(3, 96, 32),
            "model.layers.0.mlp.experts.down_proj": self.random_tensor(3, 32, 48)}))

    def test_fused_experts_stored_input_first(self) -> None:
        self.check_errors(self.write_model("gpt_oss", {
            "model.layers.0.mlp.experts.gate_up_proj": self.random_tensor(3, 32, 96),
            "model.layers.0.mlp.experts.down_proj": self.random_tensor(3, 48, 32)}))

    def test_transposed_layers_of_gpt2(self) -> None:
        self.check_errors(self.write_model("gpt2", {
            "h.0.attn.c_attn.weight": self.random_tensor(32, 96),
            "h.0.mlp.c_proj.weight": self.random_tensor(64, 32)}))

    def test_strict(self) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        source = self.write_model("llama", {name: ("I32", [16, 16], bytes(1024)),
                                            "model.layers.0.mlp.down_proj.weight":
                                            self.random_tensor(16, 16)})
        out = self.directory / "out"
        self.refuse(USAGE, "quantize", source, "-o", out, "--strict", says=(name, "i32"))
        self.assert_nothing_written("source")
        report = self.document("quantize", source, "-o", out)
        self.assertEqual([skip["name"] for skip in report["skipped"]], [name])
        self.assertEqual(report["coverage"], 0.5)


class Demo(CommandTestCase):
    """The sample model through three recipes, and GEMMs; a part of its text."""

    def setUp(self) -> None:
        super().setUp()
        self.model = pathlib.Path(shutil.copytree(QWEN, self.directory / "model"))
        self.tokens = self.model / "validation_tokens.txt"

    def shorten(self, count: int) -> None:
        self.tokens.write_text(" ".join(self.tokens.read_text().split()[:count]))

    def test_demo(self) -> None:
        self.shorten(4096)
        demo = self.document("demo", "--model", self.model)
        recipes = {row["recipe"]: row for row in demo["recipes"]}
        self.assertEqual(list(recipes), ["default_moe", "aggressive_moe", "uniform:fp4_e2m1/g32"])
        self.assertLess(recipes["aggressive_moe"]["bits_per_weight"],
                        recipes["default_moe"]["bits_per_weight"])
        for row in recipes.values():
            self.assertTrue(0 < row["relative_error"]["moe_expert"] < 0.3)
            self.assertGreater(row["coverage"], 0.8)
            after = row["after"]
            cost = after["perplexity"] / demo["before"]["perplexity"]
            self.assertTrue(1 < cost < 1.2, row)
            self.assertGreater(after["tokens_per_second"], 0)
            self.assertIsNone(after["sentence"])
        shown = self.document("perplexity", self.model, "--tokens", self.tokens)["perplexity"]
        self.assertAlmostEqual(demo["before"]["perplexity"], shown, delta=0.05)
        self.assertEqual(len(demo["products"]), 12)
        for row in demo["products"]:
            self.assertGreater(row["seconds"], 0)
            self.assertIn("marlin_", row["kernel"])
        self.refuse(IO, "demo", "--model", self.directory / "absent", says=("absent",))

    def test_tables_for_people(self) -> None:
        self.shorten(512)
        text = self.succeed("demo", "--model", self.model)
        for recipe in ("16 bits", "default_moe", "aggressive_moe", "uniform:fp4_e2m1/g32"):
            self.assertRegex(text, rf"\n{recipe} +\d+\.\d{{3}} +\d+\.\d\d [kM]B +\d+\.\d{{3}} ")
        self.assertIn("sentences need a tokenizer", text)
        # A model without a text: sizes, errors and GEMMs only.
        self.assertIn("no validation_tokens.txt", self.succeed("demo", "--model", GLM))

    def test_devices(self) -> None:
        document = self.document("devices")
        device = document["devices"][0]
        self.assertEqual((device["name"], device["backend"]), ("cpu", "cpu"))
        kernels = {kernel["name"]: kernel for kernel in device["kernels"]}
        self.assertTrue(kernels["marlin_gemm_scalar"]["available"])
        for kernel in kernels.values():
            self.assertEqual(kernel["available"], kernel["reason"] == "")
        text = self.succeed("devices")
        self.assertIn("marlin_gemm_scalar", text)
        # A GPU is present, or the document says why none is.
        self.assertGreater(len(document["devices"]) + len(document["unavailable"]), 1)
        for missing in document["unavailable"]:
            self.assertIn(missing["reason"], text)

    def test_devices_says_why_the_cpu_is_missing(self) -> None:
        def says(**variables: str) -> str:
            with mock.patch.dict(os.environ, variables):
                return self.succeed("devices")

        # The name of earlier versions counts where the other one is not set.
        old = {"MARLIN_CPU": "avx3"}
        self.assertTrue(says(**old).startswith("MARLIN_CPU: unknown level 'avx3'"))
        self.assertIn("METAL_MARLIN_CPU: unknown level 'avx4'",
                      says(METAL_MARLIN_CPU="avx4", **old))
        self.assertNotIn("unknown level", says(METAL_MARLIN_CPU="scalar", **old))


class Options(CommandTestCase):
    """The effects of the options of quantize."""

    def formats(self, *options: object) -> dict[str, str]:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out, "--overwrite", *options)
        return {tensor["name"]: f"{tensor['format']}/{tensor['group_size']}"
                for tensor in self.document("inspect", out)["tensors"]}

    def perplexity(self, model: pathlib.Path) -> float:
        document = self.document("perplexity", model, "--tokens", QWEN / "validation_tokens.txt",
                                 "--max-windows", 16)
        perplexity: float = document["perplexity"]
        return perplexity

    def test_format_and_groups(self) -> None:
        formats = self.formats("--format", "nf4", "--group-size", 32, "--scale-dtype", "bf16")
        self.assertEqual(formats["model.layers.0.mlp.experts.*.up_proj.weight"], "nf4/32")
        self.assertEqual(formats["model.layers.0.self_attn.q_proj.weight"], "nf4/32")
        self.assertEqual(formats["model.embed_tokens.weight"], "bf16/None")

    def test_overrides(self) -> None:
        formats = self.formats("--override", r"layers\.0\..*down_proj=s8/g64",
                               "--override", "lm_head=nf3/g64",
                               "--override", r"experts\.3\.up_proj=keep")
        self.assertEqual(formats["model.layers.0.mlp.experts.*.down_proj.weight"], "s8/64")
        self.assertEqual(formats["model.layers.1.mlp.experts.*.down_proj.weight"],
                         "fp4_e2m1/128")
        self.assertEqual(formats["lm_head.weight"], "nf3/64")
        self.assertEqual(formats["model.layers.1.mlp.experts.3.up_proj.weight"], "bf16/None")
        self.assertEqual(formats["model.layers.1.mlp.experts.4.up_proj.weight"], "fp4_e2m1/128")

    def test_recipe_file(self) -> None:
        recipe = self.directory / "recipe.json"
        recipe.write_text(json.dumps({"name": "mine", "base": "default_moe",
                                      "classes": {"attention_out": "keep"}}))
        formats = self.formats("--recipe", recipe)
        self.assertEqual(formats["model.layers.0.self_attn.o_proj.weight"], "bf16/None")
        self.assertEqual(formats["model.layers.0.self_attn.q_proj.weight"], "fp4_e2m1/64")
        self.assertEqual(self.document("inspect", self.directory / "out")["recipe"], "mine")

    def test_mse_is_closer_than_rtn(self) -> None:
        errors = {}
        for method in ("rtn", "mse"):
            out = self.directory / method
            self.succeed("quantize", QWEN, "-o", out, "--method", method)
            classes = self.document("verify", out, "--against", QWEN)["classes"]
            errors[method] = {row["layer_class"]: row["relative_error"] for row in classes}
        self.assertLess(errors["mse"]["moe_expert"], errors["rtn"]["moe_expert"])

    def test_dry_run_writes_nothing_and_says_the_same(self) -> None:
        dry = self.document("quantize", QWEN, "-o", self.directory / "out", "--dry-run")
        self.assert_nothing_written()
        real = self.document("quantize", QWEN, "-o", self.directory / "out")
        for key in ("tensors", "parameters", "bits_per_weight", "bytes", "coverage", "skipped"):
            self.assertEqual(dry[key], real[key], key)

    def test_shards(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", GLM, "-o", out, "--shard-size", "400KB")
        self.assertGreater(len(list(out.glob("*.safetensors"))), 3)
        self.assertTrue(self.document("verify", out, "--against", GLM)["ok"])

    def test_max_error(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out)
        self.succeed("verify", out, "--against", QWEN, "--max-error", 0.2)
        done = run("verify", out, "--against", QWEN, "--max-error", 0.01, "--json")
        self.assertEqual(done.returncode, MALFORMED)
        self.assertFalse(json.loads(done.stdout)["ok"])
        self.assertIn("at most 0.01 allowed", done.stderr)

    def test_sparsity(self) -> None:
        out, dense = self.directory / "sparse", self.directory / "dense"
        self.succeed("quantize", QWEN, "-o", dense)
        report = self.document("quantize", QWEN, "-o", out, "--sparsity", "2:4")
        self.assertEqual(report["recipe"], "default_moe+options")
        self.assertTrue(self.document("verify", out, "--against", QWEN)["ok"])
        rows = {row["name"]: row for row in self.document("inspect", out)["tensors"]}
        whole = {row["name"]: row for row in self.document("inspect", dense)["tensors"]}
        for name, row in rows.items():
            if row["group_size"] is None:
                self.assertIsNone(row["sparsity"])
                continue
            if row["layer_class"] in ("embedding", "lm_head"):
                self.assertEqual(row, whole[name])
                continue
            self.assertEqual((row["sparsity"], whole[name]["sparsity"]), ("2:4", "dense"))
            # The codes shrink by a quarter, up to padding; the scales do not.
            self.assertTrue(0.75 < row["bytes"] / whole[name]["bytes"] < 0.85, row)
        self.assertRegex(self.succeed("inspect", out), r"fp4_e2m1/g\d+/2:4")
        plan = self.document("plan", QWEN, "--sparsity", "2:4")
        self.assertLess(plan["bytes"],
                        sum(row["bytes"] for row in whole.values()))
        self.assertGreater(self.perplexity(out), self.perplexity(dense))

    def test_sparse_weights_are_converted_as_dense_ones(self) -> None:
        out, plain = self.directory / "sparse", self.directory / "plain"
        self.succeed("quantize", QWEN, "-o", out, "--recipe", "uniform:s4/g32/2:4")
        self.succeed("dequantize", out, "-o", plain)
        for target in ("compressed-tensors", "gptq"):
            other, again = self.directory / target, self.directory / f"{target}-plain"
            self.succeed("convert", out, "-o", other, "--to", target)
            self.succeed("dequantize", other, "-o", again)
            self.assertEqual(read_directory(plain), read_directory(again), target)
        gguf, imported = self.directory / "model.gguf", self.directory / "imported"
        self.succeed("convert", out, "-o", gguf, "--to", "gguf")
        self.succeed("import", gguf, "-o", imported)
        exact = self.directory / "exact"
        self.succeed("dequantize", out, "-o", exact, "--dtype", "fp32")
        for row in self.document("verify", imported, "--against", exact)["tensors"]:
            self.assertEqual(row["max_error"], 0, row)

    def test_pruning_with_calibration(self) -> None:
        out = {}
        for pruning in ("magnitude", "weighted", "compensated"):
            path = self.directory / pruning
            self.succeed("quantize", QWEN, "-o", path, "--sparsity", "2:4", "--method", "gptq",
                         "--calibration-ids", QWEN / "validation_tokens.txt",
                         "--calibration-tokens", 2048, "--pruning", pruning)
            out[pruning] = self.perplexity(path)
        self.assertLess(out["compensated"], out["weighted"])
        self.assertLess(out["weighted"], out["magnitude"])

    def test_sparsity_that_cannot_be(self) -> None:
        out = self.directory / "out"
        for options, says in (
                (["--sparsity", "4:8"], ("--sparsity", "4:8", "dense, 2:4")),
                (["--sparsity", "2:4", "--format", "u4"], ("u4", "zero point")),
                (["--sparsity", "2:4", "--recipe", "aggressive_moe"], ("moe_expert", "nf3 has 3")),
                (["--format", "codebook4", "--sparsity", "2:4"], ("no code of value 0",)),
                (["--pruning", "weighted"], ("--pruning weighted", "--method gptq")),
                (["--pruning", "best"], ("best", "compensated"))):
            self.refuse(USAGE, "quantize", QWEN, "-o", out, *options, says=says)
        self.assert_nothing_written()

    def test_a_method_or_device_that_cannot_be(self) -> None:
        out = self.directory / "out"
        for options, says in (
                (["--method", "best"], ("unknown name 'best'", "awq+gptq")),
                (["--device", "cuda:0"], ("--device cuda:0", "rtn runs on cpu"))):
            self.refuse(USAGE, "quantize", QWEN, "-o", out, *options, says=says)
        self.assert_nothing_written()

    def test_a_type_that_cannot_be_run_is_named(self) -> None:
        source = self.directory / "unheard"
        shutil.copytree(QWEN, source)
        config = json.loads((source / "config.json").read_text())
        quantize = ("quantize", source, "-o", self.directory / "out", "--overwrite")
        self.assertTrue(self.document(*quantize)["runs"])
        (source / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
        self.assertFalse(self.document(*quantize)["runs"])
        self.assertIn("note: a 'unheard_of' cannot be run here; types that can: ",
                      self.succeed(*quantize))

    def test_importance_matrices(self) -> None:
        """The older binary form: one entry, for the first query projection."""
        name, inputs = b"blk.0.attn_q.weight", 128
        values = [1e4 if i % 8 == 0 else 1e-2 for i in range(inputs)]
        file = self.directory / "imatrix.dat"
        entry = struct.pack(f"<i{len(name)}sii{inputs}f", len(name), name, 2, inputs, *values)
        file.write_bytes(struct.pack("<i", 1) + entry)
        recipe = ["--recipe", "uniform:int3/g64", "--method", "mse", "--json"]
        plain, out = self.directory / "plain", self.directory / "weighted"
        self.document("quantize", QWEN, "-o", plain, *recipe)
        report = self.document("quantize", QWEN, "-o", out, *recipe, "--imatrix", file)
        reasons = {row["name"]: row["reason"] for row in report["fallbacks"]}
        query = "model.layers.0.self_attn.q_proj.weight"
        self.assertNotIn(query, reasons)
        self.assertIn("not in the importance matrix", reasons[query.replace("q_proj", "k_proj")])
        weighted = (out / "model.safetensors").read_bytes()
        self.assertNotEqual(weighted, (plain / "model.safetensors").read_bytes())
        file.write_bytes(struct.pack("<i", 2) + entry)
        for options, status, says in (
                (["--method", "mse"], MALFORMED, ("imatrix.dat", "ends at byte")),
                (["--method", "rtn"], USAGE, ("--imatrix", "--method mse"))):
            self.refuse(status, "quantize", QWEN, "-o", self.directory / "no", *options,
                        "--imatrix", file, says=says)


class Streams(CommandTestCase):
    """Standard streams that are closed."""

    def test_closed_reader(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as out:
            done = subprocess.run([COMMAND, "inspect", str(QWEN)], stdout=out,
                                  stderr=subprocess.PIPE, check=False, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, b""))

    def test_full_device(self) -> None:
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full")
        with open("/dev/full", "w", encoding="utf-8") as out:
            done = subprocess.run([COMMAND, "inspect", str(QWEN)], stdout=out,
                                  stderr=subprocess.PIPE, check=False, timeout=60)
        self.assertEqual(done.returncode, 3)
        self.assertIn(b"standard output", done.stderr)


if __name__ == "__main__":
    unittest.main()
