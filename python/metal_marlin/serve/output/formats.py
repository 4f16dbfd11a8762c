"""Which format a model writes its answers in, and the parser of one answer."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..deltas import Piece
from . import families, harmony
from .reader import Reader, Sink, Steps, make_call_id
from .tagged import Schemas

_THINKING = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
_MISTRAL_ID = string.ascii_letters + string.digits
_MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
            "</arg_value>"),
    "llama3": (families.Llama.MARK,),
    "mistral": families.Mistral.MARKS,
    "deepseek": families.DEEPSEEK_MARKS,
    "harmony": harmony.MARKS,
}  # fmt: skip


@dataclass(frozen=True)
class OutputFormat:
    """The format of a model's answers; made by `output_format`."""

    calls: str | None
    """hermes, qwen3_coder, glm, llama3, mistral, deepseek or harmony; None: no calls."""
    thinking: tuple[str, str] | None
    """The marks around reasoning; None where there is none, and for harmony, whose channels are."""
    warning: str | None
    """What the user should know at start: that calls come back as text."""

    @property
    def visible_special_tokens(self) -> tuple[str, ...]:
        """The special tokens that must stay in the text which a parser gets."""
        return (*(_MARKS[self.calls] if self.calls else ()), *(self.thinking or ()))

    def make_call_id(self) -> str:
        """An id of the kind that the template takes back."""
        if self.calls == "mistral":
            return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))
        return make_call_id()


def output_format(model_type: str, template_source: str | None) -> OutputFormat:
    """The format of a model by what its chat template writes for the model's own turns, or else by
    the model_type of its config.json."""
    source = template_source or ""
    calls = _calls(model_type, source)
    thinking = None
    if calls != "harmony":
        thinking = next((pair for pair in _THINKING if pair[1] in source), None)
    warning = None
    if calls is None and "tools" in source:
        warning = (
            "the chat template lists tools, but how this model writes tool calls is not known: "
            "they come back as text"
        )
    return OutputFormat(calls, thinking, warning)


def _calls(model_type: str, source: str) -> str | None:
    if harmony.CHANNEL in source and harmony.MESSAGE in source:
        return "harmony"
    if "<arg_key>" in source:
        return "glm"
    if "<function=" in source and "<parameter=" in source:
        return "qwen3_coder"
    if "<tool_call>" in source:
        return "hermes"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if families.DEEPSEEK_MARKS[1] in source:
        return "deepseek"
    if "<|python_tag|>" in source or ("<|start_header_id|>" in source and "ipython" in source):
        return "llama3"
    return "harmony" if model_type == "gpt_oss" else None


class OutputParser:
    """Splits one answer; made by `output_parser`.

    The pieces that `add` and `finish` return, joined by kind, do not depend on where the text is
    cut. No text is lost but marks, the space around calls, and newlines around reasoning.
    """

    def __init__(
        self,
        kind: OutputFormat,
        body: Callable[[Reader, Sink], Steps[None]],
        *,
        opened: bool,
        trims: bool,
        make_id: Callable[[], str] | None,
    ) -> None:
        self.visible_special_tokens = kind.visible_special_tokens
        self._reader = Reader()
        self._sink = Sink(make_id or kind.make_call_id, trims=trims)
        self._steps: Steps[None] | None = self._read(kind.thinking, opened, body)

    @property
    def tool_calls(self) -> int:
        """How many calls have begun."""
        return self._sink.calls

    def add(self, text: str) -> list[Piece]:
        """The pieces that are certain with this text, which follows the earlier ones."""
        self._reader.add(text)
        return self._run()

    def finish(self) -> list[Piece]:
        """The pieces that were held back until the end of the answer."""
        self._reader.end()
        self._run_to_end()
        return self._sink.take()

    def _run(self) -> list[Piece]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        return self._sink.take()

    def _run_to_end(self) -> None:
        for _ in self._steps or ():
            pass
        self._steps = None
        self._sink.end()

    def _read(
        self,
        thinking: tuple[str, str] | None,
        opened: bool,
        body: Callable[[Reader, Sink], Steps[None]],
    ) -> Steps[None]:
        reader, sink = self._reader, self._sink
        if thinking is not None:
            yield from _read_reasoning(reader, sink, thinking, opened)
        yield from body(reader, sink)


def _read_reasoning(
    reader: Reader, sink: Sink, marks: tuple[str, str], opened: bool
) -> Steps[None]:
    """Reads the reasoning that an answer may begin with; `opened`: its first mark is in the
    prompt."""
    begin, end = marks
    reader.hold()
    yield from reader.space()
    accepted = yield from reader.accept(begin)
    if accepted:
        reader.release()
    else:
        reader.rewind()
    # A model may repeat the mark that the template has written.
    if accepted or opened:
        yield from reader.newlines()
        yield from reader.until((end,), sink.reasoning)
        sink.end_reasoning()
        yield from reader.newlines()


def output_parser(
    model_type: str,
    template_source: str | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    prompt_text: str = "",
    *,
    make_id: Callable[[], str] | None = None,
) -> OutputParser:
    """The parser of one answer to a prompt.

    template_source: the Jinja text that rendered the prompt, which decides the format (see
    `output_format`). tools: as in the request; without any, nothing is a call. prompt_text: the
    rendered prompt, where the reasoning, or a message of Harmony, may have been begun. make_id: ids
    of calls. Each answer needs a parser of its own.
    """
    kind = output_format(model_type, template_source)
    opened = kind.thinking is not None and prompt_text.rstrip().endswith(kind.thinking[0])
    calls = kind.calls if tools else None
    body: Callable[[Reader, Sink], Steps[None]] = families.read_plain
    schemas = Schemas(tools or ())
    names = families.names_of(tools or ())
    if kind.calls == "harmony":
        body = harmony.Harmony(names if tools else None, prompt_text).read
    elif calls in ("hermes", "qwen3_coder", "glm"):
        body = families.ToolCallTags(
            schemas, functions=calls == "qwen3_coder", keys=calls == "glm"
        ).read
    elif calls == "llama3":
        body = families.Llama(names).read
    elif calls == "mistral":
        body = families.Mistral().read
    elif calls == "deepseek":
        body = families.DeepSeek().read
    trims = calls is not None and calls != "harmony"
    return OutputParser(kind, body, opened=opened, trims=trims, make_id=make_id)
