"""generate --prompts: a file of prompts, together."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import subprocess
import unittest
from typing import Any

from command_line import COMMAND, IO, MALFORMED, QWEN, USAGE, CommandTestCase

GOLDEN = json.loads((QWEN / "golden.json").read_text())
PROMPTS: list[dict[str, Any]] = [
    {"tokens": GOLDEN["prompt_ids"]},
    {"tokens": [5], "max_tokens": 3},
    {"tokens": [7, 8, 9] * 30, "seed": 3},
    {"tokens": [7, 8, 9] * 30, "seed": 4},
    {"tokens": [1], "max_tokens": 0},
]


class Prompts(CommandTestCase):
    """Prompts of token ids, by the command without a tokenizer."""

    def file(self, prompts: list[dict[str, Any]], name: str = "prompts.jsonl") -> pathlib.Path:
        path = self.directory / name
        path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        return path

    def rows(self, *arguments: object) -> list[dict[str, Any]]:
        shown = self.succeed("generate", QWEN, *arguments, "--json")
        return [json.loads(line) for line in shown.splitlines()]

    def alone(self, prompt: dict[str, Any], *options: object) -> dict[str, Any]:
        tokens = self.directory / "tokens.json"
        tokens.write_text(json.dumps(prompt["tokens"]))
        own = []
        for key, option in (("max_tokens", "--max-tokens"), ("seed", "--seed")):
            if key in prompt:
                own += [option, prompt[key]]
        document: dict[str, Any] = self.document("generate", QWEN, "--tokens", tokens, *own,
                                                 *options)
        return document

    def test_each_text_is_that_of_its_prompt_alone(self) -> None:
        options = ("--batch-invariant", "--temperature", 0.9)
        want = [self.alone(prompt, *options, *(() if "max_tokens" in prompt
                                               else ("--max-tokens", 12)))
                for prompt in PROMPTS]
        self.assertNotEqual(want[2]["token_ids"], want[3]["token_ids"])
        for batch in ((), ("--batch", 1), ("--batch", 2)):
            rows = self.rows("--prompts", self.file(PROMPTS), "--max-tokens", 12, *options, *batch)
            self.assertEqual([row["line"] for row in rows], [1, 2, 3, 4, 5])
            for row, alone in zip(rows, want, strict=True):
                for key in ("text", "token_ids", "stop_reason", "prompt_tokens"):
                    self.assertEqual(row[key], alone[key], key)
                self.assertEqual(list(row), ["line", *alone])
        shown = self.succeed("generate", QWEN, "--prompts", self.file(PROMPTS), "--max-tokens", 12,
                             *options)
        lines = [f"[{i + 1}] {' '.join(map(str, row['token_ids']))}\n"
                 for i, row in enumerate(want)]
        self.assertEqual(shown, "".join(lines))

    def test_lines_of_the_file(self) -> None:
        path = self.directory / "prompts"
        path.write_bytes(b'{"tokens":[5],"max_tokens":2}\r\n \t\r\n\n{ "tokens" : [ 6 ] }')
        rows = self.rows("--prompts", path, "--max-tokens", 4)
        self.assertEqual([(row["line"], len(row["token_ids"])) for row in rows], [(1, 2), (4, 4)])
        piped = subprocess.run([COMMAND, "generate", str(QWEN), "--prompts", "-", "--json",
                                "--max-tokens", "4"], input=path.read_text(), capture_output=True,
                               text=True, check=True)
        got = [json.loads(line)["token_ids"] for line in piped.stdout.splitlines()]
        self.assertEqual(got, [row["token_ids"] for row in rows])

    def test_bad_lines(self) -> None:
        path = self.directory / "prompts"
        good = '{"tokens": [1]}\n'
        for line, says in (
                ("x", "parse error"),
                ("[1]", "object"),
                ("{}", 'expected either "prompt" or "tokens"'),
                ('{"prompt": "a", "tokens": [1]}', 'expected either "prompt" or "tokens"'),
                ('{"prompt": 5}', "prompt: expected a text, got 5"),
                ('{"tokens": 5}', "tokens: expected an array of token ids, got 5"),
                ('{"tokens": [1.5]}', "tokens: expected 0..2147483647, got 1.5"),
                ('{"tokens": [-1]}', "tokens: expected 0..2147483647, got -1"),
                ('{"tokens": [2147483648]}', "tokens: expected 0..2147483647, got 2147483648"),
                ('{"tokens": [1], "seed": -1}', "seed: expected 0..9223372036854775807, got -1"),
                ('{"tokens": [1], "max_tokens": "x"}', 'max_tokens: expected 0..92'),
                ('{"tokens": [1], "tokens": [2]}', "tokens"),
                ('{"tokens": [1], "temperature": 1}',
                 "expected the keys prompt, tokens, max_tokens and seed, got 'temperature'"),
                ('{"tokens": [1]} {', "parse error"),
        ):
            path.write_text(good + line + "\n" + good)
            self.refuse(MALFORMED, "generate", QWEN, "--prompts", path,
                        says=(f"{path}: line 2: ", says))
        for line, says in (('{"tokens": []}', "no tokens"),
                           ('{"tokens": [1, 1024]}', "token 1 is 1024, expected 0..1023"),
                           (json.dumps({"tokens": [1] * 1100}),
                            "1100 tokens do not fit in a context of 1024")):
            path.write_text(good + line)
            self.refuse(USAGE, "generate", QWEN, "--prompts", path,
                        says=(f"{path}: line 2: {says}",))
        for text in ("", " \n\n"):
            path.write_text(text)
            self.refuse(USAGE, "generate", QWEN, "--prompts", path, says=(f"{path}: no prompts",))
        self.refuse(IO, "generate", QWEN, "--prompts", self.directory / "absent",
                    says=("absent: No such file",))

    def test_wrong_use(self) -> None:
        path = self.file(PROMPTS)
        tokens = self.directory / "tokens"
        tokens.write_text("1 2")
        text = self.directory / "text"
        text.write_text("And God said\n")
        for options, says in (
                (("--prompts", path, "--prompt", "x"), "exclude each other"),
                (("--prompts", path, "--tokens", tokens), "exclude each other"),
                (("--tokens", tokens, "--batch", 2), "--batch: only with --prompts"),
                (("--prompts", path, "--batch", 0), "--batch: expected 1 or more, got 0"),
                (("--prompts", text), "--prompts: needs a tokenizer"),
                (("--prompts", path, "--stop", "x"), "--stop: needs a tokenizer"),
        ):
            self.refuse(USAGE, "generate", QWEN, *options, says=(says,))

    def test_a_reader_that_goes_away_ends_all(self) -> None:
        path = self.file([{"tokens": [1]}] * 3 + [{"tokens": [1], "max_tokens": 900}] * 400)
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as out:
            done = subprocess.run([COMMAND, "generate", str(QWEN), "--prompts", str(path),
                                   "--ignore-eos", "--max-tokens", "1"], stdout=out,
                                  stderr=subprocess.PIPE, check=False, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, b""))

    @unittest.skipUnless(hasattr(fcntl, "F_SETPIPE_SZ"), "pipes of a fixed size")
    def test_interrupting_keeps_what_there_is(self) -> None:
        prompts = [{"tokens": [1], "max_tokens": 2}] + [{"tokens": [2], "max_tokens": 900}] * 200
        path = self.file(prompts)
        options = ("generate", QWEN, "--ignore-eos", "--prompts")
        first = self.succeed(*options, self.file(prompts[:1], "first"))
        # A pipe that is full after the first text: the command blocks in its second one at the
        # latest, however fast it is, and texts at the end of the file do not start.
        out = self.interrupt(len(first), *options, path)
        self.assertTrue(out.startswith(first))
        rows = [line.split() for line in out.splitlines()]
        self.assertEqual([row[0] for row in rows], [f"[{i + 1}]" for i in range(201)])
        self.assertEqual((len(rows[0]), len(rows[-1])), (3, 1))


if __name__ == "__main__":
    unittest.main()
