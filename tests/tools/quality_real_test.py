"""The measurement of a real model: its rows, sizes and continuation, with a made-up metal-marlin;
novels from a made-up package; channels in another order."""

from __future__ import annotations

import importlib.util
import io
import json
import pathlib
import struct
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zlib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench")]

import novels  # noqa: E402
import quality_real  # noqa: E402

# A metal-marlin that says how it was called, and whose losses are always the same.
COMMAND = """\
#!{python}
import json, pathlib, sys
words = sys.argv[1:]
with open({calls!r}, "a") as calls:
    print(*words, file=calls)
score = {{"perplexity": 20.0, "standard_error": 0.5}}
print(json.dumps({{
    "devices": lambda: {{"devices": [{{"model": "made up", "features": ["avx2"]}}]}},
    "quantize": lambda: {{}},
    "inspect": lambda: {{"tensors": [
        {{"layer_class": "embedding", "shape": [4, 32], "bytes": 132}},
        {{"layer_class": "mlp_up", "shape": [2, 4, 8], "bytes": 36}}]}},
    "compare": lambda: {{"model": score, "reference": {{"perplexity": 19.0}}, "kl_mean": 0.1,
                        "kl_p99": 0.5, "top1_agreement": 0.9, "perplexity_ratio": 1.05,
                        "perplexity_ratio_error": 0.01, "tokens": 512}},
}}[words[0]]()))
"""


def character_vector(lines: list[str]) -> bytes:
    """Serializes lines as R does since 3.5."""
    elements = b"".join(struct.pack(">ii", 0x00040009, len(line.encode())) + line.encode()
                        for line in lines)
    return (b"X\n" + struct.pack(">iiii", 3, 0x040201, 0x030500, 5) + b"UTF-8"
            + struct.pack(">ii", novels.STRINGS, len(lines)) + elements)


def package(vectors: list[bytes]) -> bytes:
    """Returns a Debian package with R's database of these objects."""
    database = b"".join(struct.pack(">I", len(v)) + zlib.compress(v) for v in vectors)
    files = io.BytesIO()
    with tarfile.open(fileobj=files, mode="w:xz") as archive:
        entry = tarfile.TarInfo("./usr/lib/R/site-library/books/data/Rdata.rdb")
        entry.size = len(database)
        archive.addfile(entry, io.BytesIO(database))
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": files.getvalue()}
    return b"!<arch>\n" + b"".join(
        f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data
        + b"\n" * (len(data) % 2)
        for name, data in members.items()
    )


class Novels(unittest.TestCase):
    def test_paragraphs_are_lines(self) -> None:
        lines = ["EMMA", "", "", "Emma Woodhouse, handsome,", "  clever, and rich,", "", "é"]
        found = novels.novels(package([character_vector(lines), character_vector(["PERSUASION"])]))
        self.assertEqual(found, {"EMMA": "EMMA\nEmma Woodhouse, handsome, clever, and rich,\né\n",
                                 "PERSUASION": "PERSUASION\n"})

    def test_refuses_what_is_neither_package_nor_text(self) -> None:
        with self.assertRaisesRegex(ValueError, "not a Debian package"):
            novels.novels(b"PK")
        with self.assertRaisesRegex(ValueError, "kind 13, not a character vector"):
            numbers = character_vector([]).replace(struct.pack(">ii", 16, 0), bytes([0, 0, 0, 13]))
            novels.novels(package([numbers + bytes(4)]))


