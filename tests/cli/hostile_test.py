"""Hostile texts, names and special files: linear time, bounded memory, one short printable line."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import resource
import shutil
import socket
import struct
import subprocess
import unittest
from collections.abc import Callable

from command_line import (COMMAND, IO, MALFORMED, QWEN, USAGE, CommandTestCase, bf16,
                          write_safetensors)

WEIGHT = "model.layers.0.mlp.up_proj.weight"
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
         "max_position_embeddings": 128}
CSI, OVERRIDE = "\u009b31m", "\u202e"


def limit_memory() -> None:
    """Called in the child, so that a reader without limits cannot exhaust the machine's memory."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@functools.cache
def memory_limit() -> Callable[[], None] | None:
    """Returns None if the command needs more address space to start: with AddressSanitizer."""
    done = subprocess.run([COMMAND, "--version"], capture_output=True, check=False,
                          preexec_fn=limit_memory)
    return limit_memory if done.returncode == 0 else None


class Brackets(CommandTestCase):
    """Brackets in values are text: CLI11 would read "[A,B]" as two values, in recursion."""

    def test_brackets_are_text(self) -> None:
        nested = "[" * 60000 + "]" * 60000
        self.refuse(USAGE, "quantize", QWEN, "-o", self.directory / "out", "--override", nested,
                    says=("got '[[[",))
        self.refuse(USAGE, "bench", "gemm", "--shape", "[1,32,32]", says=("got '[1,32,32]'",))


class HostileTestCase(CommandTestCase):
    """A plain model's directory to corrupt."""

    def setUp(self) -> None:
        super().setUp()
        self.model = self.directory / "model"
        self.model.mkdir()
        write_safetensors(self.model / "model.safetensors",
                          {WEIGHT: ("BF16", [64, 32], bf16([0.5] * 2048))})
        self.config(json.dumps(LLAMA))
        self.tokens = self.directory / "tokens.txt"
        self.tokens.write_text("1 2 3 4 5 6 7 8")

    def config(self, text: str | bytes) -> None:
        content = text.encode() if isinstance(text, str) else text
        (self.model / "config.json").write_bytes(content)

    def refuse_shortly(self, code: int, *arguments: object, says: tuple[str, ...] = ()) -> str:
        """Requires a refusal with one short printable line."""
        with open(os.devnull, encoding="utf-8") as nothing:
            done = subprocess.run([COMMAND, *map(str, arguments)], stdin=nothing,
                                  capture_output=True, timeout=120, check=False,
                                  preexec_fn=memory_limit())
        error = done.stderr.decode("utf-8")  # Strict decoding.
        self.assertEqual((done.returncode, done.stdout), (code, b""), (arguments, error[:1000]))
        self.assertTrue(error.startswith("metal-marlin: error: ") and error.endswith("\n"), error)
        self.assertTrue(error[:-1].isprintable(), error[:1000])
        self.assertLess(len(error), 1200, error[:1300])  # Some list all types of models.
        for text in says:
            self.assertIn(text, error)
        return error


