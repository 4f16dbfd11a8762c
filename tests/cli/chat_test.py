"""chat and generate --chat in the command without a tokenizer."""

from __future__ import annotations

import unittest

from command_line import QWEN, USAGE, CommandTestCase


class Chat(CommandTestCase):
    """The command says what is missing."""

    def test_it_needs_the_package(self) -> None:
        self.refuse(USAGE, "chat", QWEN, says=("chat: needs a tokenizer",))
        self.refuse(USAGE, "generate", QWEN, "--chat", "--prompt", "a",
                    says=("--prompt: needs a tokenizer",))

    def test_wrong_use(self) -> None:
        self.refuse(USAGE, "chat", says=("MODEL",))
        self.refuse(USAGE, "chat", QWEN, "--max-tokens", 0,
                    says=("--max-tokens: expected 1 or more, got 0",))
        self.refuse(USAGE, "caht", QWEN, says=("did you mean 'chat'?",))
        for option in ("--system", "--chat-template", "--chat-template-kwargs"):
            self.refuse(USAGE, "generate", QWEN, "--tokens", "-", option, "x",
                        says=(f"{option}: only with --chat",))
        self.refuse(USAGE, "generate", QWEN, "--tokens", "-", "--chat",
                    says=("--chat: only with --prompt or --prompts",))

    def test_help(self) -> None:
        self.assertIn("chat", self.succeed("--help"))
        shown = self.succeed("chat", "--help")
        for option in ("--system", "--chat-template", "--temperature", "--no-stream", "--device"):
            self.assertIn(option, shown)


if __name__ == "__main__":
    unittest.main()
