"""analyze: counts of experts, their files and replay by bench moe; losses of 2:4 sparsity."""

from __future__ import annotations

import json
import re
import unittest

from command_line import GLM, IO, MALFORMED, QWEN, USAGE, CommandTestCase

EXPERT = ("--shape", "1,64,128", "--format", "u4", "--group-size", 32)


class Analyze(CommandTestCase):
    """The sample model on a few tokens."""

    def setUp(self) -> None:
        super().setUp()
        self.tokens = self.directory / "tokens.txt"
        self.tokens.write_text(" ".join(str(i * i % 250) for i in range(300)))
        self.trace = self.directory / "trace.jsonl"

    def analyze(self, *arguments: object) -> dict:
        return self.document("analyze", QWEN, "--routing", "--tokens", self.tokens, *arguments)

    def test_counts(self) -> None:
        frequencies = self.directory / "frequencies.json"
        document = self.analyze("-o", frequencies, "--trace", self.trace, "--window", 70)
        self.assertEqual(json.loads(frequencies.read_text()), document)
        self.assertEqual((document["model_type"], document["tokens"]), ("qwen3_moe", 300))
        counts = {layer["layer"]: [0] * len(layer["counts"]) for layer in document["layers"]}
        lines = self.trace.read_text().splitlines()
        self.assertEqual(len(lines), 300)
        for line in lines:
            for layer in json.loads(line)["layers"]:
                for expert in layer["experts"]:
                    counts[layer["layer"]][expert] += 1
        self.assertEqual(counts, {layer["layer"]: layer["counts"] for layer in document["layers"]})
        # Windows are sequences of their own.
        self.assertNotEqual(self.analyze(), document)
        text = self.succeed("analyze", QWEN, "--routing", "--tokens", self.tokens)
        self.assertIn("300 tokens, 2 experts each", text)

    def test_replay(self) -> None:
        self.analyze("--trace", self.trace)
        small, large = ({row["policy"]: row for row in self.document(
            "bench", "moe", "--trace", self.trace, *EXPERT, "--cache", size)["results"]}
            for size in ("64KiB", "1GB"))
        for rows in (small, large):
            self.assertEqual(sorted(rows), ["frequency", "lru"])
            for row in rows.values():
                self.assertEqual((row["tokens"], row["format"]), (300, "u4"))
                self.assertEqual(row["hits"] + row["misses"], 300 * 4 * 2)
                self.assertEqual(row["fetched_bytes"], row["misses"] * row["expert_bytes"])
        for policy in ("frequency", "lru"):
            # Everything fits: each expert is fetched once.
            self.assertEqual(large[policy]["evictions"], 0)
            self.assertLessEqual(large[policy]["misses"], 4 * 8)
            self.assertGreater(small[policy]["evictions"], 0)
        self.assertIn("hit rate", self.succeed("bench", "moe", "--trace", self.trace, *EXPERT))
        self.trace.write_text('{"layers":[{"layer":0,"experts":[1,2,1]}]}\n')
        rows = self.document("bench", "moe", "--trace", self.trace, *EXPERT)["results"]
        self.assertEqual([(row["hits"], row["misses"]) for row in rows], [(1, 2), (1, 2)])

    def test_recipe(self) -> None:
        frequencies = self.directory / "routing.json"
        document = self.analyze("-o", frequencies)
        recipe = self.directory / "recipe.json"
        rule = {"frequencies": "routing.json", "fraction": 0.25, "choice": "s8/g64"}
        recipe.write_text(json.dumps({"base": "default_moe", "hot_experts": rule}))
        hot = {layer["layer"]: sorted(range(8), key=[-count for count in layer["counts"]]
                                      .__getitem__)[:2] for layer in document["layers"]}
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out, "--recipe", recipe)
        formats = {}
        for tensor in self.document("inspect", out)["tensors"]:
            found = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.up_proj\.weight",
                                 tensor["name"])
            if found:
                formats[int(found[1]), int(found[2])] = tensor["format"]
        self.assertEqual(formats, {(layer, expert): "s8" if expert in hot[layer] else "fp4_e2m1"
                                   for layer in range(4) for expert in range(8)})
        # The quantized model runs with experts of two formats.
        self.succeed("analyze", out, "--routing", "--tokens", self.tokens)
        plans = [self.document("plan", QWEN / "config.json", "--recipe", name)
                 for name in (recipe, "default_moe")]
        self.assertGreater(*(plan["bytes"] for plan in plans))
        self.refuse(USAGE, "quantize", GLM, "-o", self.directory / "glm", "--recipe", recipe,
                    says=("hot_experts: frequencies of another model: of model_type 'qwen3_moe', ",
                          "not 'glm4_moe"))
        self.refuse(USAGE, "plan", GLM / "config.json", "--recipe", recipe,
                    says=("frequencies of another model",))

    def test_sparsity(self) -> None:
        plain = self.document("analyze", QWEN, "--sparsity")["matrices"]
        self.assertIn("model.layers.0.self_attn.q_proj.weight", {row["name"] for row in plain})
        for row in plain:
            self.assertTrue(0.25 < row["relative_error"] < 0.45, row)
            self.assertFalse(row["sparse"])
        sparse, dense = self.directory / "sparse", self.directory / "dense"
        self.succeed("quantize", QWEN, "-o", sparse, "--format", "s4", "--sparsity", "2:4")
        self.refuse(USAGE, "analyze", sparse, "--sparsity", says=("is quantized", "metal_marlin"))
        self.succeed("dequantize", sparse, "-o", dense)
        after = self.document("analyze", dense, "--sparsity")["matrices"]
        self.assertEqual([row["name"] for row in after], [row["name"] for row in plain])
        for row in after:
            self.assertEqual((row["sparse"], row["relative_error"]), (True, 0), row)
            self.assertGreaterEqual(row["zeros"], row["parameters"] / 2)
        self.assertRegex(self.succeed("analyze", dense, "--sparsity"),
                         r"attention_qkv +\d+ +\d+ +[56]\d\.\d % +0\.0000 +0\.0000")

    def test_importance(self) -> None:
        file, absent = self.directory / "imatrix.gguf", self.directory / "absent" / "file"
        importance = ("analyze", QWEN, "--importance", "--calibration-ids", self.tokens)
        self.refuse(IO, *importance, "-o", absent, says=(str(absent),))
        document = self.document(*importance, "-o", file)
        rows = {row["name"]: row for row in document["inputs"]}
        self.assertEqual(rows["blk.0.attn_q.weight"]["counts"], [256])
        experts = rows["blk.3.ffn_gate_exps.weight"]
        self.assertEqual((experts["experts"], sum(experts["counts"])), (8, 2 * 256))
        self.assertTrue(all(row["mean_square"] > 0 for row in rows.values()))
        data = file.read_bytes()
        self.assertTrue(data.startswith(b"GGUF"))
        # llama.cpp refuses a file without these.
        for key in (b"imatrix.datasets", b"imatrix.chunk_count", b"imatrix.chunk_size"):
            self.assertIn(key, data)
        self.assertIn(str(self.tokens).encode(), data)
        text = self.succeed(*importance)
        self.assertRegex(text, r"blk\.0\.attn_q\.weight +128 +1 +0 +256 ")
        report = self.document("quantize", QWEN, "-o", self.directory / "out", "--format", "nf3",
                               "--group-size", 64, "--method", "mse", "--imatrix", file)
        weighted = {row["name"] for row in report["fallbacks"]}
        self.assertNotIn("model.layers.0.self_attn.q_proj.weight", weighted)

    def test_wrong_use(self) -> None:
        for arguments, says in (
                ((), "expected one of --routing, --sensitivity, --importance and --sparsity"),
                (("--routing", "--tokens", self.tokens, "--seed", 1), "for --sensitivity"),
                (("--importance", "--sensitivity"), "expected one of"),
                (("--importance", "--plot", "a"), "are for --sensitivity"),
                (("--importance", "--host-experts", "2"), "--host-experts are for --routing"),
                (("--sensitivity", "--host-experts", "2"), "--host-experts are for --routing"),
                (("--sparsity", "--host-experts", "2"), "runs no tokens"),
                (("--importance", "--tokens", self.tokens), "--importance: --prompts, --tokens"),
                (("--routing",), "--prompts or --tokens is needed"),
                (("--routing", "--sparsity"), "expected one of"),
                (("--sparsity", "--tokens", self.tokens), "runs no tokens"),
                (("--routing", "--tokens", "a", "--prompts", "b"), "exclude each other"),
                (("--routing", "--prompts", "b"), "--prompts: needs a tokenizer"),
                (("--routing", "--tokens", self.tokens, "--window", 0), "--window"),
        ):
            self.refuse(USAGE, "analyze", QWEN, *arguments, says=(says,))
        absent = self.directory / "absent" / "file"
        for option in ("--tokens", "-o", "--trace"):
            given = () if option == "--tokens" else ("--tokens", self.tokens)
            self.refuse(IO, "analyze", QWEN, "--routing", *given, option, absent,
                        says=(str(absent),))

    def test_wrong_traces(self) -> None:
        for arguments, says in (
                (("--trace", self.trace), "--trace: expected one --shape"),
                (("--cache", "1GB"), "--cache: needs --trace"),
                (("--trace", self.trace, *EXPERT, "--cache", "1GBit"), "--cache"),
        ):
            self.refuse(USAGE, "bench", "moe", *arguments, says=(says,))
        self.refuse(USAGE, "bench", "gemm", "--trace", self.trace, says=("has no --trace",))
        self.refuse(IO, "bench", "moe", "--trace", self.trace, *EXPERT, says=("trace.jsonl",))
        self.trace.write_text('{"layers":[{"layer":0,"experts":[1]}]}\n{"layers":[3]}\n')
        self.refuse(MALFORMED, "bench", "moe", "--trace", self.trace, *EXPERT, says=("line 2",))
        self.trace.write_text('{"layers":[{"layer":0,"experts":[1]}]}\n')
        self.refuse(USAGE, "bench", "moe", "--trace", self.trace, *EXPERT, "--cache", "1000",
                    says=("layer 0, expert 1: ", "the capacity is 1000"))


if __name__ == "__main__":
    unittest.main()
