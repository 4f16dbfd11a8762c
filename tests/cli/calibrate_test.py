"""quantize --method gptq and awq: texts, quality, outliers, fallbacks, resuming, wrong input."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
import time
import unittest
from pathlib import Path
from typing import Any

from command_line import COMMAND, GLM, IO, MALFORMED, QWEN, USAGE, CommandTestCase, run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from plant_outliers import plant  # noqa: E402

TOKENS = Path(QWEN) / "validation_tokens.txt"
RECIPE = ("--recipe", "uniform:nf3/g64")
# With fewer tokens GPTQ leaves the matrices of 128 inputs to mse.
LEAST_TOKENS = 1280


def tensors_of(directory: Path) -> dict[str, bytes]:
    """The stored bytes of every tensor."""
    stored = {}
    for file in sorted(directory.glob("*.safetensors")):
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                stored[name] = data[8 + size + begin : 8 + size + end]
    return stored


class Calibrate(CommandTestCase):
    """The sample models, few tokens."""

    def setUp(self) -> None:
        super().setUp()
        ids = TOKENS.read_text().split()
        self.ids = self.directory / "ids.txt"
        # Evaluation takes the first tokens of the text.
        self.ids.write_text(" ".join(ids[8000:]))

    def quantize(self, name: str, *arguments: object, source: object = QWEN) -> dict[str, Any]:
        document: dict[str, Any] = self.document(
            "quantize", source, "-o", self.directory / name, *RECIPE, *arguments)
        return document

    def gptq(self, name: str, *arguments: object, source: object = QWEN) -> dict[str, Any]:
        return self.quantize(name, "--method", "gptq", *arguments, source=source)

    def divergence(self, name: str, source: object = QWEN, windows: int = 6) -> float:
        document = self.document("compare", self.directory / name, "--against", source,
                                 "--tokens", TOKENS, "--max-windows", windows, "--exact")
        divergence: float = document["kl_mean"]
        return divergence

    def test_a_text_brings_the_model_nearer(self) -> None:
        for source in (QWEN, GLM):
            self.quantize("mse", "--method", "mse", "--overwrite", source=source)
            report = self.gptq("gptq", "--calibration-ids", self.ids, "--calibration-tokens", 3072,
                               "--overwrite", source=source)
            self.assertEqual(report["method"], "gptq")
            self.assertEqual(report["fallbacks"], [])
            # Each model has an expert that one of 1500 tokens selects.
            self.assertLessEqual(len(report["unselected_experts"]), 1)
            self.succeed("verify", self.directory / "gptq")
            self.assertLess(self.divergence("gptq", source), 0.8 * self.divergence("mse", source))

    def rotated(self, name: str) -> dict[str, bool]:
        """Whether each quantized matrix is rotated."""
        rows = self.document("inspect", self.directory / name)["tensors"]
        return {row["name"]: row["input_hadamard"] > 0 for row in rows if row["group_size"]}

    def test_inputs_are_rotated_where_that_lowers_the_error(self) -> None:
        planted = self.directory / "planted"
        plant(Path(QWEN), planted, 30.0)
        few = ("--calibration-ids", self.ids, "--calibration-tokens", 1536)
        plain = self.gptq("plain", *few, source=planted)
        self.assertEqual((plain["rotatable"], plain["rotated"]), (0, 0))
        report = self.gptq("rotated", *few, "--hadamard", 128, source=planted)
        self.assertGreater(report["rotated"], 0)
        rotated = self.rotated("rotated")
        self.assertEqual(sum(rotated.values()), report["rotated"])
        for name, is_rotated in rotated.items():
            # Outliers were planted before q, k and v; these share a choice, and experts have none.
            if re.search(r"[qkv]_proj", name):
                self.assertTrue(is_rotated, name)
            if "experts" in name:
                self.assertFalse(is_rotated, name)
        self.succeed("verify", self.directory / "rotated")
        self.assertLess(self.divergence("rotated", planted),
                        0.9 * self.divergence("plain", planted))
        # Without outliers other matrices are left as they are.
        report = self.gptq("without", *few, "--hadamard", 128)
        self.assertLess(report["rotated"], report["rotatable"])
        self.assertEqual(sum(self.rotated("without").values()), report["rotated"])
        self.gptq("few", *few)
        self.assertLess(self.divergence("without"), 1.02 * self.divergence("few"))

    def test_rotated_matrices_are_exported(self) -> None:
        few = ("--calibration-ids", self.ids, "--calibration-tokens", 1536)
        planted = self.directory / "planted"
        plant(Path(QWEN), planted, 30.0)
        source = self.directory / "s4"
        self.document("quantize", planted, "-o", source, "--recipe", "uniform:s4/g32/h32",
                      "--method", "gptq", *few)
        self.succeed("export", source, "-o", self.directory / "s4.gguf", "--to", "gguf")
        self.succeed("verify", self.directory / "s4.gguf")
        self.refuse(USAGE, "export", source, "-o", self.directory / "no", "--to", "gptq",
                    says=("scale or rotate their inputs",))

    def test_rounding_alone_is_not_rotated(self) -> None:
        target = ("-o", self.directory / "no")
        for method in ("rtn", "mse"):
            self.refuse(USAGE, "quantize", QWEN, *target, *RECIPE, "--method", method,
                        "--hadamard", 128, says=("need method gptq or awq+gptq",))
        self.refuse(USAGE, "quantize", QWEN, *target, *RECIPE, "--method", "gptq", "--hadamard", 48,
                    says=("--hadamard: expected a power of two from 2 to 32768, got 48",))
        self.assertFalse((self.directory / "no").exists())

    def test_a_sampled_text_is_reproducible(self) -> None:
        few = ("--calibration-tokens", LEAST_TOKENS)
        self.gptq("a", *few)
        self.gptq("b", *few, "--seed", 0)
        self.gptq("c", *few, "--seed", 1)
        first = tensors_of(self.directory / "a")
        self.assertEqual(first, tensors_of(self.directory / "b"))
        self.assertNotEqual(first, tensors_of(self.directory / "c"))

    def test_with_too_few_tokens_it_is_mse(self) -> None:
        """1280 tokens suffice for 128 inputs, those of experts and their down projections."""
        self.quantize("mse", "--method", "mse", source=GLM)
        report = self.gptq("gptq", "--calibration-ids", self.ids, "--calibration-tokens",
                           LEAST_TOKENS, source=GLM)
        reasons = {entry["name"]: entry["reason"] for entry in report["fallbacks"]}
        query = "model.layers.0.self_attn.q_proj.weight"
        self.assertEqual(reasons[query],
                         "mse: 1280 tokens are too few for 192 inputs; at least 1408")
        down = "model.layers.1.mlp.shared_experts.down_proj"
        self.assertNotIn(f"{down}.weight", reasons)
        self.assertLess(0, report["calibrated_parameters"])
        self.assertLess(report["calibrated_parameters"], report["quantized_parameters"])
        mse, gptq = (tensors_of(self.directory / name) for name in ("mse", "gptq"))
        codes = query.replace("weight", "qweight")
        self.assertEqual(mse[codes], gptq[codes])
        self.assertNotEqual(mse[f"{down}.qweight"], gptq[f"{down}.qweight"])
        config = json.loads((self.directory / "gptq/config.json").read_text())
        modules = config["quantization_config"]["modules"]
        self.assertEqual(modules[query]["method"], "mse")
        self.assertNotIn("method", modules[f"{down}.weight"])
        card = (self.directory / "gptq/README.md").read_text()
        self.assertIn("Quantized with another method, for want of data:", card)
        self.succeed("verify", self.directory / "gptq")

    def test_without_any_data_it_is_an_error(self) -> None:
        out = self.directory / "out"
        self.refuse(USAGE, "quantize", QWEN, "-o", out, *RECIPE, "--method", "gptq",
                    "--calibration-ids", self.ids, "--calibration-tokens", 512,
                    says=("512 tokens are too few for every matrix", "needs at least 1280"))
        renamed = self.directory / "renamed"
        shutil.copytree(QWEN, renamed)
        file = renamed / "model.safetensors"
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = data[8 : 8 + size].replace(b'"model.layers.', b'"part.model.layers.')
        file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
        for method in ("gptq", "awq", "awq+gptq"):
            for dry in ((), ("--dry-run",)):
                self.refuse(USAGE, "quantize", renamed, "-o", out, *RECIPE, "--method", method,
                            "--calibration-ids", self.ids, *dry,
                            says=(f"method {method}: there are no data",
                                  "\"part.model.layers.0."))
        self.assertFalse(out.exists())

    def test_an_expert_that_no_token_selects(self) -> None:
        model = self.directory / "model"
        shutil.copytree(GLM, model)
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        for file in model.glob("*.safetensors"):
            data = bytearray(file.read_bytes())
            size = struct.unpack("<Q", data[:8])[0]
            entry = json.loads(data[8 : 8 + size]).get(bias)
            if entry is None:
                continue
            start = 8 + size + entry["data_offsets"][0]
            count = {"F32": 4, "BF16": 2}[entry["dtype"]]
            data[start : start + count] = struct.pack("<f", -1e30)[4 - count :]
            file.write_bytes(data)
        few = ("--calibration-ids", self.ids, "--calibration-tokens", 2048)
        report = self.gptq("gptq", *few, source=model)
        self.assertEqual(report["fallbacks"], [])
        self.assertEqual(report["unselected_experts"], ["model.layers.1.expert 0"])
        self.assertEqual(report["calibrated_parameters"], report["quantized_parameters"])
        said = self.succeed("quantize", model, "-o", self.directory / "text", *RECIPE, "--method",
                            "gptq", *few)
        self.assertIn("no token selects, calibrated on the inputs of all:\n"
                      "  model.layers.1.expert 0 (", said)
        self.succeed("verify", self.directory / "gptq", "--against", model, "--max-error", 0.6)

    def test_lm_head_and_embedding(self) -> None:
        self.gptq("gptq", "--calibration-ids", self.ids, "--calibration-tokens", 2048,
                  "--override", "lm_head=u4/g32", "--override", "embed_tokens=s8/g64")
        self.succeed("verify", self.directory / "gptq", "--against", QWEN, "--max-error", 0.4)

    def test_fractional_zeros(self) -> None:
        few = ("--calibration-ids", self.ids, "--calibration-tokens", 2048)
        for choice in ("int2/g32", "int2/g32/frac"):
            self.document("quantize", QWEN, "-o", self.directory / choice.replace("/", "-"),
                          "--recipe", f"uniform:{choice}", "--method", "gptq", *few)
        self.assertLess(self.divergence("int2-g32-frac"), 0.95 * self.divergence("int2-g32"))

    def test_awq_removes_what_outliers_cost(self) -> None:
        options = ("--calibration-ids", self.ids, "--calibration-tokens", 6144)
        for source, factors in ((QWEN, (30.0, 0.125)), (GLM, (30.0,))):
            self.gptq("plain", *options, "--overwrite", source=source)
            # Over fewer windows, the divergence changes by 5 % with the rounding of the sums.
            plain = self.divergence("plain", source, 24)
            for factor in factors:
                planted = self.directory / f"{Path(source).name}-{factor}"
                plant(Path(source), planted, factor)
                self.gptq("gptq", *options, "--overwrite", source=planted)
                report = self.quantize("awq", "--method", "awq+gptq", *options, "--overwrite",
                                       source=planted)
                self.assertGreaterEqual(report["inputs"], report["scaled_inputs"])
                self.assertGreater(report["scaled_inputs"], 0)
                # The planted model computes what the plain one does.
                self.assertGreater(self.divergence("gptq", source, 24), 1.25 * plain)
                self.assertLess(self.divergence("awq", source, 24), 1.1 * plain)

    def test_awq_alone_has_the_codes_of_mse(self) -> None:
        planted = self.directory / "planted"
        plant(Path(QWEN), planted, 30.0)
        options = ("--calibration-ids", self.ids, "--calibration-tokens", 1024)
        self.quantize("mse", "--method", "mse", source=planted)
        report = self.quantize("awq", "--method", "awq", *options, source=planted)
        self.assertEqual((report["method"], report["fallbacks"]), ("awq", []))
        self.assertLess(self.divergence("awq"), 0.7 * self.divergence("mse"))
        norm = "model.layers.0.input_layernorm.weight"
        mse, awq = (tensors_of(self.directory / name) for name in ("mse", "awq"))
        self.assertNotEqual(mse[norm], awq[norm])
        self.succeed("verify", self.directory / "awq")
        self.refuse(USAGE, "verify", self.directory / "awq", "--against", planted,
                    says=("method awq scaled the inputs", "metal-marlin compare"))

    def test_a_killed_run_resumes_to_the_same_bits(self) -> None:
        planted = self.directory / "planted"
        plant(Path(QWEN), planted, 30.0)
        for method, source, more in (("gptq", Path(QWEN), ()), ("awq+gptq", planted, ()),
                                     ("gptq", Path(QWEN), ("--hadamard", 32))):
            with self.subTest((method, *more)):
                self.kill_and_resume(method, source, *more)

    def kill_and_resume(self, method: str, source: Path, *more: object) -> None:
        options = ("--calibration-ids", self.ids, "--calibration-tokens", LEAST_TOKENS,
                   "--shard-size", "200KB", "--overwrite", *more)
        self.quantize("whole", "--method", method, *options, source=source)
        out = self.directory / "-".join(map(str, ("out", method, *more)))
        command = ("quantize", source, "-o", out, *RECIPE, "--method", method, *options)
        with subprocess.Popen([COMMAND, *map(str, command)], stderr=subprocess.DEVNULL) as process:
            # The sixth shard begins when five are complete.
            while process.poll() is None and len(list(self.directory.glob(".*/*.safetensors"))) < 6:
                time.sleep(0.002)
            process.kill()
        self.assertFalse(out.exists())
        self.document(*command, "--resume")
        whole = self.directory / "whole"
        self.assertEqual(tensors_of(out), tensors_of(whole))
        self.assertEqual((out / "config.json").read_text(), (whole / "config.json").read_text())

    def test_wrong_input(self) -> None:
        out = self.directory / "out"
        empty = self.directory / "empty.txt"
        empty.write_text("")
        large = self.directory / "large.txt"
        large.write_text("1 2 999999")
        single = self.directory / "one.txt"
        single.write_text("7")
        text = self.directory / "text.txt"
        text.write_text("In the beginning")
        gptq = ("quantize", QWEN, "-o", out, "--method", "gptq")
        for code, arguments, says in (
            (MALFORMED, (*gptq, "--calibration-ids", empty), f"{empty}: has no tokens"),
            (USAGE, (*gptq, "--calibration-ids", large), "token 2 is 999999, expected 0.."),
            (USAGE, (*gptq, "--calibration-ids", single), "expected 2 tokens or more, got 1"),
            (IO, (*gptq, "--calibration-ids", self.directory / "none"), "none"),
            (USAGE, (*gptq, "--calibration", text), "needs a tokenizer"),
            (USAGE, (*gptq, "--calibration", text, "--calibration-ids", empty), "exclude"),
            (USAGE, (*gptq, "--calibration-ids", self.ids, "--seed", 1), "--seed"),
            (USAGE, (*gptq, "--calibration-tokens", 1), "--calibration-tokens"),
            (USAGE, (*gptq, "--device", "toaster"), "toaster"),
            (USAGE, ("quantize", QWEN, "-o", out, "--seed", 1), "uses no calibration"),
            (USAGE, ("quantize", Path(QWEN) / "model.safetensors", "-o", out, "--method", "gptq"),
             "a model is a directory"),
            (USAGE, ("quantize", Path(QWEN) / "model.safetensors", "-o", out, "--method", "awq"),
             "a model is a directory"),
            (USAGE, ("quantize", QWEN, "-o", out, "--method", "awq", "--pruning", "weighted"),
             "needs --method gptq"),
            (USAGE, ("quantize", QWEN, "-o", out, "--method", "gptq+awq"),
             "known: rtn, mse, gptq, awq, awq+gptq"),
        ):
            with self.subTest(says):
                self.refuse(code, *arguments, says=(says,))
        self.assertFalse(out.exists())
        # Nothing is sampled or run for a plan.
        done = run(*gptq, "--dry-run", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
