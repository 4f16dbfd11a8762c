"""Chat answers as streams of pieces, which every chat endpoint formats in its own way."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..chat_template import ChatTemplate, check_variables
from ..errors import MalformedFileError
from .call_form import CallForm, call_form
from .conversation import checked_tools, template_messages, tool_choice
from .deltas import (
    ContentDelta,
    Delta,
    Finished,
    Piece,
    ReasoningCount,
    ReasoningDelta,
    ToolCallDelta,
    Usage,
    joined,
)
from .engine import Constraint, Engine, Text
from .errors import ApiError, bad_request, unsupported
from .formats import AnswerForm, form_of
from .generations import Chunk, Generations
from .output import OutputFormat, OutputParser, output_format, output_parser
from .settings import Settings

# Variables of a template that chat_template_kwargs cannot set.
_TAKEN = ("self", "messages", "tools", "documents", "add_generation_prompt",
          "continue_final_message")  # fmt: skip


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to answer; the fields have the form of OpenAI's chat completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: {"json" | "regex" | "grammar" | "choice": ...}."""
    settings: Settings = field(default_factory=Settings)
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    n: int = 1
    """Answers, each with a seed of its own."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model reads it."""

    text: str
    ids: list[int]


class ChatService:
    """Answers conversations with an engine."""

    def __init__(self, engine: Engine, template: ChatTemplate | None) -> None:
        self.engine = engine
        self._template = template
        texts = "" if template is None else "".join(template.templates.values())
        self.template_text = texts
        """Of all templates; empty without one."""
        self._has_developer = "developer" in texts

    @property
    def warning(self) -> str | None:
        """A warning for the start of the server: conversations or calls that it cannot handle."""
        if self._template is None:
            return "no chat template: conversations are refused; --chat-template gives one"
        return self._format(None).warning

    def _format(self, tools: list[dict[str, Any]] | None) -> OutputFormat:
        """The form of the answers to requests with these tools."""
        return output_format(self.engine.info["model_type"], self._source(tools))

    def _source(self, tools: list[dict[str, Any]] | None) -> str:
        return "" if self._template is None else self._template.text(tools)

    async def render(self, request: ChatRequest) -> Rendered:
        """The prompt of a conversation. Errors: ApiError, the template's."""
        template = self._template
        if template is None:
            raise bad_request(
                "messages", "the model has no chat template; start the server with --chat-template"
            )
        source = self._source(request.tools)
        if request.tools and "tools" not in source:
            raise unsupported("tools", "the model's chat template has no tools")
        variables = check_variables("chat_template_kwargs", request.template_kwargs, _TAKEN)
        if request.reasoning_effort is not None:
            if "reasoning_effort" not in source:
                raise unsupported("reasoning_effort", "the model's chat template has none")
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        messages = template_messages(request.messages, has_developer=self._has_developer)

        calls = [i for i, message in enumerate(messages) if message.get("tool_calls")]

        def render() -> str:
            return template.render(
                self._in_call_form(messages, calls[0]) if calls else messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **variables,
            )

        try:
            text = await self.engine.in_pool(render)
        except MalformedFileError as error:
            # The same template renders other messages: these, or the variables, do not fit it.
            raise bad_request("messages", str(error)) from None
        return Rendered(text, await self.engine.encode(text, add_special_tokens=False))

    def _in_call_form(self, messages: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
        """The messages with calls as the template takes them; `index` of the first that has any."""
        form = self._call_form
        if form is None:
            raise unsupported(
                f"messages[{index}].tool_calls", "the model's chat template writes no calls"
            )
        return form.apply(messages)

    @functools.cached_property
    def _call_form(self) -> CallForm | None:
        return None if self._template is None else call_form(self._template)

    async def start(self, request: ChatRequest) -> ChatAnswers:
        """Submits the answers of a request. Errors: as `render` and `Engine.submit`."""
        tools = checked_tools(request.tools)
        choice = tool_choice(request.tool_choice, tools)
        request = replace(request, tools=None if choice == "none" else tools)
        rendered = await self.render(request)
        self._check_length(rendered)
        visible = self._format(request.tools).visible_special_tokens
        settings = replace(request.settings, visible_special_tokens=visible)
        texts = [
            Text(rendered.ids, settings, await self._constraint(request, choice, rendered), copy)
            for copy in range(request.n)
        ]
        source = self._source(request.tools)
        parsers = [
            output_parser(self.engine.info["model_type"], source, request.tools, rendered.text)
            for _ in texts
        ]
        return ChatAnswers(self.engine.submit(texts), parsers, request.parallel_tool_calls)

    async def stream(self, request: ChatRequest) -> AsyncIterator[Delta]:
        """The pieces of one answer; closing the iterator cancels it."""
        answers = await self.start(request)
        try:
            async for _, delta in answers:
                yield delta
        finally:
            answers.close()

    def _check_length(self, rendered: Rendered) -> None:
        if len(rendered.ids) > self.engine.context:
            raise ApiError(
                400,
                f"messages: have {len(rendered.ids)} tokens, the context holds "
                f"{self.engine.context}",
                param="messages",
                code="context_length_exceeded",
            )

    async def _constraint(
        self, request: ChatRequest, choice: str, rendered: Rendered
    ) -> Constraint | None:
        asked = AnswerForm(
            form_of(request.response_format, request.structured_outputs),
            "structured_outputs" if request.structured_outputs else "response_format",
            request.tools,
            choice,
            request.parallel_tool_calls,
        )
        if asked.is_free:
            return None
        source = self._source(request.tools)
        output = self._format(request.tools)
        return await self.engine.in_pool(
            asked.constraint, self.engine, output, source, rendered.text
        )


class ChatAnswers:
    """The answers of one request; iterates over (index of the answer, Delta) as they come."""

    def __init__(
        self, generations: Generations, parsers: Sequence[OutputParser], several_calls: bool
    ) -> None:
        self._generations, self._parsers = generations, parsers
        self._several_calls = several_calls
        self._called = [False] * len(parsers)
        self._reasoning = [ReasoningCount() for _ in parsers]
        self._token_ids: list[list[int]] = [[] for _ in parsers]

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._generations.texts[0].prompt

    @property
    def usage(self) -> Usage:
        """The tokens of all answers so far; the prompt counts once."""
        each = [
            replace(text.usage, reasoning_tokens=count.tokens)
            for text, count in zip(self._generations.texts, self._reasoning, strict=True)
        ]
        return Usage.of(each[0].prompt_tokens, each[0].cached_tokens, each)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        async for index, chunk in self._generations:
            for delta in self._deltas(index, chunk):
                yield index, delta

    def take_token_ids(self, index: int) -> list[int]:
        """The tokens of an answer that have come since the last call, without the stop token."""
        taken, self._token_ids[index] = self._token_ids[index], []
        return taken

    def close(self) -> None:
        """Ends the answers that still come."""
        self._generations.close()

    def _deltas(self, index: int, chunk: Chunk) -> list[Delta]:
        parser, reasoning = self._parsers[index], self._reasoning[index]
        self._token_ids[index] += chunk.token_ids
        pieces: list[Piece] = []
        for i, text in enumerate(chunk.texts):
            of_token = parser.add(text)
            reasoning.add(1 if i < len(chunk.token_ids) else 0, of_token)
            pieces += of_token
        if chunk.finish_reason is not None:
            rest = parser.finish()
            reasoning.add(0, rest)
            pieces += rest
        pieces = joined(pieces)
        if not self._several_calls:
            # The client acts on the first call, and then asks again.
            pieces = [
                piece for piece in pieces
                if not (isinstance(piece, ToolCallDelta) and piece.index > 0)
            ]  # fmt: skip
        self._called[index] |= any(isinstance(piece, ToolCallDelta) for piece in pieces)
        deltas: list[Delta] = [*_with_logprobs(pieces, chunk)]
        if chunk.finish_reason is not None:
            stopped = chunk.finish_reason == "stop"
            reason = "tool_calls" if stopped and self._called[index] else chunk.finish_reason
            usage = replace(chunk.usage, reasoning_tokens=reasoning.tokens)
            deltas.append(Finished(reason, usage, chunk.stop))
        return deltas


def _with_logprobs(pieces: list[Piece], chunk: Chunk) -> list[Piece]:
    """The pieces, the first text of which has the log-probabilities of the chunk's tokens."""
    if not chunk.logprobs:
        return pieces
    for i, piece in enumerate(pieces):
        if isinstance(piece, ContentDelta | ReasoningDelta):
            pieces[i] = replace(piece, logprobs=chunk.logprobs)
            return pieces
    return [ContentDelta("", chunk.logprobs), *pieces]
