"""`metal-marlin chat --url`: a conversation with a server that has OpenAI's API."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import _core
from .chat import Messages, parse_variables, talk, text_argument
from .errors import FileError, InvalidArgumentError, MalformedFileError

_KEY_VARIABLE = "METAL_MARLIN_API_KEY"
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
             "frequency_penalty", "seed")  # fmt: skip
_SENT = ("role", "content", "tool_calls", "tool_call_id", "name")
_CONNECT_SECONDS = 10.0
# How often the user's wish to stop is looked at while the server says nothing.
_POLL_SECONDS = 0.05
_MOST_ERROR_BYTES = 1 << 20
_WORDS = {
    401: "the server wants an API key: --api-key, or METAL_MARLIN_API_KEY",
    403: "the server refuses this API key",
    404: "there is no such path or model",
    429: "the server is busy; try again in a moment",
    503: "the server is not ready",
}


class Server:
    """Requests of one server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url` with or without /v1 at its end. Errors: InvalidArgumentError."""
        self.url = url
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise InvalidArgumentError(f"--url {url}: {error}") from None
        if parts.scheme not in ("http", "https") or not self._host:
            raise InvalidArgumentError(f"--url {url}: expected http://HOST:PORT")
        if parts.query or parts.fragment or parts.username:
            raise InvalidArgumentError(f"--url {url}: expected a path at most after the host")
        self._secure = parts.scheme == "https"
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
                raise InvalidArgumentError("--api-key: expected printable ASCII characters")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> tuple[str, int | None]:
        """The name of the first model, and how many tokens its context holds, if it is said.
        Errors: FileError where the server does not answer, as `request`."""
        with self.request("GET", "/models") as (_, response):
            content = response.read(_MOST_ERROR_BYTES)
        try:
            first = json.loads(content)["data"][0]
            length = first.get("max_model_len")
            return str(first["id"]), length if isinstance(length, int) else None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise MalformedFileError(f"{self.url}/models: no list of models") from None

    @contextlib.contextmanager
    def request(
        self, method: str, path: str, body: Any = None
    ) -> Iterator[tuple[socket.socket, http.client.HTTPResponse]]:
        """The response to a request, and the socket that it comes from. Errors: FileError where
        the server cannot be reached or fails, InvalidArgumentError for what it refuses."""
        connection = self._connection()
        try:
            content = None if body is None else json.dumps(body).encode()
            try:
                connection.connect()
                stream = connection.sock
                stream.settimeout(None)  # An answer may take as long as it takes.
                connection.request(method, self._base + path, content, self._headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise FileError(f"{self.url}: cannot be reached: {_reason(error)}") from None
            if response.status != 200:
                raise self._refusal(response)
            yield stream, response
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._secure:
            return http.client.HTTPSConnection(self._host, self._port, timeout=_CONNECT_SECONDS)
        return http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)

    def _refusal(self, response: http.client.HTTPResponse) -> Exception:
        said = ""
        with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
            document = json.loads(response.read(_MOST_ERROR_BYTES))
            error = document.get("error", document)
            said = str(error.get("message", "")) if isinstance(error, dict) else str(error)
        words = [_WORDS.get(response.status, ""), " ".join(said.split())]
        text = ": ".join(filter(None, words)) or f"the server answers {response.status}"
        if response.status in (400, 401, 403, 404, 413, 422):
            return InvalidArgumentError(f"{self.url}: {text}")
        return FileError(f"{self.url}: {text}")


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class _Events:
    """The documents of a stream, read by a thread, so that a wish to stop is heard at any time."""

    def __init__(self, stream: socket.socket, response: http.client.HTTPResponse) -> None:
        self._stream, self._response = stream, response
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._response:
                self._queue.put(line)
            self._queue.put(None)
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
            self._queue.put(error)

    def next(self) -> bytes | BaseException | None:
        """The next line; None at the end. Raises queue.Empty after a short wait without one."""
        return self._queue.get(timeout=_POLL_SECONDS)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._thread.join()


@dataclass
class _Answer:
    """The part of an answer received so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Takes a chunk and returns what is shown of it: reasoning as models write it."""
        self.usage = chunk.get("usage") or self.usage
        shown = []
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            self.reason = choice.get("finish_reason") or self.reason
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if thought:
                shown.append(thought if self.reasoning else f"<think>\n{thought}")
                self.reasoning.append(thought)
            if delta.get("content"):
                begins = self.reasoning and not self.text
                shown.append(f"\n</think>\n\n{delta['content']}" if begins else delta["content"])
                self.text.append(delta["content"])
            for call in delta.get("tool_calls") or []:
                shown.append(self._add_call(call))
        if shown:
            self.last = time.monotonic()
            self.first = self.first or self.last
        return "".join(shown)

    def _add_call(self, piece: Mapping[str, Any]) -> str:
        function = piece.get("function") or {}
        number = piece.get("index", 0)
        arguments = function.get("arguments") or ""
        if number in self.calls:
            self.calls[number]["function"]["arguments"] += arguments
            return str(arguments)
        name = function.get("name", "")
        self.calls[number] = {"id": piece.get("id", ""), "type": "function",
                              "function": {"name": name, "arguments": arguments}}  # fmt: skip
        return f"\n{name} {arguments}"

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.text)}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = list(self.calls.values())
        return message

    def statistics(self, interrupted: bool, context: int | None) -> dict[str, Any]:
        usage = self.usage
        count = usage.get("completion_tokens") or 0
        prompt = usage.get("prompt_tokens") or 0
        first = (self.first or self.started) - self.started
        decode = (self.last or self.started) - (self.first or self.started)
        reason = {"stop": "stop_token", "length": "max_tokens"}.get(self.reason or "", self.reason)
        if reason == "max_tokens" and context is not None and prompt + count > context:
            reason = "context_full"
        return {
            "stop_reason": "interrupted" if interrupted else reason,
            "completion_tokens": count,
            "tokens_per_second": (count - 1) / decode if count > 1 and decode > 0 else 0.0,
            "prompt_tokens": prompt,
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            "prefill_seconds": first,
            "decode_seconds": decode,
        }


class RemoteConversation(Messages):
    """Messages that a server answers."""

    unset = "the server's default"

    def __init__(
        self,
        server: Server,
        *,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """settings: fields of a request; None is what the server does without."""
        super().__init__(system=system, settings={**dict.fromkeys(_SETTINGS), **(settings or {})})
        self._server, self._variables = server, dict(variables or {})
        self.model, self._context = server.model()

    @property
    def context(self) -> int | None:
        return self._context

    def check(self, settings: Mapping[str, Any]) -> None:
        """Nothing: the server says with the next answer what it does not take."""

    def answer(self, on_text: Callable[[str], object], stop: Callable[[], bool]) -> dict[str, Any]:
        """As Messages.answer. Errors: as Server.request, and FileError where the connection is
        lost before the answer is complete."""
        if not self.messages:
            raise InvalidArgumentError("there is no message to answer")
        answer = _Answer()
        interrupted = False
        with self._server.request("POST", "/chat/completions", self._body()) as (stream, response):
            events = _Events(stream, response)
            try:
                interrupted = self._read(events, answer, on_text, stop)
            finally:
                events.close()
        message = answer.message()
        self.messages.append(message)
        self.last = {"text": message["content"], **answer.statistics(interrupted, self.context)}
        return self.last

    def _body(self) -> dict[str, Any]:
        messages = [
            {key: message[key] for key in _SENT if key in message}
            for message in self.document()["messages"]
        ]
        given = {name: value for name, value in self.settings.items() if value is not None}
        body = {"model": self.model, "messages": messages, "stream": True,
                "stream_options": {"include_usage": True}, **given}  # fmt: skip
        return {**body, "chat_template_kwargs": self._variables} if self._variables else body

    def _read(
        self,
        events: _Events,
        answer: _Answer,
        on_text: Callable[[str], object],
        stop: Callable[[], bool],
    ) -> bool:
        """Reads a stream to its end; True if `stop` ended it."""
        while not stop():
            try:
                line = events.next()
            except queue.Empty:
                continue
            if line is None or isinstance(line, BaseException) or not line.endswith(b"\n"):
                raise FileError(f"{self._server.url}: the connection was lost within the answer")
            data = line.strip()
            if not data.startswith(b"data:"):
                continue
            data = data[5:].strip()
            if data == b"[DONE]":
                return False
            shown = answer.add(self._document(data))
            if shown:
                on_text(shown)
        return True

    def _document(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            raise MalformedFileError(f"{self._server.url}: an event that is no JSON object")
        error = chunk.get("error")
        if error:
            said = error.get("message", error) if isinstance(error, dict) else error
            raise FileError(f"{self._server.url}: {' '.join(str(said).split())}")
        return chunk


def run(
    *,
    url: bytes,
    api_key: bytes | None,
    sampling: bytes,
    system: bytes | None,
    variables: bytes | None,
    max_tokens: int | None,
    **shown: Any,
) -> None:
    """`metal-marlin chat --url`, with what the command has parsed."""
    given = text_argument(api_key, "--api-key")
    known, found = _core.read_environment(_KEY_VARIABLE)
    key = found or None if given is None else given
    named = parse_variables(text_argument(variables, "--chat-template-kwargs"))
    conversation = RemoteConversation(
        Server(text_argument(url, "--url") or "", key),
        system=text_argument(system, "--system"),
        variables=named,
        settings={**json.loads(sampling), "max_tokens": max_tokens},
    )
    talk(conversation, **shown)