class Json(HostileTestCase):
    """Valid and nearly valid JSON texts."""

    def test_deep_nesting(self) -> None:
        for deep in ("[" * 80000 + "]" * 80000, '{"a":' * 200000):
            for document in (f'{{"model_type":"llama","hidden_size":{deep}}}', deep):
                self.config(document)
                for command in (["plan"], ["tune", "--model"], ["inspect"], ["perplexity"],
                                ["quantize", "-o", self.directory / "out"]):
                    tokens = ["--tokens", self.tokens] if command == ["perplexity"] else []
                    self.refuse_shortly(MALFORMED, *command, self.model, *tokens,
                                        says=("config.json", "deeper than 16"))
            self.config(json.dumps(LLAMA))
            recipe = self.directory / "recipe.json"
            recipe.write_text(f'{{"classes":{deep}}}')
            self.refuse_shortly(USAGE, "plan", self.model, "--recipe", recipe,
                                says=("recipe.json", "deeper than 16"))

    def test_generation_config(self) -> None:
        path = self.directory / "sample" / "generation_config.json"
        path.parent.mkdir()
        for file in QWEN.iterdir():
            (path.parent / file.name).write_bytes(file.read_bytes())
        for text, says in (('{"eos_token_id":{"a":' + "[" * 80000, "deeper than 16"),
                           ('{"eos_token_id":"%s"}' % ("x" * 1000), "eos_token_id"),
                           ('{"a":1,"a":2}', "duplicate key"),
                           ('{"a":[%s1]}' % ("1," * 100000), "more than 65536 values"),
                           (" " * (1 << 20) + "{}", "at most 1048576")):
            path.write_text(text)
            self.refuse_shortly(MALFORMED, "perplexity", path.parent, "--tokens", self.tokens,
                                says=("generation_config.json", says))

    def test_many_objects(self) -> None:
        # A reader with quadratic time would need minutes for the first.
        for objects, code in ((3_000_000, 0), (20_000_000, MALFORMED)):
            text = '{"x":[' + "{}," * objects + "{}]}"
            self.config(text)
            if code == 0:
                self.succeed("inspect", self.model)
            else:
                self.refuse_shortly(MALFORMED, "inspect", self.model, says=("4194304 values",))
                self.refuse_shortly(MALFORMED, "plan", self.model, says=("4194304 values",))
        self.config(json.dumps(LLAMA))
        index = self.model / "model.safetensors.index.json"
        (self.model / "model.safetensors").rename(self.model / "part.safetensors")
        many = "[" + "{}," * 2_000_000 + "{}]"
        index.write_text(f'{{"weight_map":{{"{WEIGHT}":"part.safetensors"}},"x":{many}}}')
        self.succeed("inspect", self.model)
        recipe = self.directory / "recipe.json"
        recipe.write_text('{"overrides":[' + "{}," * 300000 + "{}]}")
        self.refuse_shortly(USAGE, "plan", QWEN, "--recipe", recipe, says=("262144 values",))

    def test_text_that_is_not_utf8(self) -> None:
        self.config(b'{"model_type":"\xff"}')
        for command in ("inspect", "plan"):
            self.refuse_shortly(MALFORMED, command, self.model, says=("ill-formed UTF-8",))


class SpecialFiles(HostileTestCase):
    """Files that are not regular are refused, unread and without waiting."""

    def refuse_each(
        self, path: pathlib.Path, *arguments: object, in_model: bool = False
    ) -> None:
        """in_model: a link in a model's directory is refused because its target is outside."""
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        self.refuse_shortly(IO, *arguments, says=(path.name, "not a regular file"))
        path.unlink()
        path.symlink_to("/dev/zero")
        code, why = (USAGE, "outside of the model") if in_model else (IO, "not a regular file")
        self.refuse_shortly(code, *arguments, says=(path.name, why))
        path.unlink()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            self.refuse_shortly(IO, *arguments, says=(path.name,))
        path.unlink()
        path.mkdir()
        self.refuse_shortly(IO, *arguments, says=(path.name,))
        path.rmdir()

    def test_models_files(self) -> None:
        config = self.model / "config.json"
        for command in (["inspect"], ["plan"], ["tune", "--device", "cpu", "--model"]):
            self.refuse_each(config, *command, self.model, in_model=True)
        self.config(json.dumps(LLAMA))
        self.refuse_each(self.model / "model.safetensors", "inspect", self.model, in_model=True)
        sample = self.directory / "sample"
        sample.mkdir()
        for file in QWEN.iterdir():
            shutil.copyfile(file, sample / file.name)
        self.refuse_each(sample / "generation_config.json", "generate", sample, "--tokens",
                         self.tokens, in_model=True)

    def test_files_of_users(self) -> None:
        path = self.directory / "special.json"
        self.refuse_each(path, "plan", QWEN, "--recipe", path)
        self.refuse_each(path, "bench", "gemm", "--shapes", path)
        for command in ("generate", "perplexity"):
            self.refuse_each(path, command, QWEN, "--tokens", path)
        self.refuse_each(path, "compare", QWEN, "--against", QWEN, "--tokens", path)

    def test_leftover(self) -> None:
        # An interrupted run with a pipe in place of its shard.
        def small_files() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        quantize = [COMMAND, "quantize", str(QWEN), "-o", str(self.directory / "out"), "--resume"]
        done = subprocess.run(quantize, capture_output=True, timeout=120, check=False,
                              preexec_fn=small_files)
        self.assertNotEqual(done.returncode, 0)
        (partial,) = self.directory.glob(".out.partial-*")
        shard = partial / "model.safetensors"
        shard.unlink()
        os.mkfifo(shard)
        done = subprocess.run(quantize, capture_output=True, timeout=120, check=False)
        self.assertIn(done.returncode, (0, IO), done.stderr)


