"""The terminal of `metal-marlin chat` with prompt_toolkit and rich (the extra `chat`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.key_binding import KeyBindings
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from . import _core
from ._terminal import Terminal

_FENCE = "```"


def split_block(text: str) -> tuple[str, str]:
    """Complete blocks of Markdown, which end at blank lines outside of code, and the rest."""
    at = text.rfind("\n\n")
    while at >= 0 and text.count(_FENCE, 0, at) % 2 == 1:
        at = text.rfind("\n\n", 0, at)
    return (text[: at + 2], text[at + 2 :]) if at >= 0 else ("", text)


class RichTerminal(Terminal):
    """A line editor with history and completion; answers are shown as Markdown."""

    def __init__(self, commands: Sequence[str], *, quiet: bool) -> None:
        super().__init__(interactive=True, as_json=False, quiet=quiet)
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        completer = WordCompleter(list(commands), sentence=True)
        self._session: PromptSession[str] = PromptSession(key_bindings=keys, completer=completer,
                                                          complete_while_typing=False)
        self._console = Console(highlight=False)
        self._live: Live | None = None
        self._rest = ""

    def read_line(self, prompt: str) -> str | None:
        try:
            return self._session.prompt(prompt)
        except EOFError:
            return None

    def show(self, piece: str) -> None:
        """Prints blocks of Markdown as they are complete, and the unfinished one below them."""
        if self._live is None:
            self._live = Live(console=self._console, transient=True)
            self._live.start()
        blocks, self._rest = split_block(self._rest + str(_core.printable(piece)))
        if blocks.strip():
            self._console.print(Markdown(blocks))
        lines = self._rest.splitlines()[-max(1, self._console.height // 2) :]
        self._live.update(Text("\n".join(lines)))

    def end_answer(self) -> None:
        if self._live is not None:
            self._live.stop()
        if self._rest.strip():
            self._console.print(Markdown(self._rest))
        self._live, self._rest = None, ""

    def say(self, text: str) -> None:
        if self._live is not None:  # An error within an answer.
            self.end_answer()
        super().say(text)
