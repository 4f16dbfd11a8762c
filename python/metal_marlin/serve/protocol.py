"""The fields of the endpoints' bodies. A field that is not here is refused by its name."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import ApiError, bad_request, unsupported
from .settings import Settings

MOST_COPIES = 8
MOST_STOPS, MOST_STOP_BYTES = 4, 256
MOST_LOGPROBS = 20
_MOST_MESSAGE = 300

# Fields of the APIs that this server does not have; other names are unknown.
_REFUSED = {
    "functions": "is not supported; use tools",
    "function_call": "is not supported; use tool_choice",
    "audio": "is not supported: the model writes text only",
    "prediction": "is not supported",
    "web_search_options": "is not supported",
    "suffix": "is not supported",
}

Text = Annotated[str, Field(max_length=4096)]


class Body(BaseModel):
    """The JSON object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


_Body = TypeVar("_Body", bound=Body)


def parse(kind: type[_Body], content: bytes) -> _Body:
    """A request's body. Errors: ApiError 400 naming the first field that is wrong."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _refusal(kind: type[Body], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=True)[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(("function-", "list[", "str", "int", "constrained", "dict[")):
            path += f".{part}" if path else str(part)
    path = path[:100].encode(errors="backslashreplace").decode()
    if first["type"] == "extra_forbidden":
        if path in _REFUSED:
            return unsupported(path, _REFUSED[path])
        close = difflib.get_close_matches(path, kind.model_fields, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return bad_request(path, f"is not a known field{hint}", "unknown_parameter")
    if first["type"] == "missing":
        return bad_request(path, "is required", "missing_required_parameter")
    message = " ".join(str(first["msg"]).split())[:_MOST_MESSAGE]
    message = message.removeprefix("Value error, ").removeprefix("Input should be ")
    if message[:1].isupper():
        message = message[:1].lower() + message[1:]
    if not path:
        return bad_request(None, f"the body is no JSON object of this endpoint: {message}")
    expected = "" if message.startswith(("expected", "is ")) else "expected "
    return bad_request(path, expected + message)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingBody(Body):
    """The fields that chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_COPIES)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None
    ) = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: Text | None = None
    # They change nothing here.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def settings(self, **more: Any) -> Settings:
        """How the texts are generated. Errors: ApiError naming the field."""
        if self.logit_bias:
            raise unsupported("logit_bias")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "only with stream")
        values: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            # 0 means the most likely token, as the smallest number does.
            "top_p": 2.0**-64 if self.top_p == 0 else self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "seed": self.seed,
            "stop": stop_texts(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": bool(self.ignore_eos),
            "cache_salt": self.cache_salt or "",
        }
        return Settings(**{**values, **more})

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def stop_texts(stop: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    """The stop strings of a request."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MOST_STOPS:
        raise bad_request(name, f"expected at most {MOST_STOPS} texts, got {len(stops)}")
    for text in stops:
        if not text or len(text.encode()) > MOST_STOP_BYTES:
            raise bad_request(
                name, f"expected texts of 1 to {MOST_STOP_BYTES} bytes, got {len(text.encode())}"
            )
    return stops


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[Literal["text"]] | None = None

    def chat_settings(self) -> Settings:
        """`settings`, with what only chat has."""
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise bad_request("max_tokens", "excludes max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs", "only with logprobs")
        return self.settings(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else -1,
        )


Prompt = str | list[int] | list[str] | list[list[int]]


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    def completion_settings(self) -> Settings:
        """`settings`, with what only completions have."""
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of", "other than n is not supported")
        most = 16 if self.max_tokens is None else self.max_tokens
        if most == 0 and not self.echo:
            raise bad_request("max_tokens", "0 only with echo")
        return self.settings(
            max_tokens=most,
            logprobs=-1 if self.logprobs is None else self.logprobs,
            prompt_logprobs=bool(self.echo) and self.logprobs is not None,
        )


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
