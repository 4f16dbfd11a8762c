"""The sample model in the forms in which others store models: the same tokens, or a refusal that
names the tensor or the key."""

from __future__ import annotations

import json
import pathlib
import struct
import unittest

from command_line import (MALFORMED, QWEN, USAGE, CommandTestCase, read_directory,
                          read_safetensors, write_safetensors)

Tensors = dict[str, tuple[str, list[int], bytes]]
GOLDEN = json.loads((QWEN / "golden.json").read_text())
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EXTRA = "--allow-extra-tensors"


class Forms(CommandTestCase):
    """Each test writes the model's tensors and config its own way."""

    def setUp(self) -> None:
        super().setUp()
        self.model = self.directory / "model"
        self.model.mkdir()
        self.tensors: Tensors = read_directory(QWEN)
        self.config = json.loads((QWEN / "config.json").read_text())
        self.prompt = self.directory / "tokens.json"
        self.prompt.write_text(json.dumps(GOLDEN["prompt_ids"]))

    def write(self) -> None:
        write_safetensors(self.model / "model.safetensors", self.tensors)
        (self.model / "config.json").write_text(json.dumps(self.config))

    def shard(self, listed: dict[str, str]) -> None:
        """Two files of alternate tensors, and an index."""
        names = sorted(self.tensors)
        for i, part in enumerate((names[::2], names[1::2])):
            write_safetensors(self.model / f"part{i}.safetensors",
                              {name: self.tensors[name] for name in part})
        index = {name: f"part{i % 2}.safetensors" for i, name in enumerate(names)}
        weight_map = {name: file for name, file in {**index, **listed}.items() if file}
        (self.model / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map}))
        (self.model / "config.json").write_text(json.dumps(self.config))

    def greedy(self, *options: object, model: pathlib.Path | None = None) -> list[int]:
        document = self.document("generate", model or self.model, "--tokens", self.prompt,
                                 "--max-tokens", 12, "--exact", "--ignore-eos", *options)
        ids: list[int] = document["token_ids"]
        return ids

    def check(self, *options: object) -> None:
        self.assertEqual(self.greedy(*options), GOLDEN["greedy_ids"][:12])

    def refuse_to_run(self, code: int, *says: str) -> None:
        self.refuse(code, "generate", self.model, "--tokens", self.prompt, says=says)

    def test_names_of_a_base_model(self) -> None:
        self.tensors = {name.removeprefix("model."): value for name, value in self.tensors.items()}
        self.write()
        self.check()
        shown = self.document("inspect", self.model)
        self.assertIn("named as in a base model", shown["notes"][0])
        report = self.document("quantize", self.model, "-o", self.directory / "out")
        self.assertEqual(report["notes"], shown["notes"])
        self.assertIn("model.norm.weight", read_directory(self.directory / "out"))

    def test_experts_in_stacks_as_mlx_lm_stores_them(self) -> None:
        for name in [name for name in self.tensors if ".experts.0." in name]:
            matrices: list[tuple[str, list[int], bytes]] = []
            before, after = name.split(".experts.0.")
            while (own := f"{before}.experts.{len(matrices)}.{after}") in self.tensors:
                matrices.append(self.tensors.pop(own))
            dtype, shape, _ = matrices[0]
            self.tensors[name.replace(".experts.0.", ".switch_mlp.")] = (
                dtype, [len(matrices), *shape], b"".join(data for _, _, data in matrices))
        self.write()
        self.check()
        self.assertIn("mlp.experts.*", self.document("inspect", self.model)["notes"][0])

    def test_scales_of_a_cache_and_doubles(self) -> None:
        for name in ("k_scale", "v_proj.output_scale", "attn.kv_scale"):
            self.tensors[f"model.layers.0.self_attn.{name}"] = ("F32", [1], struct.pack("<f", 2))
        _, shape, data = self.tensors["model.norm.weight"]
        values = [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)]
        self.tensors["model.norm.weight"] = ("F64", shape, struct.pack(f"<{len(values)}d", *values))
        self.write()
        self.check()

    def own_head(self) -> None:
        dtype, shape, data = self.tensors[TABLE]
        rows = len(data) // shape[0]
        self.tensors[HEAD] = (dtype, shape, data[rows:] + data[:rows])
        self.config["tie_word_embeddings"] = True
        self.write()

    def test_a_head_of_its_own_is_used_by_every_command(self) -> None:
        self.own_head()
        tied = self.greedy()
        self.assertNotEqual(tied, GOLDEN["greedy_ids"][:12])
        self.config["tie_word_embeddings"] = False
        self.write()
        self.assertEqual(self.greedy(), tied)
        self.own_head()
        gguf = self.directory / "model.gguf"
        report = self.document("export", self.model, "-o", gguf, "--to", "gguf")
        self.assertIn("tie_word_embeddings is taken for false", report["notes"][0])
        self.assertEqual(self.greedy(model=gguf), tied)
        out = self.directory / "out"
        shown = self.succeed("quantize", self.model, "-o", out, "--recipe", "uniform:s8/g32")
        self.assertIn("note: tie_word_embeddings is true, but lm_head differs", shown)
        self.assertFalse(json.loads((out / "config.json").read_text())["tie_word_embeddings"])

    def test_a_copy_of_a_tied_matrix_and_one_under_the_heads_name(self) -> None:
        self.tensors.pop(HEAD, None)
        self.config["tie_word_embeddings"] = True
        self.write()
        tied = self.greedy()
        self.tensors[HEAD] = self.tensors[TABLE]
        self.write()
        self.assertEqual(self.greedy(), tied)
        del self.tensors[TABLE]
        self.write()
        self.assertEqual(self.greedy(), tied)

    def test_tensors_that_the_model_does_not_have(self) -> None:
        self.tensors["v_head.summary.bias"] = ("F32", [1], bytes(4))
        self.write()
        self.refuse_to_run(MALFORMED, "v_head.summary.bias", "is not a part of a qwen3_moe",
                           "allow_extra_tensors")
        self.check(EXTRA)

    def test_an_index_that_disagrees(self) -> None:
        self.tensors["extra.bias"] = ("F32", [1], bytes(4))
        self.shard({"extra.bias": ""})
        self.refuse_to_run(MALFORMED, "extra.bias", "is not listed")
        self.check(EXTRA)
        self.assertIn("1 tensors", self.document("inspect", self.model, EXTRA)["notes"][0])
        out = self.directory / "out"
        self.refuse(MALFORMED, "quantize", self.model, "-o", out, says=("extra.bias",))
        self.succeed("quantize", self.model, "-o", out, EXTRA)
        self.assertNotIn("extra.bias", read_directory(out))
        names = sorted(self.tensors)
        self.shard({"extra.bias": "", names[0]: "part1.safetensors"})
        self.refuse_to_run(MALFORMED, names[0], "is listed in part1.safetensors but is in part0")
        self.check(EXTRA)
        self.shard({"extra.bias": "", "gone.weight": "part0.safetensors"})
        self.refuse(MALFORMED, "generate", self.model, "--tokens", self.prompt, EXTRA,
                    says=("gone.weight", "does not hold it"))

    def test_keys_that_are_not_understood(self) -> None:
        for key, value in (("rope_ratio", 2), ("logit_scale", 0.5), ("scale_emb", 12)):
            self.config = json.loads((QWEN / "config.json").read_text())
            self.config[key] = value
            self.write()
            self.refuse_to_run(USAGE, f"config.json: {key}: {value} is not understood")
        self.config = json.loads((QWEN / "config.json").read_text())
        self.config["my_note"] = "harmless"
        self.write()
        self.check()

    def test_names_in_shards_and_read_back(self) -> None:
        self.shard({})
        self.check()
        self.assertEqual(read_safetensors(self.model / "part0.safetensors").keys()
                         | read_safetensors(self.model / "part1.safetensors").keys(),
                         self.tensors.keys())


if __name__ == "__main__":
    unittest.main()
