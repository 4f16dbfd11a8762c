"""prepare and --prepared: the same numbers as without, and one line for every usage error."""

from __future__ import annotations

import json
import os
import shutil
import unittest

from command_line import GLM, IO, MALFORMED, QWEN, USAGE, CommandTestCase

TOKENS = QWEN / "validation_tokens.txt"


class Prepare(CommandTestCase):
    """A prepared file next to a model's directory."""

    def perplexity(self, *arguments: object) -> float:
        nll: float = self.document("perplexity", *arguments, "--tokens", TOKENS,
                                   "--max-windows", 1)["nll"]
        return nll

    def test_prepared_models_compute_the_same(self) -> None:
        quantized = self.directory / "quantized"
        self.succeed("quantize", GLM, "-o", quantized)
        for model in (QWEN, quantized):
            file = self.directory / "file"
            document = self.document("prepare", model, "-o", file, "--overwrite")
            self.assertEqual(document["output"], str(file))
            self.assertEqual(document["layout"], "cpu_panels/1")
            self.assertEqual(document["bytes"], file.stat().st_size)
            self.assertGreater(document["seconds"], 0)
            self.assertEqual(self.perplexity(model),
                             self.perplexity(model, "--prepared", file, "--threads", 1))
            tokens = self.directory / "tokens"
            tokens.write_text("1 2 3")
            texts = [self.document("generate", model, "--tokens", tokens, "--max-tokens", 5, *more)
                     for more in ((), ("--prepared", file))]
            self.assertEqual(texts[0]["token_ids"], texts[1]["token_ids"])
            self.assertEqual(self.document("verify", file), {"ok": True, "tensors": []})
            self.assertIn("all checksums match", self.succeed("verify", file))
        compared = self.document("compare", quantized, "--against", GLM, "--prepared", file,
                                 "--tokens", TOKENS, "--max-windows", 1)
        self.assertGreater(compared["kl_mean"], 0)

    def test_every_level_reads_the_file_of_another(self) -> None:
        file = self.directory / "file"
        self.succeed("prepare", QWEN, "-o", file)
        for level in ("scalar", "avx2"):
            os.environ["MARLIN_CPU"] = level
            self.addCleanup(os.environ.pop, "MARLIN_CPU", None)
            self.assertEqual(self.perplexity(QWEN),
                             self.perplexity(QWEN, "--prepared", file))
            other = self.directory / level
            self.succeed("prepare", QWEN, "-o", other)
            self.assertEqual(other.read_bytes(), file.read_bytes())

    def test_wrong_use(self) -> None:
        file = self.directory / "file"
        self.succeed("prepare", QWEN, "-o", file)
        tokens = ("--tokens", TOKENS)
        self.refuse(USAGE, "prepare", QWEN, "-o", file, says=("exists already",))
        self.refuse(USAGE, "prepare", QWEN, "-o", self.directory, "--overwrite",
                    says=("is not a file of prepared weights",))
        self.refuse(IO, "prepare", QWEN, "-o", self.directory / "no/file")
        self.refuse(IO, "prepare", self.directory / "absent", "-o", self.directory / "new")
        self.refuse(USAGE, "prepare", QWEN / "model.safetensors", "-o", self.directory / "new")
        self.refuse(USAGE, "perplexity", GLM, *tokens, "--prepared", file,
                    says=(str(file), "another, or changed since"))
        self.refuse(IO, "perplexity", QWEN, *tokens, "--prepared", self.directory / "absent")
        self.refuse(IO, "perplexity", QWEN, *tokens, "--prepared", "/dev/zero")
        self.refuse(MALFORMED, "perplexity", QWEN, *tokens, "--prepared", TOKENS,
                    says=("is not a file of prepared weights",))
        self.refuse(USAGE, "verify", file, "--against", QWEN, says=("no --against",))
        self.refuse(USAGE, "bench", "gemm", "--prepared", file, says=("has no --prepared",))
        image = bytearray(file.read_bytes())
        image[5000] ^= 1
        file.write_bytes(image)
        self.refuse(MALFORMED, "verify", file, says=("have checksum", str(file)))
        file.write_bytes(image[:-1])
        self.refuse(MALFORMED, "perplexity", QWEN, *tokens, "--prepared", file,
                    says=("expected", str(file)))
        self.assert_nothing_written("file")

    def test_a_changed_directory(self) -> None:
        model = self.directory / "model"
        shutil.copytree(QWEN, model, copy_function=shutil.copyfile)
        file = self.directory / "file"
        self.succeed("prepare", model, "-o", file)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
        self.refuse(USAGE, "perplexity", model, "--tokens", TOKENS, "--prepared", file,
                    says=("changed since", "prepare them again"))

    def test_loading_is_timed(self) -> None:
        file = self.directory / "file"
        self.succeed("prepare", QWEN, "-o", file)
        for more in ((), ("--prepared", file)):
            document = self.document("bench", "load", QWEN, "--threads", 1, *more)
            (row,) = document["results"]
            self.assertEqual((row["op"], row["path"]), ("load", str(QWEN)))
            for key in ("seconds", "gbps", "file_bytes", "bytes", "parameters"):
                self.assertGreater(row[key], 0)
            self.assertEqual(list(row["stages"]),
                             ["open", "read", "prepare", "wait", "vectors", "tables"])
            self.assertGreater(row["stages"]["prepare"], 0)
        text = self.succeed("bench", "load", QWEN)
        for word in ("GB/s", "  prepare ", "  wait "):
            self.assertIn(word, text)
        self.refuse(USAGE, "bench", "load", QWEN, "--batch", 2, says=("load: has no --batch",))
        self.refuse(USAGE, "bench", "load", says=("MODEL is required; see",))


if __name__ == "__main__":
    unittest.main()
