"""Running models: generate, perplexity, compare; and their responses to bad input."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pathlib
import shutil
import subprocess
import unittest

from command_line import (COMMAND, GLM, IO, MALFORMED, QWEN, USAGE, CommandTestCase,
                          read_safetensors, write_safetensors)

TOKENS = QWEN / "validation_tokens.txt"
GOLDEN = {model: json.loads((model / "golden.json").read_text()) for model in (QWEN, GLM)}


class ModelTestCase(CommandTestCase):
    """A test that writes prompts and models."""

    def tokens(self, ids: list[int]) -> pathlib.Path:
        path = self.directory / "tokens.json"
        path.write_text(json.dumps(ids))
        return path

    def copy(self, **changes: object) -> pathlib.Path:
        """Copies the sample model with changes in its config; None removes a key."""
        model = self.directory / "model"
        model.mkdir()
        for file in QWEN.iterdir():
            if file.name != "config.json":
                shutil.copyfile(file, model / file.name)
        config = json.loads((QWEN / "config.json").read_text())
        config.update(changes)
        kept = {key: value for key, value in config.items() if value is not None}
        (model / "config.json").write_text(json.dumps(kept))
        return model


class Generate(ModelTestCase):
    """Token ids in, token ids out."""

    def test_greedy_ids_are_the_references(self) -> None:
        for model, golden in GOLDEN.items():
            tokens = self.tokens(golden["prompt_ids"])
            document = self.document("generate", model, "--tokens", tokens, "--max-tokens", 48,
                                     "--exact", "--ignore-eos")
            self.assertEqual(document["token_ids"], golden["greedy_ids"])
            self.assertEqual(document["stop_reason"], "max_tokens")
            self.assertIsNone(document["text"])
            self.assertGreater(document["tokens_per_second"], 0)
            shown = self.succeed("generate", model, "--tokens", tokens, "--max-tokens", 5,
                                 "--exact", "--batch-invariant", "--threads", 1)
            self.assertEqual(shown, " ".join(map(str, golden["greedy_ids"][:5])) + "\n")

    def test_a_quantized_directory_runs(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out, "--recipe", "aggressive_moe")
        document = self.document("generate", out, "--tokens",
                                 self.tokens(GOLDEN[QWEN]["prompt_ids"]), "--max-tokens", 8)
        self.assertEqual(len(document["token_ids"]), 8)

    def test_keys_and_values_in_fp8(self) -> None:
        prompt = self.tokens(GOLDEN[QWEN]["prompt_ids"])
        shown = {kind: self.document("perplexity", QWEN, "--tokens", TOKENS, "--max-windows", 4,
                                     "--kv-cache", kind)["perplexity"]
                 for kind in ("f32", "bf16", "fp8_e4m3")}
        self.assertEqual(len(set(shown.values())), 3)
        self.assertAlmostEqual(shown["fp8_e4m3"] / shown["f32"], 1, delta=0.02)
        self.document("generate", QWEN, "--tokens", prompt, "--max-tokens", 4, "--exact",
                      "--kv-cache", "fp8_e4m3")
        # The reference of a comparison has its own cache.
        cost = self.document("compare", QWEN, "--against", QWEN, "--tokens", TOKENS,
                             "--max-windows", 2, "--kv-cache", "fp8_e4m3")
        self.assertGreater(cost["kl_mean"], 0)
        for command in (("generate", QWEN, "--tokens", prompt),
                        ("perplexity", QWEN, "--tokens", TOKENS),
                        ("compare", QWEN, "--against", QWEN, "--tokens", TOKENS),
                        ("bench", "model", QWEN), ("plan", QWEN)):
            self.refuse(USAGE, *command, "--kv-cache", "fp8",
                        says=("--kv-cache: expected f32, bf16 or fp8_e4m3, got 'fp8'",))
        self.refuse(USAGE, "bench", "gemm", "--kv-cache", "f32",
                    says=("bench gemm: has no --kv-cache",))
        for what in ("--sensitivity", "--importance"):
            self.refuse(USAGE, "analyze", QWEN, what, "-o", self.directory / "out",
                        "--kv-cache", "bf16", says=("--kv-cache",))

    def test_sampling_follows_the_seed(self) -> None:
        prompt = self.tokens(GOLDEN[QWEN]["prompt_ids"])

        def ids(*options: object) -> list[int]:
            result: list[int] = self.document("generate", QWEN, "--tokens", prompt,
                                              "--max-tokens", 24, *options)["token_ids"]
            return result

        drawn = ids("--temperature", 1.5, "--seed", 3)
        self.assertEqual(drawn, ids("--temperature", 1.5, "--seed", 3))
        self.assertNotEqual(drawn, ids("--temperature", 1.5, "--seed", 4))
        greedy = ids()
        self.assertEqual(greedy, ids("--temperature", 1.5, "--top-k", 1, "--seed", 3))
        self.assertEqual(greedy, ids("--temperature", 1.5, "--top-p", 1e-9, "--seed", 3))
        self.assertEqual(greedy, ids("--temperature", 1.5, "--min-p", 1, "--seed", 3))
        few = ids("--temperature", 1.5, "--min-p", 0.5, "--seed", 3)
        self.assertNotIn(few, (drawn, greedy))
        defaults = ("--min-p", 0, "--repetition-penalty", 1, "--presence-penalty", 0,
                    "--frequency-penalty", 0)
        self.assertEqual(drawn, ids("--temperature", 1.5, "--seed", 3, *defaults))
        self.assertEqual(greedy, ids(*defaults))

    def test_penalties_keep_a_greedy_text_from_repeating(self) -> None:
        prompt = GOLDEN[QWEN]["prompt_ids"]

        def ids(*options: object) -> list[int]:
            result: list[int] = self.document("generate", QWEN, "--tokens", self.tokens(prompt),
                                              "--max-tokens", 24, "--ignore-eos",
                                              *options)["token_ids"]
            return result

        greedy = ids()
        self.assertLess(len(set(greedy)), 24)
        # Logits are far below the largest penalty: a token that carries it is never chosen again.
        for option in ("--presence-penalty", "--frequency-penalty"):
            self.assertEqual(len(set(ids(option, 1e6))), 24, option)
            self.assertEqual(set(ids(option, -1e6)), {greedy[0]}, option)
        # Seen tokens are preferred until their fourth occurrence.
        both = ids("--presence-penalty", -1e6, "--frequency-penalty", 3e5)
        self.assertEqual([both.count(token) for token in both], [4] * 24)
        unlike = ids("--repetition-penalty", 1000)
        self.assertEqual(len({*unlike, *prompt}), 24 + len(set(prompt)))
        mild = {option: ids(option, value) for option, value in (
            ("--repetition-penalty", 1.3), ("--presence-penalty", 8), ("--frequency-penalty", 8))}
        for option, penalized in mild.items():
            self.assertNotEqual(penalized, greedy, option)

    def test_where_a_text_ends(self) -> None:
        model = self.copy(eos_token_id=GOLDEN[QWEN]["greedy_ids"][3])
        os.remove(model / "generation_config.json")
        prompt = self.tokens(GOLDEN[QWEN]["prompt_ids"])
        document = self.document("generate", model, "--tokens", prompt, "--exact")
        self.assertEqual(document["stop_reason"], "stop_token")
        self.assertEqual(document["token_ids"], GOLDEN[QWEN]["greedy_ids"][:3])
        document = self.document("generate", QWEN, "--tokens", self.tokens([5] * 1020),
                                 "--ignore-eos")
        self.assertEqual(document["stop_reason"], "context_full")
        self.assertEqual(len(document["token_ids"]), 5)
        document = self.document("generate", QWEN, "--tokens", prompt, "--max-tokens", 0)
        self.assertEqual((document["token_ids"], document["tokens_per_second"]), ([], 0))

    def test_token_files(self) -> None:
        want = self.succeed("generate", QWEN, "--tokens", self.tokens([7, 8, 9]), "--max-tokens", 4)
        path = self.directory / "tokens.txt"
        for text in ("7 8 9", "7,8,9\n", "\n7\n 8,\t9\r\n", " [7, 8, 9] \n", "[7 8 9]"):
            path.write_text(text)
            self.assertEqual(
                self.succeed("generate", QWEN, "--tokens", path, "--max-tokens", 4), want)
        piped = subprocess.run([COMMAND, "generate", str(QWEN), "--tokens", "-", "--max-tokens",
                                "4"], input="7 8 9", capture_output=True, text=True, check=True)
        self.assertEqual(piped.stdout, want)

    def test_bad_token_files(self) -> None:
        path = self.directory / "tokens.txt"
        for text, says in (
                ("7 8\n 9 x1 4", "line 2, column 4: expected a token id, got 'x1'"),
                ("7 8.5", "line 1, column 3: expected a token id, got '8.5'"),
                ("99999999999", "got '99999999999'"),
                ("[1, 2", "expected ']', got 'the end'"),
                ("[1, [2]]", "column 5: expected a token id, got '['"),
                ("[1] 2", "column 5: expected nothing after ']', got '2'"),
                ("1 2]", "got ']'"),
                ("{\"ids\": 1}", "got '{\"ids\":'"),
                ("\0\0\1", "expected a token id"),
        ):
            path.write_text(text)
            self.refuse(MALFORMED, "generate", QWEN, "--tokens", path,
                        says=(f"{path}: line ", says))
        for text in ("", " \n", "[]"):
            path.write_text(text)
            self.refuse(USAGE, "generate", QWEN, "--tokens", path, says=("prompt: no tokens",))
        self.refuse(IO, "generate", QWEN, "--tokens", self.directory, says=("is a directory",))
        self.refuse(IO, "generate", QWEN, "--tokens", self.directory / "absent",
                    says=("absent: No such file",))

    def test_wrong_use(self) -> None:
        prompt = self.tokens([1, 2, 3])
        for options, says in (
                ((), "--prompt, --tokens or --prompts is needed"),
                (("--tokens", prompt, "--prompt", "x"), "exclude each other"),
                (("--prompt", "And God said"), "--prompt: needs a tokenizer"),
                (("--tokens", prompt, "--stop", "x"), "--stop: needs a tokenizer"),
                (("--tokens", prompt, "--stop", ""), "--stop: expected text, got ''"),
                (("--tokens", prompt, "--temperature", "-1"), "temperature"),
                (("--tokens", prompt, "--temperature", "nan"), "temperature"),
                (("--tokens", prompt, "--top-k", "-1"), "--top-k: expected 0 or more, got -1"),
                (("--tokens", prompt, "--top-p", "0"),
                 "--top-p: expected more than 0 and at most 1, got 0"),
                (("--tokens", prompt, "--min-p", "1.5"), "--min-p: expected 0..1, got 1.5"),
                (("--tokens", prompt, "--min-p", "-0.1"), "--min-p: expected 0..1, got -0.1"),
                (("--tokens", prompt, "--repetition-penalty", "0"),
                 "--repetition-penalty: expected 0.001..1000, got 0"),
                (("--tokens", prompt, "--presence-penalty", "2000000"),
                 "--presence-penalty: expected -1000000..1000000, got 2000000"),
                (("--tokens", prompt, "--frequency-penalty", "nan"), "--frequency-penalty"),
                (("--tokens", prompt, "--max-tokens", "-5"),
                 "--max-tokens: expected 0 or more, got -5"),
                (("--tokens", prompt, "--max-tokens", "many"), "many"),
                (("--tokens", prompt, "--threads", "0"), "--threads: expected 1..4096, got 0"),
                (("--tokens", prompt, "--device", "cuda:0"), "cuda:0"),
                (("--tokens", self.tokens([1, 2, 3] * 400)),
                 "prompt: 1200 tokens do not fit in a context of 1024"),
        ):
            self.refuse(USAGE, "generate", QWEN, *options, says=(says,))
        for ids, says in (([1, 1024], "prompt: token 1 is 1024, expected 0..1023"),
                          ([-1], "prompt: token 0 is -1")):
            self.refuse(USAGE, "generate", QWEN, "--tokens", self.tokens(ids), says=(says,))

    def test_a_reader_that_goes_away_ends_the_text(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as out:
            done = subprocess.run([COMMAND, "generate", str(QWEN), "--tokens",
                                   str(self.tokens([1])), "--ignore-eos"], stdout=out,
                                  stderr=subprocess.PIPE, check=False, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, b""))

    @unittest.skipUnless(hasattr(fcntl, "F_SETPIPE_SZ"), "pipes of a fixed size")
    def test_interrupting_keeps_what_there_is(self) -> None:
        # A pipe that is nearly full: the command blocks in its first words, however fast it is.
        out = self.interrupt(4, "generate", QWEN, "--tokens", self.tokens([1]), "--ignore-eos",
                             "--max-tokens", 900, before=1)
        self.assertTrue(out.endswith("\n"))
        self.assertTrue(1 <= len(out.split()) < 10, out)


class Perplexity(ModelTestCase):
    """Perplexity over windows of a text's tokens."""

    def test_is_the_references(self) -> None:
        for model, golden in GOLDEN.items():
            document = self.document("perplexity", model, "--tokens", TOKENS, "--exact")
            self.assertEqual(document["windows"], golden["windows"])
            self.assertEqual(document["tokens"], 256 * golden["windows"])
            want = golden["validation_perplexity"]
            self.assertLess(abs(document["perplexity"] / want - 1), 1e-3)
            self.assertAlmostEqual(document["perplexity"], math.exp(document["nll"]))
            self.assertTrue(0 < document["standard_error"] < 0.05 * want)

    def test_windows(self) -> None:
        document = self.document("perplexity", QWEN, "--tokens", TOKENS, "--window", 100,
                                 "--stride", 50, "--max-windows", 3)
        self.assertEqual((document["windows"], document["tokens"]), (3, 200))
        self.assertRegex(self.succeed("perplexity", QWEN, "--tokens", TOKENS, "--max-windows", 1),
                         r"^perplexity \d+\.\d+ \+- \d+\.\d+ .* over 256 tokens in 1 window\n$")

    def test_wrong_use(self) -> None:
        for options, says in (
                ((), "--text or --tokens is needed"),
                (("--tokens", TOKENS, "--text", TOKENS), "exclude each other"),
                (("--text", TOKENS), "--text: needs a tokenizer"),
                (("--tokens", TOKENS, "--window", "0"), "--window: expected 1 or more, got 0"),
                (("--tokens", TOKENS, "--window", "2000"), "got 2000"),
                (("--tokens", TOKENS, "--stride", "300"), "stride: expected 0..256"),
                (("--tokens", TOKENS, "--max-windows", "-1"),
                 "--max-windows: expected 0 or more, got -1"),
        ):
            self.refuse(USAGE, "perplexity", QWEN, *options, says=(says,))
        for ids, says in (([3], "tokens: expected at least 2, got 1"),
                          ([3, 2000], "tokens: token 1 is 2000, expected 0..1023")):
            self.refuse(USAGE, "perplexity", QWEN, "--tokens", self.tokens(ids), says=(says,))