class NothingBehindIt(HostileTestCase):
    """Sizes without any bytes in the file."""

    def test_tensors_without_elements(self) -> None:
        # verify --against keeps sums per row, and so must not trust a count of 2^40 rows.
        plain = self.directory / "plain"
        plain.mkdir()
        write_safetensors(plain / "model.safetensors", {
            WEIGHT: ("BF16", [64, 32], bf16([0.5] * 2048)),
            "empty.bias": ("F32", [1 << 40, 0], b""),
            "model.layers.0.mlp.experts.gate_up_proj": ("BF16", [1 << 40, 0, 16], b""),
        })
        (plain / "config.json").write_text(json.dumps({**LLAMA, "num_experts_per_tok": 1}))
        out = self.directory / "out"
        self.succeed("inspect", plain)
        self.succeed("quantize", plain, "-o", out)
        self.succeed("verify", out, "--against", plain)
        self.succeed("dequantize", out, "-o", self.directory / "back")
        self.refuse_shortly(MALFORMED, "perplexity", plain, "--tokens", self.tokens)


class Patterns(HostileTestCase):
    """Patterns over names take time linear in the name."""

    def test_backtracking(self) -> None:
        for pattern in ("(.*)*!", "([a-z_.0-9]+)*!", "((a|.)*)*$^x"):
            self.succeed("plan", QWEN, "--bandwidth", "1", "--override", pattern + "=keep")
            recipe = self.directory / "recipe.json"
            recipe.write_text(json.dumps({"overrides": [{"regex": pattern, "choice": "keep"}]}))
            self.succeed("plan", QWEN, "--bandwidth", "1", "--recipe", recipe)

    def test_sizes(self) -> None:
        for pattern, says in (("(" * 16000 + ")" * 16000, "at most 4096"),
                              ("a" * 88000, "at most 4096"),
                              ("(" * 2000 + ")" * 2000, "nest deeper than 64"),
                              ("((a{900}){900}){900}", "more than 4096 steps")):
            self.refuse_shortly(USAGE, "plan", QWEN, "--override", pattern + "=keep", says=(says,))
        recipe = self.directory / "recipe.json"
        recipe.write_text(json.dumps({"overrides": [{"glob": "*a" * 50000, "choice": "keep"}]}))
        self.refuse_shortly(USAGE, "plan", QWEN, "--recipe", recipe, says=("at most 4096",))

    def test_what_is_not_supported(self) -> None:
        for pattern, says in (("a(?=b)", "lookaheads"), ("(?!a)", "lookaheads"),
                              ("(a)\\1", "backreferences")):
            self.refuse_shortly(USAGE, "plan", QWEN, "--override", pattern + "=keep", says=(says,))


