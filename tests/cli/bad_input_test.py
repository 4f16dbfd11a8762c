"""Wrong use and hostile files: one line, the right exit code, no file lost or half-written."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import time
import unittest

from command_line import (COMMAND, GLM, IO, MALFORMED, QWEN, USAGE, CommandTestCase, bf16,
                          read_directory, read_safetensors, run, write_safetensors)

NAME = "model.layers.0.mlp.up_proj.weight"


class WrongUse(CommandTestCase):
    """Invalid arguments."""

    def test_command_line(self) -> None:
        self.refuse(USAGE, "--nonsense")
        self.refuse(USAGE, "quantise", QWEN)
        self.refuse(USAGE, "inspect")
        self.refuse(USAGE, "inspect", QWEN, "--bogus", says=("--bogus",))
        self.refuse(USAGE, "quantize", QWEN, says=("--output",))
        for command in ("quantize", "inspect", "plan", "verify", "dequantize"):
            done = run(command, "--help")
            self.assertEqual(done.returncode, 0)
            self.assertIn("Example:", done.stdout)

    def test_an_empty_value_is_not_the_next_word(self) -> None:
        out = str(self.directory / "out")
        self.refuse(USAGE, "quantize", QWEN, "-o", out, "--recipe=", "--quiet", says=("''",))
        self.refuse(USAGE, "plan", "--memory=", QWEN, says=("''",))
        self.refuse(USAGE, "generate", QWEN, "--tokens=1", "--max-tokens=", says=("''",))

    def test_formats_and_groups(self) -> None:
        out = self.directory / "out"
        for options, text in (
                (["--format", "fp5"], "'fp5'"),
                (["--format", ""], "''"),
                (["--group-size", "0"], "got 0"),
                (["--group-size", "-1"], "got -1"),
                (["--group-size", "7"], "got 7"),
                (["--group-size", "ten"], "ten"),
                (["--recipe", "uniform:s4/g7"], "got 7"),
                (["--recipe", "nothing"], "'nothing'"),
                (["--recipe", "default_moe", "--format", "s4"], "--format"),
                (["--scale-dtype", "fp64"], "'fp64'"),
                (["--method", "best"], "'best'"),
                (["--override", "lm_head"], "'lm_head'"),
                (["--override", "(=keep"], "regular expression"),
                (["--override", "lm_head=s4/g3"], "got 3"),
                (["--shard-size", "5 bananas"], "'5 bananas'"),
                (["--shard-size", "99999999999TB"], "'99999999999TB'"),
                (["--shard-size", "0"], "'0'"),
        ):
            self.refuse(USAGE, "quantize", QWEN, "-o", out, *options, says=(text,))
        self.assert_nothing_written()

    def test_verify_and_dequantize(self) -> None:
        self.refuse(USAGE, "verify", QWEN, says=("is not a quantized checkpoint",))
        self.refuse(USAGE, "verify", QWEN, "--max-error", 1, says=("--against",))
        self.refuse(USAGE, "dequantize", QWEN, "-o", self.directory / "out", says=(str(QWEN),))
        self.refuse(USAGE, "dequantize", QWEN, "-o", self.directory / "out", "--dtype", "int8",
                    says=("'int8'",))
        self.assert_nothing_written()

    def test_quantized_source(self) -> None:
        self.succeed("quantize", QWEN, "-o", self.directory / "out")
        self.refuse(USAGE, "quantize", self.directory / "out", "-o", self.directory / "again",
                    says=("quantized already",))

    def test_existing_output(self) -> None:
        out = self.directory / "out"
        out.mkdir()
        (out / "precious").write_text("text")
        self.refuse(USAGE, "quantize", QWEN, "-o", out, says=(str(out),))
        self.assertEqual(os.listdir(out), ["precious"])
        self.assert_nothing_written("out")


class BadFiles(CommandTestCase):
    """Files that violate their format."""

    def single(self, values: list[float] | None = None) -> dict[str, tuple[str, list[int], bytes]]:
        return {NAME: ("BF16", [32, 64], bf16(values or [0.5] * 2048))}

    def refuse_file(self, says: tuple[str, ...], code: int = MALFORMED) -> None:
        path = self.directory / "model.safetensors"
        self.refuse(code, "inspect", path, says=says)
        self.refuse(code, "quantize", path, "-o", self.directory / "out", says=says)
        self.assert_nothing_written("model.safetensors")

    def test_missing(self) -> None:
        for command in ("inspect", "verify", "plan"):
            self.refuse(IO, command, self.directory / "absent", says=("absent",))
        self.refuse(IO, "quantize", self.directory / "absent", "-o", self.directory / "out",
                    says=("absent",))
        self.assert_nothing_written()

    def test_truncated(self) -> None:
        path = self.directory / "model.safetensors"
        write_safetensors(path, self.single())
        whole = path.read_bytes()
        for length in (0, 7, 8, 60, len(whole) - 1):
            path.write_bytes(whole[:length])
            self.refuse_file(("model.safetensors",))

    def test_headers_that_lie(self) -> None:
        path = self.directory / "model.safetensors"
        tensors = {"a.weight": ("BF16", [2, 2], bf16([1.0] * 4)),
                   "b.weight": ("BF16", [2, 2], bf16([1.0] * 4))}
        for edit, text in (
                (lambda t: t.replace("[8, 16]", "[4, 12]"), "b.weight"),
                (lambda t: t.replace('"b.weight"', '"a.weight"'), "a.weight"),
                (lambda t: t.replace("[2, 2]", "[2, 3]"), "weight"),
                (lambda t: t.replace("[2, 2]", "[4294967296, 4294967296]"), "weight"),
                (lambda t: t.replace("[2, 2]", "[-2, -2]"), "weight"),
                (lambda t: t.replace("[8, 16]", "[8, 1600]"), "b.weight"),
                (lambda t: t[:-1], "model.safetensors"),
        ):
            write_safetensors(path, tensors, edit)
            self.refuse_file((text,))
        path.write_bytes(b"\xff" * 8 + b"{}")
        self.refuse_file(("model.safetensors",))

    def test_not_a_number(self) -> None:
        for bad, text in ((math.nan, "NaN"), (math.inf, "Inf")):
            values = [0.5] * 2048
            values[64 * 3 + 17] = bad
            path = self.directory / "model.safetensors"
            write_safetensors(path, self.single(values))
            # Row 3 of [out, in] is column 3 of W; position 17 is k.
            self.refuse(MALFORMED, "quantize", path, "-o", self.directory / "out",
                        says=(NAME, text, "17", "3"))
            self.assert_nothing_written("model.safetensors")

    def test_other_kinds_of_files(self) -> None:
        for name, content in (("model.gguf", b"GGUF\x03\x00\x00\x00" + bytes(64)),
                              ("model.bin", b"PK\x03\x04" + bytes(64))):
            (self.directory / name).write_bytes(content)
            done = run("inspect", self.directory / name)
            self.assertIn(done.returncode, (USAGE, MALFORMED))
            self.assertIn(name, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1)

    def test_names_do_not_reach_the_terminal_raw(self) -> None:
        path = self.directory / "model.safetensors"
        write_safetensors(path, {"a\x1b[2Jb.weight": ("BF16", [2], bf16([1.0, 2.0]))})
        self.assertNotIn("\x1b", self.succeed("inspect", path))

    def test_shapes_that_disagree(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out)
        config = json.loads((out / "config.json").read_text())
        modules = config["quantization_config"]["modules"]
        modules["model.layers.0.self_attn.q_proj.weight"]["shape"] = [128, 256]
        (out / "config.json").write_text(json.dumps(config))
        self.refuse(MALFORMED, "inspect", out, says=("config.json", "checksum"))

    def test_tensors_that_disagree_with_their_module(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out)
        path = next(out.glob("*.safetensors"))
        tensors = read_safetensors(path)
        name = "model.layers.0.self_attn.q_proj.scales"
        dtype, shape, content = tensors[name]
        tensors[name] = (dtype, [shape[0] * 2, shape[1] // 2], content)
        write_safetensors(path, tensors)
        self.refuse(MALFORMED, "inspect", out, says=(name, "[2, 128]", "[4, 64]"))

    def test_index_that_disagrees_with_its_shards(self) -> None:
        source = self.directory / "source"
        shutil.copytree(GLM, source, copy_function=shutil.copyfile)
        os.chmod(source, 0o755)
        path = source / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
        path.write_text(json.dumps(index))
        self.refuse(MALFORMED, "quantize", source, "-o", self.directory / "out",
                    says=("model.norm.weight",))
        (source / "model-00003-of-00003.safetensors").unlink()
        self.refuse(IO, "inspect", source, says=("model-00003-of-00003.safetensors",))
        self.assert_nothing_written("source")

    def test_other_source(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out)
        self.refuse(MALFORMED, "verify", out, "--against", GLM)
        # The source has one tensor more than the quantized directory.
        source = self.directory / "source"
        shutil.copytree(QWEN, source)
        os.chmod(source, 0o755)
        tensors = read_directory(QWEN)
        tensors["model.layers.9.mlp.up_proj.weight"] = ("BF16", [2, 2], bf16([1.0] * 4))
        (source / "model.safetensors").unlink()
        write_safetensors(source / "model.safetensors", tensors)
        self.refuse(MALFORMED, "verify", out, "--against", source, says=("model.layers.9", "only"))

    def test_bit_flips_are_found(self) -> None:
        out = self.directory / "out"
        self.succeed("quantize", QWEN, "-o", out)
        path = next(out.glob("*.safetensors"))
        content = bytearray(path.read_bytes())
        for position in (len(content) - 1, len(content) // 2, len(content) // 3):
            content[position] ^= 4
            path.write_bytes(content)
            self.refuse(MALFORMED, "verify", out, says=("checksum",))
            content[position] ^= 4
        path.write_bytes(content)
        self.succeed("verify", out)


class Interruptions(CommandTestCase):
    """Full disks and killed processes."""

    def test_full_disk(self) -> None:
        def limit_files() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        self.refuse(IO, "quantize", QWEN, "-o", self.directory / "out", preexec_fn=limit_files,
                    restore_signals=False)
        self.assertFalse((self.directory / "out").exists())
        self.succeed("quantize", QWEN, "-o", self.directory / "out", "--resume")
        self.succeed("verify", self.directory / "out")
        self.assert_nothing_written("out")

    def test_killed(self) -> None:
        out = self.directory / "out"
        finished = 0
        for attempt in range(8):
            with subprocess.Popen([COMMAND, "quantize", str(GLM), "-o", str(out), "--overwrite"],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                time.sleep(0.004 * attempt)
                process.kill()
            if out.exists():
                finished += 1
                self.succeed("verify", out, "--against", GLM)
        self.succeed("quantize", GLM, "-o", out, "--resume", "--overwrite")
        self.succeed("verify", out, "--against", GLM)
        self.assert_nothing_written("out")


if __name__ == "__main__":
    unittest.main()