class Rows(unittest.TestCase):
    def test_sizes_are_of_all_tensors_and_of_the_body(self) -> None:
        tensors = [
            {"layer_class": "embedding", "shape": [4, 32], "bytes": 132},
            {"layer_class": "norm", "shape": [4], "bytes": 16},
            {"layer_class": "attention_qkv", "shape": [4, 8], "bytes": 20},
            {"layer_class": "moe_expert", "shape": [2, 4, 8], "bytes": 36},
        ]
        found = quality_real.sizes(tensors)
        self.assertEqual(found["bytes"], 204)
        self.assertEqual(found["bits_per_weight"], 8 * 204 / 228)
        self.assertEqual(found["body_bits_per_weight"], 8 * 56 / 96)

    def test_an_interrupted_run_continues(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            command, calls = folder / "made-up", folder / "calls"
            command.write_text(COMMAND.format(python=sys.executable, calls=str(calls)))
            command.chmod(0o755)
            (folder / "text").write_text("")

            def run(only: str, commit: str = "abc", *more: str) -> list[dict[str, Any]]:
                calls.write_text("")
                subprocess.run(
                    [sys.executable, str(ROOT / "bench" / "quality_real.py"), str(command), name,
                     "--commit", commit, "--text", str(folder / "text"), "--calibration",
                     str(folder / "text"), "-o", str(folder / "record.json"), "--only", only,
                     *more],
                    check=True, stderr=subprocess.DEVNULL,
                )
                record = json.loads((folder / "record.json").read_text())
                self.assertEqual(record["processor"], "made up (avx2)")
                rows: list[dict[str, Any]] = record["models"]["SmolLM2-135M-Instruct"]
                return rows

            self.assertEqual([row["method"] for row in run("u4/g32 (rtn|gptq)")], ["rtn", "gptq"])
            quantized = [line for line in calls.read_text().splitlines() if "quantize" in line]
            self.assertEqual([("--calibration" in line) for line in quantized], [False, True])
            self.assertTrue(all(quality_real.ENDS in line for line in quantized))
            rows = run("u4/g32 (rtn|mse)")
            self.assertEqual([row["method"] for row in rows], ["rtn", "gptq", "mse"])
            self.assertEqual(rows[2]["body_bits_per_weight"], 4.5)
            self.assertEqual(rows[2]["reference"], 19.0)
            self.assertNotIn("--method rtn", calls.read_text())
            rows = run("u4/g32 mse", "abd", "--keep", "gptq|rtn")
            self.assertEqual([(row["method"], row.get("commit")) for row in rows],
                             [("rtn", "abc"), ("gptq", "abc"), ("mse", None)])
            rows = run("u4/g32 rtn", "abe", "--keep", "gptq")  # It keeps its first commit.
            self.assertEqual([(row["method"], row.get("commit")) for row in rows],
                             [("gptq", "abc"), ("rtn", None)])
            self.assertEqual(len(run("u4/g32 rtn", "abf")), 1)


@unittest.skipUnless(importlib.util.find_spec("numpy"), "numpy is not installed")
class Channels(unittest.TestCase):
    CONFIG = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 6, "num_hidden_layers": 1}

    def model(self) -> dict[str, Any]:
        import numpy as np

        rng = np.random.default_rng(1)
        layer = "model.layers.0."
        shapes = {
            "model.embed_tokens": (5, 8), "model.norm": (8,), f"{layer}input_layernorm": (8,),
            f"{layer}self_attn.v_proj": (4, 8), f"{layer}self_attn.o_proj": (8, 8),
            f"{layer}self_attn.q_proj": (8, 8), f"{layer}mlp.gate_proj": (6, 8),
            f"{layer}mlp.up_proj": (6, 8), f"{layer}mlp.down_proj": (8, 6),
        }
        return {f"{name}.weight": rng.standard_normal(shape) for name, shape in shapes.items()}

    def run_model(self, model: dict[str, Any]) -> Any:
        """Returns queries and logits of a token, of attention that looks at itself alone."""
        import numpy as np

        of = {name.removesuffix(".weight").rpartition(".")[2]: w for name, w in model.items()}
        x = of["embed_tokens"][3]
        y = x * of["input_layernorm"]
        values = (of["v_proj"] @ y).reshape(2, 2)
        x = x + of["o_proj"] @ np.repeat(values, 2, axis=0).reshape(8)
        x = x + of["down_proj"] @ (np.tanh(of["gate_proj"] @ x) * (of["up_proj"] @ x))
        return np.concatenate([of["q_proj"] @ y, of["embed_tokens"] @ (x * of["norm"])])

    def test_the_model_computes_the_same(self) -> None:
        import numpy as np
        import permute_channels

        model = self.model()
        order = permute_channels.orders(self.CONFIG, 5)
        other = {n: permute_channels.reordered(n, w, order) for n, w in model.items()}
        np.testing.assert_allclose(self.run_model(other), self.run_model(model), rtol=1e-12)
        for name, weights in model.items():
            self.assertFalse(np.array_equal(weights, other[name]), name)
            self.assertEqual(sorted(weights.flat), sorted(other[name].flat))

    def test_refuses_other_models(self) -> None:
        import permute_channels

        with self.assertRaisesRegex(ValueError, "q_proj.bias: not a tensor of a Llama-like"):
            permute_channels.reordered("model.layers.0.self_attn.q_proj.bias", [1], {})


if __name__ == "__main__":
    unittest.main()
