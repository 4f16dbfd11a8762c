#!/usr/bin/env python3
"""The command under operating system limits, and with links."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import time
import unittest

from command_line import (COMMAND, IO, MALFORMED, QWEN, USAGE, CommandTestCase, bf16,
                          write_safetensors)

OUT_OF_MEMORY = 4


def limit(which: int, size: int) -> None:
    """Sets a limit of this process, with the limit's signal at its default as in a shell."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(which, (size, size))


class Limits(CommandTestCase):
    """Resource limits (ulimit)."""

    def test_file_size(self) -> None:
        for blocks in (1, 5, 1000):
            self.refuse(IO, "quantize", QWEN, "-o", self.directory / "out",
                        says=("cannot write: File too large",),
                        preexec_fn=lambda n=blocks: limit(resource.RLIMIT_FSIZE, 1024 * n))
            self.assert_nothing_written()

    def test_address_space(self) -> None:
        def few_addresses() -> None:
            limit(resource.RLIMIT_AS, 1 << 36)

        started = subprocess.run([COMMAND, "--version"], capture_output=True, check=False,
                                 preexec_fn=few_addresses)
        if started.returncode != 0:
            self.skipTest("the command does not start under the limit: AddressSanitizer's shadow")
        sparse = self.directory / "sparse.safetensors"
        with sparse.open("wb") as file:
            file.truncate(1 << 40)
        self.refuse(OUT_OF_MEMORY, "inspect", sparse, says=("sparse.safetensors: cannot map",),
                    preexec_fn=few_addresses)


class ExtraTensors(CommandTestCase):
    """Shards that hold what their index does not list, and models with tensors of no use."""

    def model(self, listed: bool) -> pathlib.Path:
        """The sample model as one shard, with a tensor that it has no place for."""
        model = self.directory / f"model-{listed}"
        shutil.copytree(QWEN, model)
        data = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").unlink()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        end = len(data) - 8 - size
        header["extra.weight"] = {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}
        text = json.dumps(header).encode()
        (model / "s1.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + data[8 + size :] + bytes(8))
        names = [name for name in header if name != "__metadata__"]
        weight_map = {name: "s1.safetensors" for name in names
                      if listed or name != "extra.weight"}
        (model / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map}))
        return model

    def test_they_are_left_out_where_that_is_asked_for(self) -> None:
        tokens = ("--tokens", QWEN / "validation_tokens.txt", "--max-windows", 1)
        expected = self.document("perplexity", QWEN, *tokens)["nll"]
        for listed, says in ((False, '"extra.weight" of s1.safetensors is not listed'),
                             (True, '"extra.weight" is not a part of a qwen3_moe')):
            model = self.model(listed)
            self.refuse(MALFORMED, "perplexity", model, *tokens,
                        says=(says, "allow_extra_tensors"))
            allowed = self.document("perplexity", model, *tokens, "--allow-extra-tensors")
            self.assertEqual(allowed["nll"], expected)
        out = self.directory / "out"
        quantize = ("quantize", self.directory / "model-False", "-o", out)
        self.refuse(MALFORMED, *quantize, says=("is not listed",))
        self.document(*quantize, "--allow-extra-tensors")
        names = {row["name"] for row in self.document("inspect", out)["tensors"]}
        self.assertNotIn("extra.weight", names)

    def test_a_quantized_directory_is_verified_and_dequantized_without_them(self) -> None:
        quantized = self.directory / "quantized"
        self.succeed("quantize", QWEN, "-o", quantized, "--shard-size", "100KB")
        index = quantized / "model.safetensors.index.json"
        listed = json.loads(index.read_text())
        del listed["weight_map"]["model.norm.weight"]
        index.write_text(json.dumps(listed))
        plain = self.directory / "plain"
        for command in (["verify", quantized], ["dequantize", quantized, "-o", plain]):
            self.refuse(MALFORMED, *command, says=("model.norm.weight", "is not listed"))
            self.succeed(*command, "--allow-extra-tensors")
        names = {row["name"] for row in self.document("inspect", plain)["tensors"]}
        self.assertNotIn("model.norm.weight", names)
        against = ("verify", quantized, "--against", QWEN, "--allow-extra-tensors")
        self.refuse(MALFORMED, *against, says=("model.norm.weight: is in", "only"))
        exported = self.directory / "exported"
        export = ("export", quantized, "-o", exported, "--to", "plain")
        self.refuse(MALFORMED, *export, says=("model.norm.weight", "is not listed"))
        self.succeed(*export, "--allow-extra-tensors")


