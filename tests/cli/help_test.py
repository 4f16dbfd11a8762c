"""--help and --version: order, groups, aliases, and which of the two programs answers."""

from __future__ import annotations

import re
import unittest

from command_line import QWEN, USAGE, CommandTestCase

# Commands with so many options that they are under several headings.
GROUPED = ("quantize", "generate", "analyze", "perplexity", "compare", "plan", "tune", "metal-sim")
MOST_IN_A_GROUP = 13


class Help(CommandTestCase):
    """What --help prints."""

    def headings(self, *command: str) -> dict[str, int]:
        """The headings, in order, and how many entries each has."""
        sections = re.split(r"^(\S[^\n]*):\n", self.succeed(*command, "--help"),
                            flags=re.MULTILINE)[1:]
        return {name: len(re.findall(r"^  \S", text, re.MULTILINE))
                for name, text in zip(sections[::2], sections[1::2], strict=True)}

    def test_options_are_in_groups(self) -> None:
        for command in GROUPED:
            headings = self.headings(command)
            self.assertGreater(len(headings), 4, command)
            self.assertEqual(list(headings)[0], "Arguments" if command != "tune" else "GEMMs")
            self.assertEqual(list(headings)[-2:], ["General", "Example"])
            self.assertLessEqual(max(headings.values()), MOST_IN_A_GROUP, headings)

    def test_required_and_default_values(self) -> None:
        text = self.succeed("quantize", "--help")
        self.assertIn("Usage: metal-marlin quantize SRC -o DST [OPTIONS]\n", text)
        self.assertRegex(text, r"-o, --output DST (?s:.){,200}\(required\)\n")
        self.assertIn("(default rtn)", text)

    def test_an_alias_is_not_listed_as_a_command(self) -> None:
        text = self.succeed("--help")
        self.assertRegex(text, r"\n  export, convert +Writes")
        self.assertNotRegex(text, r"\n  convert")
        self.assertEqual(self.succeed("convert", "--help"), self.succeed("export", "--help"))

    def commands(self) -> list[tuple[str, ...]]:
        """Every command, groups and their members included."""
        def listed(*group: str) -> list[tuple[str, ...]]:
            text = self.succeed(*group, "--help")
            names = re.findall(r"^  ([a-z][a-z-]+)(?:, [a-z-]+)* ", text[:text.rindex("\n\n")],
                               re.MULTILINE)
            return [(*group, name) for name in names]

        return [*listed(), *listed("bench")]

    def test_every_command_has_short_groups_and_an_example_of_itself(self) -> None:
        commands = self.commands()
        self.assertIn(("doctor",), commands)
        self.assertIn(("bench", "gemm"), commands)
        for command in commands:
            text = self.succeed(*command, "--help")
            example = text[text.rindex("\nExample:\n"):]
            self.assertIn(f"metal-marlin {' '.join(command)}", example, command)
            for heading, count in self.headings(*command).items():
                self.assertLessEqual(count, MOST_IN_A_GROUP, (command, heading))
            # Every option says what its value is, not only the default.
            self.assertNotRegex(text, r"(?m)^  -\S.* {2,}Default", command)

    def test_models_may_be_names_of_the_hub(self) -> None:
        for command in ("quantize", "generate", "serve", "inspect", "chat"):
            self.assertRegex(re.sub(r"\s+", " ", self.succeed(command, "--help")),
                             r"Arguments: \w+ [^:]*or org/name, a model of the Hub")
        self.assertNotIn("org/name", self.succeed("metal-sim", "--help"))

    def test_an_alias_is_the_same_command(self) -> None:
        made = self.directory / "made"
        self.succeed("quantize", QWEN, "-o", made, "--recipe", "uniform:s4/g32")
        for name in ("export", "convert"):
            out = self.directory / f"{name}.gguf"
            self.assertIn("gguf, every weight as in", self.succeed(name, made, "-o", out,
                                                                   "--to", "gguf"))
            self.refuse(USAGE, name, made, "-o", out, "--to", "guff",
                        says=("--to: unknown layout 'guff'; known: plain, ",))
        first, second = (self.directory / f"{name}.gguf" for name in ("export", "convert"))
        self.assertEqual(first.read_bytes(), second.read_bytes())

    def test_the_version_says_which_program_it_is(self) -> None:
        self.assertRegex(self.succeed("--version"),
                         r"^metal-marlin \d+\.\d+\.\d+ \(C\+\+ program, without tokenizers\)\n$")


class Texts(CommandTestCase):
    """Text given to the program without a tokenizer."""

    def test_every_command_says_where_the_tokenizer_is(self) -> None:
        text = self.directory / "text"
        text.write_text("And God said\n")
        out = self.directory / "out"
        ids = QWEN / "validation_tokens.txt"
        for option, instead, arguments in (
                ("--prompt", "--tokens", ("generate", QWEN, "--prompt", "x")),
                ("--prompts", "--tokens", ("generate", QWEN, "--prompts", text)),
                ("--stop", None, ("generate", QWEN, "--tokens", ids, "--stop", "x")),
                ("--text", "--tokens", ("perplexity", QWEN, "--text", text)),
                ("--text", "--tokens", ("compare", QWEN, "--against", QWEN, "--text", text)),
                ("--prompts", "--tokens", ("analyze", QWEN, "--routing", "--prompts", text)),
                ("--calibration", "--calibration-ids",
                 ("analyze", QWEN, "--importance", "--calibration", text)),
                ("--calibration", "--calibration-ids",
                 ("quantize", QWEN, "-o", out, "--method", "gptq", "--calibration", text)),
                ("--calibration", "--calibration-ids",
                 ("quantize", QWEN, "-o", out, "--target-bpw", "4", "--calibration", text)),
        ):
            message = self.refuse(USAGE, *arguments, says=(
                f"{option}: needs a tokenizer", ".venv/bin/metal-marlin", "pip install ."))
            self.assertEqual("takes token ids instead" in message, instead is not None, message)
            if instead:
                self.assertIn(f"; {instead} takes token ids instead\n", message)


if __name__ == "__main__":
    unittest.main()
