"""generate, perplexity, compare and bench model: what they print and what they refuse."""

from __future__ import annotations

import json
import math
import shutil
import unittest

from command_line import GLM, IO, MALFORMED, QWEN, USAGE, CommandTestCase

TOKENS = QWEN / "validation_tokens.txt"
GOLDEN = json.loads((QWEN / "golden.json").read_text())


class Models(CommandTestCase):
    """The commands that run a model."""

    def tokens(self, text: str) -> str:
        """A file of tokens."""
        path = self.directory / "tokens.txt"
        path.write_text(text)
        return str(path)

    def copy_of_sample(self, changes: dict[str, object]) -> str:
        """The sample with another config.json."""
        path = self.directory / "model"
        shutil.copytree(QWEN, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))
        return str(path)

    def test_generate_continues_as_the_reference(self) -> None:
        prompt = self.tokens(json.dumps(GOLDEN["prompt_ids"]))
        result = self.document("generate", QWEN, "--tokens", prompt, "--max-tokens", 48,
                               "--exact", "--ignore-eos")
        self.assertEqual(result["token_ids"], GOLDEN["greedy_ids"])
        self.assertIsNone(result["text"])
        self.assertEqual(result["stop_reason"], "max_tokens")
        self.assertGreater(result["tokens_per_second"], 0)
        shown = self.succeed("generate", QWEN, "--tokens", prompt, "--max-tokens", 5, "--exact")
        self.assertEqual([int(t) for t in shown.split()], GOLDEN["greedy_ids"][:5])

    def test_seeds_repeat(self) -> None:
        prompt = self.tokens("296, 385 388")
        draw = ["generate", QWEN, "--tokens", prompt, "--max-tokens", 30, "--temperature", 1.5,
                "--top-k", 50, "--top-p", 0.95, "--ignore-eos", "--seed"]
        first = self.document(*draw, 1)["token_ids"]
        self.assertEqual(first, self.document(*draw, 1)["token_ids"])
        self.assertNotEqual(first, self.document(*draw, 2)["token_ids"])

    def test_perplexity_and_compare_agree(self) -> None:
        one = self.document("perplexity", GLM, "--tokens", TOKENS, "--max-windows", 4)
        self.assertEqual((one["tokens"], one["windows"]), (1024, 4))
        self.assertAlmostEqual(one["perplexity"], math.exp(one["nll"]))
        both = self.document("compare", GLM, "--against", QWEN, "--tokens", TOKENS,
                             "--max-windows", 4)
        self.assertAlmostEqual(both["model"]["perplexity"], one["perplexity"], places=9)
        self.assertGreater(both["kl_p99"], both["kl_median"])

    def test_bench_model(self) -> None:
        document = self.document("bench", "model", "--model", QWEN, "--prompt-tokens", 32)
        self.assertEqual([r["op"] for r in document["results"]], ["prefill", "decode"])
        for row in document["results"]:
            self.assertGreater(row["tokens_per_second"], 0)

    def test_wrong_use(self) -> None:
        prompt = self.tokens("1 2 3")
        self.refuse(USAGE, "generate", QWEN, says=("--prompt or --tokens",))
        self.refuse(USAGE, "generate", QWEN, "--prompt", "x", says=("Python package",))
        self.refuse(USAGE, "generate", QWEN, "--tokens", prompt, "--top-p", 0, says=("top_p",))
        self.refuse(USAGE, "generate", QWEN, "--tokens", prompt, "--temperature", -1,
                    says=("temperature",))
        self.refuse(USAGE, "generate", QWEN, "--tokens", prompt, "--stop", "x", says=("--stop",))
        self.refuse(USAGE, "perplexity", QWEN, "--tokens", prompt, "--text", prompt,
                    says=("exclude",))
        self.refuse(USAGE, "perplexity", QWEN, "--tokens", TOKENS, "--window", 1025,
                    says=("window", "1..1024", "1025"))
        self.refuse(USAGE, "bench", "model", says=("--model",))

    def test_tokens_that_are_none(self) -> None:
        self.refuse(USAGE, "generate", QWEN, "--tokens", self.tokens("1 1024"),
                    says=("token 1 is 1024", "0..1023"))
        self.refuse(USAGE, "generate", QWEN, "--tokens", self.tokens("-1"), says=("is -1",))
        self.refuse(MALFORMED, "generate", QWEN, "--tokens", self.tokens("1 two 3"),
                    says=("token 1", "'two'"))
        self.refuse(USAGE, "generate", QWEN, "--tokens", self.tokens(""), says=("no tokens",))
        self.refuse(USAGE, "generate", QWEN, "--tokens", self.tokens("1 " * 1025),
                    says=("1025 tokens", "1024"))
        self.refuse(IO, "generate", QWEN, "--tokens", self.directory / "none", says=("none",))

    def test_what_is_no_model(self) -> None:
        prompt = self.tokens("1")
        self.refuse(IO, "generate", self.directory / "none", "--tokens", prompt)
        self.refuse(IO, "generate", self.directory, "--tokens", prompt, says=("config.json",))
        (self.directory / "adapter_config.json").write_text("{}")
        self.refuse(USAGE, "generate", self.directory, "--tokens", prompt, says=("adapter",))

    def test_unknown_architectures_and_other_quantizations(self) -> None:
        prompt = self.tokens("1")
        model = self.copy_of_sample({"model_type": "mamba"})
        self.refuse(USAGE, "generate", model, "--tokens", prompt, says=("mamba", "qwen3_moe"))
        shutil.rmtree(model)
        model = self.copy_of_sample({"quantization_config": {"quant_method": "gptq"}})
        self.refuse(USAGE, "generate", model, "--tokens", prompt, says=("gptq",))
        shutil.rmtree(model)
        model = self.copy_of_sample({"num_hidden_layers": 3})
        self.refuse(MALFORMED, "generate", model, "--tokens", prompt,
                    says=("model.layers.3", "not a part"))
        shutil.rmtree(model)
        model = self.copy_of_sample({"num_hidden_layers": 5})
        self.refuse(MALFORMED, "generate", model, "--tokens", prompt,
                    says=("model.layers.4", "missing"))

    def test_a_newer_quantized_directory(self) -> None:
        out = self.directory / "q"
        self.succeed("quantize", QWEN, "-o", out)
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"]["version"] = 99
        (out / "config.json").write_text(json.dumps(config))
        self.refuse(USAGE, "generate", out, "--tokens", self.tokens("1"), says=("99",))


if __name__ == "__main__":
    unittest.main()