class Links(CommandTestCase):
    """Links in a model's directory whose target is outside of it."""

    def model(self, link: str) -> pathlib.Path:
        model = self.directory / "model"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(QWEN, model)
        outside = self.directory / "outside"
        outside.write_bytes((QWEN / link).read_bytes())
        (model / link).unlink()
        (model / link).symlink_to("../outside")
        return model

    def test_every_reader(self) -> None:
        tokens = self.directory / "tokens.json"
        tokens.write_text(json.dumps([1, 2, 3]))
        out = self.directory / "out"
        readers = {
            "config.json": (["plan", "--bandwidth", 1], ["inspect"], ["quantize", "-o", out],
                            ["generate", "--tokens", tokens], ["perplexity", "--tokens", tokens]),
            "generation_config.json": (["generate", "--tokens", tokens], ["quantize", "-o", out]),
            "model.safetensors": (["inspect"], ["generate", "--tokens", tokens]),
            "tokenizer.json": (["quantize", "-o", out],),
        }
        for link, commands in readers.items():
            model = self.model(link)
            for command in commands:
                says = (f"{link}: is a link to", "/outside, outside of the model's directory")
                self.refuse(USAGE, command[0], model, *command[1:], says=says)
        self.assertFalse(out.exists())

    def test_a_link_to_nothing(self) -> None:
        model = self.model("config.json")
        (self.directory / "outside").unlink()
        for command in (["plan", model, "--bandwidth", 1], ["inspect", model]):
            self.refuse(IO, *command,
                        says=("config.json: is a link to ../outside, which does not exist",))

    def test_a_link_that_is_named(self) -> None:
        (self.directory / "link").symlink_to(QWEN)
        (self.directory / "config").symlink_to(QWEN / "config.json")
        self.succeed("plan", self.directory / "link", "--bandwidth", 1)
        self.succeed("plan", self.directory / "config", "--bandwidth", 1)
        self.succeed("inspect", self.directory / "link")


class Comparing(CommandTestCase):
    """verify --against with unaligned experts in a stack."""

    def test_odd_stacks(self) -> None:
        tensors = {}
        for expert in range(3):
            values = [((7 * i + expert) % 33 - 16) / 16 for i in range(33 * 40)]
            tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"] = (
                "BF16", [33, 40], bf16(values))
        source = self.directory / "source"
        source.mkdir()
        write_safetensors(source / "model.safetensors", tensors)
        for choice in ("fp4_e2m1/gK", "u4/gK", "s8/g16/bf16", "fp4_e2m1/g16/e4m3", "nf4/gK/e8m0"):
            out = self.directory / "out"
            self.succeed("quantize", source, "-o", out, "--recipe", f"uniform:{choice}",
                         "--overwrite")
            result = self.document("verify", out, "--against", source)
            error = result["tensors"][0]["relative_error"]
            self.assertTrue(0 < error < 0.3, f"{choice}: {error}")


class Killed(CommandTestCase):
    """Leftovers of a killed process."""

    def test_tune(self) -> None:
        table = self.directory / "tune.txt"
        with subprocess.Popen([COMMAND, "tune", "--device", "cpu", "--shape", "64,8192,8192", "-o",
                               str(table)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              stdin=subprocess.DEVNULL) as process:
            time.sleep(0.3)
            self.assertIsNone(process.poll(), "it was to be killed while it measures")
            os.kill(process.pid, signal.SIGKILL)
        self.assert_nothing_written()


if __name__ == "__main__":
    unittest.main()
