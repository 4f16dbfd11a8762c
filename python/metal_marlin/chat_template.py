"""Chat templates: finds a model's, and renders conversations with it as transformers does.

Templates are Jinja programs in files of untrusted models, so they run in a process of their own
(`_template_worker.py`), within limits of time, memory and output.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import marshal
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import _core
from . import _template_worker as worker
from .errors import FileError, InvalidArgumentError, MalformedFileError, UnsupportedError
from .text import _read_file, read_model_file

AnyPath = str | bytes | os.PathLike[Any]
Messages = Sequence[Mapping[str, Any]]
"""A conversation: {"role": "system" | "user" | "assistant" | "tool", "content": ...}, ..."""

MISSING = "no chat template: pass --chat-template FILE, or use generate without --chat"
_FILE = "chat_template.jinja"
_MORE_FILES = "additional_chat_templates"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
           "mask_token")  # fmt: skip
# The names under which programs pass the reasoning of an answer; the first is what templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
_MOST_REQUEST_BYTES = 64 << 20
# A worker that starts on a busy machine, or waits for a processor, is not at fault.
_START_SECONDS, _WAIT_SECONDS = 60.0, 30.0
# What a worker needs of the environment; secrets of the program are not among it.
_VARIABLES = ("PATH", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "__PYVENV_LAUNCHER__")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of a model; made by `find`."""

    templates: Mapping[str, str]
    """Jinja texts by their names; a model with one calls it "default"."""
    special_tokens: Mapping[str, str]
    """bos_token, eos_token, ...: variables of every template."""
    source: str
    """Where they are, for messages."""

    @classmethod
    def find(cls, directory: AnyPath, given: AnyPath | None = None) -> ChatTemplate | None:
        """The templates of a model's directory or file, or None if it has none.

        In this order: chat_template.jinja and additional_chat_templates/*.jinja, `chat_template` in
        tokenizer_config.json, the same in the metadata of a GGUF file. `given` takes their place: a
        file, the text of a template, or the name of one of the model's. Errors: FileError,
        MalformedFileError, InvalidArgumentError for a name that the model does not have.
        """
        path = Path(os.fsdecode(directory))
        tokens: dict[str, str] = {}
        found = _in_files(path)
        for name, content in _configs(path, found):
            config = _config(name, content)
            for token in _TOKENS:
                if (text := _token_text(config.get(token))) is not None:
                    tokens.setdefault(token, text)
            for template, text in _in_config(name, config).items():
                found.setdefault(template, (text, name))
        templates = {name: text for name, (text, _) in found.items()}
        if given is not None:
            name, text = _given(given, templates)
            return cls({"default": text}, tokens, name)
        if not templates:
            return None
        sources = sorted({source for _, source in found.values()})
        return cls(templates, tokens, ", ".join(sources))

    def text(self, tools: Sequence[Any] | None = None) -> str:
        """The template of a conversation, with tools or without."""
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            names = ", ".join(sorted(self.templates))
            raise InvalidArgumentError(
                f"chat_template: none of {names} is the default; give one of these names"
            )
        return self.templates[name]

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation, to be encoded without adding special tokens.

        It ends where the answer begins (add_generation_prompt), or within the last message
        (continue_final_message). `tools` are JSON schemas. `variables` are others of the template
        (`enable_thinking=False`). Errors: InvalidArgumentError for messages that the template
        refuses; MalformedFileError, with the line, for a template that is wrong or exceeds the
        limits of time, memory and output; UnsupportedError without jinja2.
        """
        if not messages:
            raise InvalidArgumentError("messages: expected at least one, got none")
        if continue_final_message and add_generation_prompt:
            raise InvalidArgumentError(
                "continue_final_message and add_generation_prompt exclude each other"
            )
        text = self.text(tools)
        try:
            chat = [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
        except RecursionError:
            raise InvalidArgumentError("messages: are nested too deeply") from None
        last = _mark_last(chat) if continue_final_message else ""
        values = {
            **self.special_tokens,
            **_plain("variables", variables),
            "messages": chat,
            "tools": _dicts("tools", tools),
            "documents": _dicts("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        rendered = _render(text, values, self.source)
        return _cut_at_mark(rendered, last) if continue_final_message else rendered


def _in_files(path: Path) -> dict[str, tuple[str, str]]:
    """Templates in files of their own: text and source, by name."""
    found = {}
    content = _read_file(path / _FILE)
    if content is not None:
        found["default"] = (_decoded(path / _FILE, content), _FILE)
    folder = path / _MORE_FILES
    if folder.is_dir():
        _core.check_model_file(path, _MORE_FILES)
        for file in sorted(folder.glob("*.jinja")):
            content = _read_file(file)
            if content is not None:
                name = file.name.removesuffix(".jinja")
                found[name] = (_decoded(file, content), f"{_MORE_FILES}/{file.name}")
    return found


def _configs(path: Path, found: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Files that name special tokens and templates, in the order of their precedence. `found` gets
    the templates of each before the next."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        content = _read_file(path / name)
        if content is not None:
            yield name, content
    if found:
        return
    contained = read_model_file(path / "tokenizer_config.json", contained=True)
    if contained is not None:
        yield "tokenizer.chat_template", contained


def _config(name: str, content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MalformedFileError(f"{name}: {error}") from None
    if not isinstance(config, dict):
        raise MalformedFileError(f"{name}: expected an object, got {type(config).__name__}")
    return config


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _in_config(name: str, config: dict[str, Any]) -> dict[str, str]:
    """`chat_template`: a text, or a list of named ones."""
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return {"default": value} if value else {}
    try:
        named = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        named = {0: None}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise MalformedFileError(
            f'{name}: chat_template: expected a text, or a list of {{"name", "template"}}'
        )
    return named


def _given(given: AnyPath, templates: Mapping[str, str]) -> tuple[str, str]:
    """Source and text of the template that a caller asks for."""
    name = os.fsdecode(given)
    if isinstance(given, str) and given in templates:
        return given, templates[given]
    if isinstance(given, str) and ("{" in given or "\n" in given):
        return "chat_template", given
    path = Path(name)
    try:
        is_file = path.is_file()
    except OSError:  # A text that is too long for a name.
        is_file = False
    if not is_file:
        name = name if len(name) <= 200 else f"{name[:200]}..."
        names = f"; the model's own are {', '.join(sorted(templates))}" if templates else ""
        raise FileError(f"chat template: {name}: no such file{names}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    return path.name, _decoded(path, content)


def _decoded(path: Path, content: bytes) -> str:
    try:
        # As a file opened for text, whose line ends are "\n".
        return content.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise MalformedFileError(f"{path}: {error}") from None


def check_variables(name: str, variables: Any, taken: Sequence[str]) -> dict[str, Any]:
    """Further variables of a template, by names that are not `taken`."""
    if not isinstance(variables, Mapping):
        raise InvalidArgumentError(f"{name}: expected an object, got {type(variables).__name__}")
    for key in variables:
        if not isinstance(key, str) or key in taken:
            raise InvalidArgumentError(f"{name}: cannot set {key!r:.40}")
    return dict(variables)


def _plain(name: str, value: Any) -> Any:
    """A value of JSON's types: templates get no objects with methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # Subclasses may have methods of their own.
        if isinstance(value, kind):
            return str.__str__(value) if kind is str else kind(value)
    if isinstance(value, np.generic):
        return _plain(name, value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif callable(getattr(value, "model_dump", None)):  # What pydantic's models have.
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {_plain(name, key): _plain(f"{name}.{key}", value[key]) for key in value}
    if isinstance(value, list | tuple):
        items = [_plain(f"{name}[{i}]", item) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise InvalidArgumentError(
        f"{name}: expected values that JSON has, got {type(value).__name__}"
    )


def _dicts(name: str, values: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    plain = [_plain(f"{name}[{i}]", value) for i, value in enumerate(values)]
    for i, value in enumerate(plain):
        if not isinstance(value, dict):
            raise InvalidArgumentError(f"{name}[{i}]: expected a dict, got {value!r:.40}")
    return plain


def _message(name: str, message: Any) -> dict[str, Any]:
    """A message as templates expect it: without keys that are None, reasoning under its names."""
    plain = _plain(name, message)
    if not isinstance(plain, dict):
        raise InvalidArgumentError(
            f'{name}: expected {{"role": ..., "content": ...}}, got {message!r:.40}'
        )
    plain = {key: value for key, value in plain.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _mark_last(chat: list[dict[str, Any]]) -> str:
    """Appends a mark to the last message's text, and returns that text."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUED
        return content
    for block in reversed(content if isinstance(content, list | tuple) else ()):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            text: str = block["text"]
            block["text"] = text + _CONTINUED
            return text
    raise InvalidArgumentError("continue_final_message: the last message has no text")


def _cut_at_mark(rendered: str, last: str) -> str:
    """The text up to the mark; a template that trims messages has cut its space."""
    mark = _CONTINUED.strip()
    at = rendered.rfind(mark)
    if at < 0 or last.strip() not in rendered:
        raise InvalidArgumentError(
            "continue_final_message: the chat template leaves out the last message, or a part"
        )
    return rendered[:at] if rendered.startswith(_CONTINUED, at) else rendered[:at].rstrip()


class _Worker:
    """The process that renders. Not thread-safe."""

    def __init__(self) -> None:
        if not sys.executable:
            raise UnsupportedError("chat templates need sys.executable, which is not set")
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", worker.__file__, *_WORKER_ARGUMENTS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process.
            )
        except OSError as error:
            raise UnsupportedError(f"chat templates: {sys.executable}: {error}") from error
        # Not the current directory, whose files are not this program's.
        paths = [path for path in sys.path if path]
        answer = self.ask(marshal.dumps(paths), _START_SECONDS)
        if answer == worker.WITHOUT_JINJA:
            self.end()
            raise UnsupportedError("chat templates need jinja2: pip install 'jinja2>=3.1.6'")
        if answer != worker.READY:
            self.end()
            raise UnsupportedError("chat templates: the process that renders them does not start")

    def ask(self, request: bytes, seconds: float) -> bytes | None:
        """The answer to a frame; None if the process ended, or takes longer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        end = time.monotonic() + seconds
        try:
            worker.write_frame(self._process.stdin.fileno(), request)
            length = struct.unpack(">I", self._read(4, end))[0]
            if length > worker.OUTPUT_LIMIT + 1:
                return None
            return self._read(length, end)
        except (OSError, EOFError):
            return None

    def _read(self, count: int, end: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        data = bytearray()
        while len(data) < count:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1e3):
                raise EOFError
            piece = os.read(descriptor, count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def kill(self) -> None:
        """Ends the process without waiting for it to end itself."""
        self._process.kill()
        self.end()

    def end(self) -> int:
        """Ends the process; returns its exit code, or minus the signal that had ended it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # One that closed its pipe is about to end.
            self._process.wait(0.5)
        self._process.kill()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return code


_WORKER_ARGUMENTS: list[str] = []
_lock = threading.Lock()
_running: _Worker | None = None


def _forget() -> None:
    """A child of this process must not use its worker."""
    global _lock, _running
    _lock, _running = threading.Lock(), None


def _end() -> None:
    global _running
    if _running is not None:
        _running.kill()
        _running = None


os.register_at_fork(after_in_child=_forget)
atexit.register(_end)


def _render(text: str, variables: dict[str, Any], source: str) -> str:
    """The worker's text; starts one where none runs."""
    global _running
    try:
        request = marshal.dumps((text, variables))
    except ValueError as error:
        raise InvalidArgumentError(f"messages: {error}") from None
    if len(request) > _MOST_REQUEST_BYTES:
        raise InvalidArgumentError(
            f"messages: {len(request)} bytes, at most {_MOST_REQUEST_BYTES} are supported"
        )
    with _lock:
        if _running is None:
            _running = _Worker()
        process, _running = _running, None
        try:
            answer = process.ask(request, _WAIT_SECONDS)
        except BaseException:
            # Ctrl-C: its answer, which comes later, must not be that to another request.
            process.kill()
            raise
        code = 0
        if answer is None:
            code = process.end()
        else:
            _running = process
    if answer is not None and answer[:1] == worker.TEXT:
        return answer[1:].decode(errors="replace")
    raise _failure(answer or b"", code, source)


def _failure(answer: bytes, code: int, source: str) -> Exception:
    """The exception for an answer that is no text, or for how the worker ended."""
    kind = answer[:1]
    words = " ".join(answer[1:].decode(errors="replace").split())
    message = _core.printable(words[:500])
    if kind == worker.REFUSED:
        return InvalidArgumentError(f"messages: the chat template refuses them: {message}")
    if kind == worker.ERROR:
        return MalformedFileError(f"{source}: {message}")
    if kind == worker.TOO_LONG:
        reason = f"makes a text of more than {worker.OUTPUT_LIMIT >> 20} MiB"
    elif kind == worker.OUT_OF_MEMORY or code == worker.MEMORY_EXIT:
        reason = f"needs more than {worker.MEMORY_LIMIT >> 20} MiB"
    elif code == -signal.SIGPROF:
        reason = f"takes longer than {worker.TIME_LIMIT:.0f} s"
    else:
        reason = f"ended the process that renders it (exit code {code})"
    return MalformedFileError(f"{source}: the template {reason}")
