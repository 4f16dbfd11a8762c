"""Completions of texts: prompts, echoes and log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from .deltas import TokenLogprob, Usage
from .engine import Engine, Text
from .errors import bad_request
from .formats import constraint_of
from .generations import Chunk, Generations
from .protocol import CompletionBody, Prompt

_MOST_PROMPTS = 1024


async def encoded_prompts(engine: Engine, prompt: Prompt, special: bool) -> list[list[int]]:
    """The token ids of every prompt of a request."""
    if isinstance(prompt, str):
        texts: list[Any] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        texts = [prompt]
    else:
        texts = list(prompt)
    if not texts:
        raise bad_request("prompt", "expected at least one prompt, got none")
    if len(texts) > _MOST_PROMPTS:
        raise bad_request("prompt", f"expected at most {_MOST_PROMPTS} prompts, got {len(texts)}")
    largest = engine.info["vocab_size"] - 1
    ids = []
    for text in texts:
        if isinstance(text, str):
            ids.append(await engine.encode(text, special))
            continue
        if any(not 0 <= token <= largest for token in text):
            raise bad_request("prompt", f"expected token ids of 0..{largest}")
        ids.append(text)
    for each in ids:
        if not each:
            raise bad_request("prompt", "expected at least one token, got none")
    return ids


@dataclass
class CompletionPiece:
    """A piece of a completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    """Of the continuation, where the request asks for them."""


@dataclass
class _Choice:
    """One completion while it is made."""

    prompt: list[int]
    echo: str | None
    """The prompt's text until it was shown, if it is."""
    offset: int = 0
    """Where the text of the next token begins."""


class Completions:
    """The completions of one request; iterates over CompletionPieces as they come."""

    def __init__(
        self, engine: Engine, generations: Generations, choices: list[_Choice], body: CompletionBody
    ) -> None:
        self._engine = engine
        self._generations, self._choices = generations, choices
        self._copies = body.n or 1
        self._has_logprobs = body.logprobs is not None
        self._has_ids = bool(body.return_token_ids)
        self._only_echo = body.max_tokens == 0

    @classmethod
    async def start(cls, engine: Engine, body: CompletionBody) -> Completions:
        """Submits the texts of a request. Errors: ApiError, as Engine.submit."""
        settings = body.completion_settings()
        if settings.max_tokens == 0:
            # The log-probabilities of a prompt come with the token after it.
            settings = dataclasses.replace(settings, max_tokens=1)
        prompts = await encoded_prompts(engine, body.prompt, body.add_special_tokens is not False)
        texts, choices = [], []
        for prompt in prompts:
            echo = engine.codec.decode(prompt) if body.echo else None
            for copy in range(body.n or 1):
                constraint = await constraint_of(
                    engine, body.response_format, body.structured_outputs
                )
                texts.append(Text(prompt, settings, constraint, copy))
                choices.append(_Choice(prompt, echo))
        return cls(engine, engine.submit(texts), choices, body)

    @property
    def usage(self) -> Usage:
        """The tokens of all texts so far; a prompt that several texts continue counts once."""
        texts = self._generations.texts
        firsts = texts[:: self._copies]
        return Usage.of(
            sum(len(text.prompt) for text in firsts),
            sum(text.usage.cached_tokens for text in firsts),
            [] if self._only_echo else [text.usage for text in texts],
        )

    async def __aiter__(self) -> AsyncIterator[CompletionPiece]:
        async for index, chunk in self._generations:
            yield self._piece(index, chunk)

    def close(self) -> None:
        """Ends the texts that still come."""
        self._generations.close()

    def _piece(self, index: int, chunk: Chunk) -> CompletionPiece:
        choice = self._choices[index]
        text = "" if self._only_echo else chunk.text
        tokens: list[tuple[str, TokenLogprob | None]] = []
        if not self._only_echo:
            tokens = [(each.token, each) for each in chunk.logprobs]
        if choice.echo is not None:
            # The first piece of all begins with the prompt.
            text = choice.echo + text
            choice.echo = None
            names = [self._engine.token_texts(token)[0] for token in choice.prompt]
            tokens = [*zip(names, chunk.prompt_logprobs or (), strict=False), *tokens]
        reason = chunk.finish_reason
        return CompletionPiece(
            index,
            text,
            _logprobs(choice, tokens) if self._has_logprobs else None,
            "length" if reason and self._only_echo else reason,
            ([] if self._only_echo else list(chunk.token_ids)) if self._has_ids else None,
        )


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """The log-probabilities of a token and the most likely ones. Of tokens with the same text, such
    as parts of a character, the most likely one counts."""
    found = {token.token: token.logprob}
    for top in reversed(token.top):
        found[top.token] = top.logprob
    return found


def _logprobs(choice: _Choice, tokens: Sequence[tuple[str, TokenLogprob | None]]) -> dict[str, Any]:
    """The shape of the completions API: lists with an entry per token. The first token of a prompt
    has no log-probability."""
    offsets = []
    for text, _ in tokens:
        offsets.append(choice.offset)
        choice.offset += len(text)
    return {
        "tokens": [text for text, _ in tokens],
        "token_logprobs": [None if each is None else each.logprob for _, each in tokens],
        "top_logprobs": [None if each is None else _by_text(each) for _, each in tokens],
        "text_offset": offsets,
    }
