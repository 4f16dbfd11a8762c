"""export --to gptq, end to end: what is exported decodes, as GPTQ defines it, to the weights of the
directory that it was made from, and a model runs from it with the same results."""

from __future__ import annotations

import json
import pathlib
import struct
import unittest

from command_line import QWEN, CommandTestCase, read_directory

Tensor = tuple[str, list[int], bytes]


def numbers(tensor: Tensor) -> tuple[float, ...]:
    code = {"I32": "I", "F16": "e", "F32": "f"}[tensor[0]]
    return struct.unpack(f"<{len(tensor[2]) // struct.calcsize(code)}{code}", tensor[2])


def decoded(tensors: dict[str, Tensor], base: str, bits: int) -> list[float]:
    """A matrix [n, k], computed in doubles: scale * (code - zero) of the group of every k."""
    words, zeros, scales, groups = (numbers(tensors[f"{base}.{part}"])
                                    for part in ("qweight", "qzeros", "scales", "g_idx"))
    n = tensors[f"{base}.qweight"][1][1]
    run = 32 // bits

    def code(of: tuple[float, ...], word: int, at: int) -> int:
        return int(of[word]) >> bits * at & (1 << bits) - 1

    return [scales[int(group) * n + c]
            * (code(words, k // run * n + c, k % run)
               - code(zeros, int(group) * (n // run) + c // run, c % run))
            for c in range(n) for k, group in enumerate(groups)]


class GptqExport(CommandTestCase):
    def exported(self, choice: str) -> tuple[pathlib.Path, pathlib.Path]:
        """The sample model, quantized, and that in GPTQ's format."""
        folder = self.directory / choice.replace("/", "-")
        folder.mkdir()
        quantized, output = folder / "quantized", folder / "gptq"
        self.succeed("quantize", QWEN, "-o", quantized, "--recipe", f"uniform:{choice}")
        self.succeed("export", quantized, "-o", output, "--to", "gptq")
        return quantized, output

    def test_it_decodes_to_the_same_weights(self) -> None:
        for choice, bits in (("s4/g32", 4), ("u4/g64", 4), ("s8/g32", 8)):
            with self.subTest(choice):
                quantized, output = self.exported(choice)
                settings = json.loads((output / "config.json").read_text())["quantization_config"]
                self.assertEqual((settings["quant_method"], settings["checkpoint_format"],
                                  settings["bits"]), ("gptq", "gptq_v2", bits))
                plain = quantized.parent / "plain"
                self.succeed("dequantize", quantized, "-o", plain, "--dtype", "fp32")
                expected, tensors = read_directory(plain), read_directory(output)
                for base in ("model.layers.0.self_attn.k_proj",
                             "model.layers.1.mlp.experts.3.down_proj"):
                    # Both products are exact in doubles; the library rounds to fp32.
                    for value, want in zip(decoded(tensors, base, bits),
                                           numbers(expected[f"{base}.weight"]), strict=True):
                        self.assertAlmostEqual(value, want, delta=2.0 ** -22 * abs(value))

    def test_a_model_runs_from_it(self) -> None:
        tokens = ("--tokens", QWEN / "validation_tokens.txt", "--max-windows", 1)
        quantized, output = self.exported("u4/g32")
        likelihoods = [self.document("perplexity", model, *tokens)["nll"]
                       for model in (quantized, output)]
        self.assertEqual(*likelihoods)
        self.succeed("verify", output)


if __name__ == "__main__":
    unittest.main()
