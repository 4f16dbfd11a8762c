"""completion: what bash offers, and that every offered value is one that the command knows."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import unittest

from command_line import QWEN, USAGE, CommandTestCase, run

# Fills in what programmable completion gets from bash, for the line in "$@", and prints the answer.
ASK = """
eval "$SCRIPT"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_metal_marlin
printf '%s\\n' "${COMPREPLY[@]}"
"""

# Options whose values a command checks, and the rest of a call that gets as far as that.
CHECKED = {
    ("quantize", "--format"): (QWEN, "-o", "x"),
    ("quantize", "--scale-dtype"): (QWEN, "-o", "x"),
    ("quantize", "--method"): (QWEN, "-o", "x"),
    ("quantize", "--layout"): (QWEN, "-o", "x"),
    ("quantize", "--pruning"): (QWEN, "-o", "x", "--method", "gptq"),
    ("quantize", "--recipe"): (QWEN, "-o", "x"),
    ("export", "--to"): (QWEN, "-o", "x"),
    ("dequantize", "--dtype"): (QWEN, "-o", "x"),
    ("generate", "--kv-cache"): (QWEN, "--tokens", QWEN / "validation_tokens.txt"),
    ("generate", "--device"): (QWEN, "--tokens", QWEN / "validation_tokens.txt"),
    ("completion", "SHELL"): (),
}


class Completion(CommandTestCase):
    """Runs bash with the script."""

    def setUp(self) -> None:
        super().setUp()
        self.bash = shutil.which("bash") or self.skipTest("no bash")
        self.script = self.succeed("completion", "bash")

    def offers(self, *words: str) -> list[str]:
        """What bash offers for the last of these words."""
        done = subprocess.run([self.bash, "--norc", "-c", ASK, "bash", "metal-marlin", *words],
                              capture_output=True, text=True, check=True, cwd=self.directory,
                              env={**os.environ, "SCRIPT": self.script})
        self.assertEqual(done.stderr, "")
        return done.stdout.split("\n")[:-1] if done.stdout.strip() else []

    def test_commands(self) -> None:
        self.assertEqual(self.offers("qu"), ["quantize"])
        listed = re.findall(r"^  ([a-z][a-z-]+)", run("--help").stdout, re.MULTILINE)
        self.assertEqual(set(self.offers("")) - {"--help", "--version"},
                         set(listed) - {"metal-marlin"})

    def test_options(self) -> None:
        self.assertEqual(self.offers("quantize", "--gro"), ["--group-size"])
        self.assertEqual(self.offers("inspect", "model", "--js"), ["--json"])
        # Every option of the help.
        for command in self.offers(""):
            if command.startswith("-"):
                continue
            options = re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", run(command, "--help").stdout,
                                 re.MULTILINE)
            self.assertEqual(set(self.offers(command, "--")), set(options), command)

    def test_an_alias_has_the_options_of_its_command(self) -> None:
        self.assertEqual(self.offers("convert", "x", "--"), self.offers("export", "x", "--"))
        self.assertEqual(self.offers("convert", "x", "--to", "gp"), ["gptq"])

    def test_values(self) -> None:
        self.assertEqual(self.offers("quantize", "m", "--format", "nf"), ["nf4", "nf3", "nf2"])
        self.assertEqual(self.offers("quantize", "m", "--for", "v"), ["vllm"])
        # bash splits at the sign.
        self.assertEqual(self.offers("quantize", "m", "--method", "=", "gp"), ["gptq"])
        self.assertEqual(self.offers("quantize", "m", "--method", "="),
                         self.offers("quantize", "m", "--method", ""))
        self.assertEqual(self.offers("completion", ""), ["bash", "zsh", "fish"])
        self.assertEqual(self.offers("quantize", "m", "--group-size", ""), [])

    def test_paths(self) -> None:
        (self.directory / "my model").mkdir()
        (self.directory / "my.json").touch()
        for words in (["inspect"], ["quantize", "m", "-o"], ["quantize", "m", "--imatrix"],
                      ["generate", "--prompts"]):
            self.assertEqual(sorted(self.offers(*words, "my")), ["my model", "my.json"])
        for words in (["devices"], ["quantize", "m", "--override"], ["bench", "gemm", "--shape"]):
            self.assertEqual(self.offers(*words, ""), [])
        # A recipe is a name or a file.
        self.assertEqual(self.offers("quantize", "m", "--recipe", "default_m"), ["default_moe"])
        self.assertIn("my.json", self.offers("quantize", "m", "--recipe", ""))

    def test_values_are_those_that_the_commands_know(self) -> None:
        for (command, option), rest in CHECKED.items():
            before = [command, option] if option.startswith("-") else [command]
            offered = [word for word in self.offers(*before, "") if word]
            message = run(*before, "zzz", *rest).stderr
            known = re.search(r"(?:known|presets): (.*)|expected (.*), got", message)
            assert known is not None, message
            # "cuda:N" and "uniform:FORMAT/gN" are patterns of values.
            names = [name for name in re.split(r", | or ", known[1] or known[2])
                     if not re.search(r"[A-Z]", name)]
            self.assertEqual(sorted(offered), sorted(names), (command, option))

    def test_all_scripts_name_every_option(self) -> None:
        for shell, form in (("zsh", "'*{}["), ("fish", " -l {} ")):
            script = self.succeed("completion", shell)
            for option in ("--recipe", "--target-bpw", "--to", "--prompts"):
                self.assertIn(form.format(option.removeprefix("--" if shell == "fish" else "")),
                              script)
            interpreter = shutil.which(shell)
            if interpreter:
                path = pathlib.Path(self.directory, f"script.{shell}")
                path.write_text(script)
                subprocess.run([interpreter, "-n", path], check=True)

    def interpreter(self, shell: str) -> tuple[str, str]:
        """The shell, and the path of its script."""
        path = pathlib.Path(self.directory, f"script.{shell}")
        path.write_text(self.succeed("completion", shell))
        return shutil.which(shell) or self.skipTest(f"no {shell}"), str(path)

    def test_fish_offers_the_same(self) -> None:
        fish, path = self.interpreter("fish")
        (self.directory / "my.json").touch()
        for words in ("qu", "bench ge", "quantize m --gro", "quantize m --format nf",
                      "bench gemm --format nf", "convert x --to gp", "completion ", "devices ",
                      "quantize m --imatrix my", "inspect my", "quantize m --group-size ",
                      "bench --js"):
            ask = f"source {path}; complete -C 'metal-marlin {words}'"
            done = subprocess.run([fish, "--no-config", "-c", ask], capture_output=True, text=True,
                                  check=True, cwd=self.directory,
                                  env={**os.environ, "HOME": str(self.directory)})
            self.assertEqual(done.stderr, "")
            offered = {line.partition("\t")[0] for line in done.stdout.splitlines()}
            self.assertEqual(offered, set(self.offers(*words.split(" "))), words)

    def test_zsh_asks_for_the_same(self) -> None:
        """With stand-ins for the functions of its completion system, which needs a terminal."""
        zsh, path = self.interpreter("zsh")
        ask = ("compdef() { }; compadd() { print -rl -- ${@:#--} }; "
               "_describe() { print -rl -- ${(P)2%%:*} }; "
               "_arguments() { print -rl -- \"$@\" }; "
               f"source {path}; words=(\"$@\"); CURRENT=$#; _metal_marlin")

        def offers(*words: str) -> list[str]:
            done = subprocess.run([zsh, "-f", "-c", ask, "zsh", "metal-marlin", *words],
                                  capture_output=True, text=True, check=True, cwd=self.directory)
            self.assertEqual(done.stderr, "")
            return done.stdout.splitlines()

        names = set(self.offers("")) - {"--help", "--version"}
        self.assertEqual(set(offers("")), names)
        self.assertEqual(offers("--"), ["--help", "--version"])
        for command in ("quantize", "convert", "devices", "bench gemm"):
            words = command.split()
            options = {spec[1:].partition("[")[0] for spec in offers(*words, "--")
                       if spec.startswith("*-")}
            self.assertLessEqual(set(self.offers(*words, "--")), options)
        self.assertIn("*--to[plain, compressed-tensors, gptq, awq, mlx, gguf]:LAYOUT:"
                      "(plain compressed-tensors gptq awq mlx gguf)", offers("export", "x"))

    def test_wrong_use(self) -> None:
        self.refuse(USAGE, "completion", says=("SHELL is required",))
        self.refuse(USAGE, "completion", "csh",
                    says=("SHELL: unknown shell 'csh'; known: bash, zsh, fish",))
        self.assertEqual(self.document("completion", "bash"),
                         {"shell": "bash", "script": self.script})
        self.assertIn("~/.bashrc", self.succeed("completion", "--help"))


if __name__ == "__main__":
    unittest.main()