class Messages(HostileTestCase):
    """Text from files is quoted briefly, escaped, on one line."""

    def test_long_values(self) -> None:
        long = "m" * 1_000_000
        tokens = ["--tokens", self.tokens]
        for change, says in (({"model_type": long}, "model_type 'mmm"),
                             ({"hidden_size": long}, "hidden_size"),
                             ({"hidden_size": [long]}, "hidden_size"),
                             ({"hidden_act": long}, "hidden_act"),
                             ({"rope_scaling": {"rope_type": long}}, "rope_type"),
                             ({"quantization_config": {"quant_method": long}}, "mmm")):
            self.config(json.dumps({**LLAMA, **change}))
            code = MALFORMED if "hidden_size" in change else USAGE
            self.refuse_shortly(code, "perplexity", self.model, *tokens, says=(says,))
        self.config(f'{{"{long}')
        self.refuse_shortly(MALFORMED, "plan", self.model, says=("config.json",))
        for option in ("--recipe", "--format", "--scale-dtype", "--override"):
            self.refuse_shortly(USAGE, "plan", QWEN, option, "m" * 100_000)
        self.refuse_shortly(USAGE, "plan", QWEN, "--override", "a=" + "m" * 100_000)
        recipe = self.directory / "recipe.json"
        for document in ({long[:500_000]: 1}, {"base": long[:500_000]},
                         {"classes": {long[:500_000]: "keep"}},
                         {"classes": {"lm_head": long[:500_000]}},
                         {"overrides": [{"glob": "*", "choice": "s4/g64/" + long[:500_000]}]}):
            recipe.write_text(json.dumps(document))
            self.refuse_shortly(USAGE, "plan", QWEN, "--recipe", recipe)
        for command in ("generate", "perplexity"):
            self.refuse_shortly(USAGE, command, QWEN, *tokens, "--device", "m" * 100_000)
        self.refuse_shortly(USAGE, "bench", "gemm", "--kernel", "m" * 100_000, "--shape", "1,32,32")

    def test_what_steers_terminals(self) -> None:
        path = self.directory / "u.safetensors"
        for name in (b"a\xff", CSI.encode(), OVERRIDE.encode(), "a\u2028b".encode()):
            header = b'{"' + name + b'":1}'
            path.write_bytes(struct.pack("<Q", len(header)) + header)
            for command in ("inspect", "verify"):
                self.refuse_shortly(MALFORMED, command, path)
        self.config(json.dumps({**LLAMA, "model_type": f"a{CSI}{OVERRIDE}\n\x1b"},
                               ensure_ascii=False))
        self.refuse_shortly(USAGE, "perplexity", self.model, "--tokens", self.tokens,
                            says=("\\xc2\\x9b31m", "\\xe2\\x80\\xae", "\\x0a", "\\x1b"))
        # Also names of files, which need not be UTF-8.
        for name in (b"no\xff", CSI.encode(), b"a\nb"):
            path = self.directory / os.fsdecode(name)
            self.refuse_shortly(IO, "inspect", path)
            self.refuse_shortly(IO, "perplexity", QWEN, "--tokens", os.fsdecode(name))

    def test_output(self) -> None:
        names = {f"a{CSI}.weight": 1, f"b{OVERRIDE}.weight": 2, "c\nd\x1b.weight": 3}
        write_safetensors(self.model / "model.safetensors", {
            name: ("BF16", [64, 32], bf16([0.5] * 2048)) for name in names})
        for command in (["inspect"], ["quantize", "-o", self.directory / "out", "--format", "s4"]):
            text = self.succeed(*command, self.model)
            self.assertTrue(text.replace("\n", "").isprintable(), text)
        text = self.succeed("inspect", self.model)
        self.assertIn("c\\x0ad\\x1b.weight", text)
        self.assertEqual({row["name"] for row in self.document("inspect", self.model)["tensors"]},
                         set(names))
        text = self.succeed("verify", self.directory / "out", "--against", self.model)
        self.assertTrue(text.replace("\n", "").isprintable(), text)


if __name__ == "__main__":
    unittest.main()