class Compare(ModelTestCase):
    """A quantized model against its source."""

    def test_formats_order_as_they_should(self) -> None:
        distances = []
        for recipe in ("uniform:s8/g128", "default_moe", "uniform:nf2/g64"):
            out = self.directory / "out"
            self.succeed("quantize", QWEN, "-o", out, "--recipe", recipe, "--overwrite")
            document = self.document("compare", out, "--against", QWEN, "--tokens", TOKENS,
                                     "--max-windows", 20)
            self.assertLessEqual(document["kl_median"], document["kl_p99"])
            self.assertLessEqual(document["kl_p99"], document["kl_max"])
            distances.append((document["kl_mean"], -document["top1_agreement"],
                              document["model"]["perplexity"]))
        for i in range(3):
            values = [distance[i] for distance in distances]
            self.assertEqual(values, sorted(set(values)))
        self.assertLess(distances[0][0], 2e-3)

    def test_a_model_with_itself(self) -> None:
        document = self.document("compare", QWEN, "--against", QWEN, "--tokens", TOKENS,
                                 "--max-windows", 2)
        self.assertEqual((document["kl_max"], document["top1_agreement"]), (0, 1))
        self.assertEqual(document["model"], document["reference"])
        self.assertEqual((document["tokens"], document["windows"]), (512, 2))
        text = self.succeed("compare", QWEN, "--against", QWEN, "--tokens", TOKENS,
                            "--max-windows", 2)
        self.assertIn("top-1 agreement   100.0 % of 512 positions", text)

    def test_wrong_use(self) -> None:
        self.refuse(USAGE, "compare", QWEN, "--tokens", TOKENS, says=("--against",))
        self.refuse(IO, "compare", QWEN, "--against", self.directory / "absent", "--tokens",
                    TOKENS, says=("absent",))

    def test_other_vocabularies(self) -> None:
        model = self.copy(vocab_size=1000)
        os.remove(model / "model.safetensors")
        tensors = read_safetensors(QWEN / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                dtype, shape, data = tensors[name]
                width = shape[1]
                tensors[name] = (dtype, [1000, width], data[:1000 * width * 2])
        write_safetensors(model / "model.safetensors", tensors)
        self.refuse(USAGE, "compare", model, "--against", QWEN, "--tokens", TOKENS,
                    says=("a vocabulary of 1024, the model has 1000",))


class BadModels(ModelTestCase):
    """Directories that are not runnable models: one clear line each."""

    def refuse_model(self, code: int, model: pathlib.Path, *says: str) -> None:
        self.refuse(code, "generate", model, "--tokens", self.tokens([1]), says=says)
        self.refuse(code, "perplexity", model, "--tokens", TOKENS, says=says)

    def test_missing(self) -> None:
        self.refuse_model(IO, self.directory / "absent", "absent: no such directory")
        empty = self.directory / "empty"
        empty.mkdir()
        self.refuse_model(IO, empty, "config.json is missing")
        self.refuse_model(USAGE, QWEN / "model.safetensors", "a model is a directory")
        model = self.copy()
        os.remove(model / "model.safetensors")
        self.refuse_model(USAGE, model, "the directory holds no *.safetensors")

    def test_missing_tensor(self) -> None:
        model = self.copy()
        os.remove(model / "model.safetensors")
        tensors = read_safetensors(QWEN / "model.safetensors")
        name = "model.layers.1.self_attn.o_proj.weight"
        del tensors[name]
        write_safetensors(model / "model.safetensors", tensors)
        self.refuse_model(MALFORMED, model, name)

    def test_adapter(self) -> None:
        adapter = self.directory / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        (adapter / "adapter_model.safetensors").write_bytes(b"")
        self.refuse_model(USAGE, adapter, "an adapter, not a model")

    def test_unknown_model_type(self) -> None:
        self.refuse_model(USAGE, self.copy(model_type="mamba"), "mamba", "qwen3_moe", "llama")

    def test_config_that_does_not_fit(self) -> None:
        self.refuse_model(MALFORMED, self.copy(vocab_size=2048), "2048", "1024")

    def test_layers_too_few_and_too_many(self) -> None:
        self.refuse_model(MALFORMED, self.copy(num_hidden_layers=3), "model.layers.3", "not a part")
        shutil.rmtree(self.directory / "model")
        self.refuse_model(MALFORMED, self.copy(num_hidden_layers=5), "model.layers.4", "missing")

    def test_config_without_a_key(self) -> None:
        self.refuse_model(MALFORMED, self.copy(hidden_size=None), "hidden_size")

    def test_broken_config(self) -> None:
        model = self.copy()
        (model / "config.json").write_text("{")
        self.refuse_model(MALFORMED, model, "config.json")

    def test_quantized_by_others(self) -> None:
        model = self.copy(quantization_config={"quant_method": "exl3", "bits": 4})
        says = 'quant_method "exl3" is not supported; supported: metal_marlin'
        self.refuse_model(USAGE, model, says)
        out = self.directory / "out"
        for command in (("inspect", model), ("verify", model), ("quantize", model, "-o", out),
                        ("dequantize", model, "-o", out), ("prepare", model, "-o", out),
                        ("compare", QWEN, "--against", model, "--tokens", TOKENS),
                        ("bench", "model", model), ("bench", "load", model)):
            self.refuse(USAGE, *command, says=(says,))
        self.assert_nothing_written("model", "tokens.json")

    def test_weight_that_is_not_finite(self) -> None:
        model = self.copy()
        tensors = read_safetensors(QWEN / "model.safetensors")
        name = "model.layers.1.self_attn.k_proj.weight"
        dtype, shape, content = tensors[name]
        at = 2 * (7 * shape[1] + 5)
        tensors[name] = (dtype, shape, content[:at] + b"\xc0\x7f" + content[at + 2:])
        os.remove(model / "model.safetensors")
        write_safetensors(model / "model.safetensors", tensors)
        self.refuse_model(MALFORMED, model, f"tensor '{name}': NaN at [5, 7] of [k, n]")

    def test_newer_version(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out)
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"]["version"] = 99
        (out / "config.json").write_text(json.dumps(config))
        self.refuse_model(USAGE, out, "version 99, this build reads up to")

    def test_damaged_files(self) -> None:
        model = self.copy()
        os.remove(model / "model.safetensors")
        shutil.copy(QWEN / "model.safetensors", model)
        with open(model / "model.safetensors", "r+b") as file:
            file.truncate(100000)
        self.refuse_model(MALFORMED, model, "model.safetensors")


if __name__ == "__main__":
    unittest.main()
