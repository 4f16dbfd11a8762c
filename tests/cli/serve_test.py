"""serve in the command without a tokenizer."""

from __future__ import annotations

import unittest

from command_line import QWEN, USAGE, CommandTestCase


class Serve(CommandTestCase):
    """The command says what is missing."""

    def test_it_needs_the_package(self) -> None:
        self.refuse(USAGE, "serve", QWEN, says=("serve: needs a tokenizer", "pip install ."))

    def test_wrong_use(self) -> None:
        self.refuse(USAGE, "serve", says=("MODEL",))
        self.refuse(USAGE, "serve", QWEN, "--port", 65536,
                    says=("--port: expected 0..65535, got 65536",))
        self.refuse(USAGE, "serve", QWEN, "--max-running", 0,
                    says=("--max-running: expected 1 or more, got 0",))
        self.refuse(USAGE, "serve", QWEN, "--timeout", -1, says=("--timeout: ", "got -1"))

    def test_help(self) -> None:
        self.assertIn("serve", self.succeed("--help"))
        shown = self.succeed("serve", "--help")
        for option in ("--host", "--api-key", "--no-api-key", "--max-waiting", "--quantize",
                       "--kv-cache", "--chat-template"):
            self.assertIn(option, shown)


if __name__ == "__main__":
    unittest.main()
