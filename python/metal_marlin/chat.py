"""A conversation with a model, and the terminal of `metal-marlin chat`."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import _core
from ._arrays import call, options
from ._terminal import Terminal
from .chat_template import MISSING, AnyPath, ChatTemplate, check_variables
from .errors import (
    FileError,
    InvalidArgumentError,
    MalformedFileError,
    MarlinError,
    UnsupportedError,
)
from .text import TextCodec

_ROLES = ("system", "user", "assistant", "tool")
_WHOLE = ("top_k", "seed", "max_tokens")  # The settings that are whole numbers.


def find_template(directory: AnyPath, given: AnyPath | None) -> ChatTemplate:
    """A model's templates. Errors: as ChatTemplate.find; UnsupportedError without one."""
    template = ChatTemplate.find(directory, given)
    if template is None:
        raise UnsupportedError(f"{os.fsdecode(directory)}: {MISSING}")
    return template


def parse_variables(text: str | None) -> dict[str, Any]:
    """--chat-template-kwargs."""
    try:
        variables = json.loads(text) if text else {}
    except ValueError as error:
        raise InvalidArgumentError(f"--chat-template-kwargs: {error}") from None
    return check_variables("--chat-template-kwargs", variables, ("self", "messages"))


class Messages:
    """A conversation, and how the next answer is asked for; a subclass gets the answer."""

    unset = "the context"
    """What a setting of None means, for the user."""

    def __init__(self, *, system: str | None, settings: Mapping[str, Any] | None) -> None:
        self.system = system
        self.messages: list[dict[str, Any]] = []
        """Without the system message."""
        self.settings: dict[str, Any] = {"max_tokens": None, **(settings or {})}
        self.last: dict[str, Any] = {}
        """What `answer` returned last."""

    @property
    def context(self) -> int | None:
        """Tokens that the model can attend to; None if that is not known."""
        raise NotImplementedError

    def answer(self, on_text: Callable[[str], object], stop: Callable[[], bool]) -> dict[str, Any]:
        """Answers the last message: appends the answer and returns it with its statistics.

        `on_text` receives the text as it comes; where `stop` returns True the answer ends, and
        keeps what it has. After an error nothing is appended.
        """
        raise NotImplementedError

    def check(self, settings: Mapping[str, Any]) -> None:
        """Errors: InvalidArgumentError for a setting out of range."""
        raise NotImplementedError

    def ask(
        self, text: str, on_text: Callable[[str], object], stop: Callable[[], bool]
    ) -> dict[str, Any]:
        """Appends a message of the user and answers it; after an error the message is gone."""
        self.messages.append({"role": "user", "content": text})
        try:
            return self.answer(on_text, stop)
        except BaseException:
            self.messages.pop()
            raise

    def undo(self) -> bool:
        """Removes the last message of the user and what follows; False if there is none."""
        while self.messages:
            if self.messages.pop()["role"] == "user":
                return True
        return False

    def document(self) -> dict[str, Any]:
        """The conversation as /save writes it."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {"messages": [*system, *self.messages]}

    def load(self, document: Any) -> None:
        """Replaces the messages by a document's, or a list's. Errors: MalformedFileError."""
        messages = document.get("messages") if isinstance(document, dict) else document
        if not isinstance(messages, list):
            raise MalformedFileError('expected {"messages": [...]}')
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") not in _ROLES:
                raise MalformedFileError(f"messages[{i}]: expected a role of {', '.join(_ROLES)}")
        system = bool(messages) and messages[0]["role"] == "system"
        if system and not isinstance(messages[0].get("content"), str):
            raise MalformedFileError("messages[0]: expected a text as content")
        self.system = messages[0]["content"] if system else None
        self.messages = [dict(message) for message in messages[int(system) :]]


class Conversation(Messages):
    """Messages and a model that answers them; its KV cache is kept between answers, so that only
    tokens which the model has not seen are fed."""

    def __init__(
        self,
        model: Any,
        codec: TextCodec,
        template: ChatTemplate,
        *,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        speculation: Any = None,
    ) -> None:
        """`model` is the core's. settings: the fields of _core.TextOptions; a max_tokens of None
        means as many tokens as the context holds. speculation: _core.SpeculationOptions."""
        super().__init__(system=system, settings=settings)
        self._model, self._codec, self._template = model, codec, template
        self._variables = dict(variables or {})
        self._speculation = speculation or _core.SpeculationOptions()
        self._sequence = model.new_sequence()
        self._fed: list[int] = []

    @property
    def context(self) -> int:
        """Tokens that the model can attend to."""
        return int(self._model.info["max_positions"])

    def answer(self, on_text: Callable[[str], object], stop: Callable[[], bool]) -> dict[str, Any]:
        """As Messages.answer. Errors: as rendering and of generating, InvalidArgumentError where
        the conversation exceeds the context."""
        ids = self._encode()
        stream = self._codec.stream(ids)
        pieces: list[str] = []
        stopped = False

        def show(piece: str) -> None:
            pieces.append(piece)
            on_text(piece)

        def on_token(token: int) -> bool:
            nonlocal stopped
            show(stream.add(token))
            stopped = stop()
            return not stopped

        result = self._generate(ids, on_token)
        show(stream.finish())
        if stopped:
            result["stop_reason"] = "interrupted"
        text = "".join(pieces)
        result = {"text": text, **result}
        self.messages.append({"role": "assistant", "content": text})
        self.last = result
        return result

    def check(self, settings: Mapping[str, Any]) -> None:
        """Errors: InvalidArgumentError for a setting out of range."""
        # The core checks the options before it finds that there is nothing to generate.
        call(self._model.generate, [0], self._options({**settings, "max_tokens": 0}))

    def _options(self, settings: Mapping[str, Any]) -> Any:
        return options(_core.TextOptions(), **settings, speculation=self._speculation)

    def _encode(self) -> list[int]:
        if not self.messages:
            raise InvalidArgumentError("there is no message to answer")
        rendered = self._template.render(self.document()["messages"], **self._variables)
        ids = self._codec.encode(rendered, add_special_tokens=False)
        largest = self._model.info["vocab_size"] - 1
        if ids and max(ids) > largest:
            raise MalformedFileError(
                f"the tokenizer gives the token id {max(ids)}, the model has 0..{largest}"
            )
        if len(ids) > self.context:
            raise InvalidArgumentError(
                f"the conversation has {len(ids)} tokens, the context holds {self.context}: "
                "write a shorter message, or make room with /undo or /clear"
            )
        return ids

    def _generate(self, ids: list[int], on_token: Callable[[int], bool]) -> dict[str, Any]:
        known = len(os.path.commonprefix([self._fed, ids[:-1]]))
        try:
            self._sequence.truncate(known)
        except InvalidArgumentError:  # A recurrent state that is not kept.
            known = 0
            self._sequence.truncate(known)
        tokens: list[int] = []

        def callback(token: int) -> bool:
            tokens.append(token)
            return on_token(token)

        settings = dict(self.settings)
        if settings["max_tokens"] is None:
            settings["max_tokens"] = self.context
        text = options(self._options(settings), callback=callback)
        try:
            generated = dict(call(self._model.generate, ids, text, self._sequence))
        except BaseException:
            self._sequence, self._fed = self._model.new_sequence(), []
            raise
        self._fed = (ids + tokens)[: self._sequence.length]
        seconds = generated["decode_seconds"]
        return {
            "token_ids": tokens,
            "stop_reason": generated["stop_reason"],
            "tokens_per_second": (len(tokens) - 1) / seconds if seconds > 0 else 0.0,
            "prompt_tokens": len(ids),
            "cached_tokens": known,
            "prefill_seconds": generated["prefill_seconds"],
            "decode_seconds": seconds,
            "drafts": generated["drafts"],
        }


# The commands of a conversation: arguments, and what each does.
COMMANDS = {
    "help": ("", "lists these commands"),
    "system": ("[TEXT]", "shows the system message, or replaces it; '-' removes it"),
    "set": ("[NAME VALUE]", "shows the settings, or changes one: /set temperature 0.7"),
    "retry": ("", "answers the last message again, with another seed"),
    "undo": ("", "removes the last message and its answer"),
    "clear": ("", "removes all messages but the system's"),
    "save": ("FILE", "writes the conversation as JSON"),
    "load": ("FILE", "reads a conversation that /save has written"),
    "stats": ("", "shows the tokens of the conversation and the speed of the last answer"),
    "exit": ("", "ends the conversation, as Ctrl-D does"),
}
HELP = (
    'A message is a line; several lines are put between lines of """, or all but the last end in '
    "\\.\nA message that begins with / is written with //. Ctrl-C stops an answer."
)


class Chat:
    """Reads messages and commands, and shows answers."""

    def __init__(
        self,
        conversation: Messages,
        terminal: Terminal,
        *,
        stream: bool = True,
        print_json: Callable[[str], bool] | None = None,
    ) -> None:
        self._conversation, self._terminal = conversation, terminal
        self._stream, self._print_json = stream, print_json
        self._retries = 0
        self._file: Path | None = None  # What /save may replace.
        self._ended = False

    def run(self) -> None:
        """Until the input ends. Without a terminal the first error is raised."""
        while not self._ended:
            try:
                message = self._read()
                if message is None:
                    break
                self._take(message)
            except MarlinError as error:
                if not self._terminal.interactive:
                    raise
                self._terminal.say(f"error: {error}")
            except KeyboardInterrupt:
                self._terminal.say("\n/exit or Ctrl-D ends the conversation")

    def _read(self) -> str | None:
        """A message, of several lines where the first begins a block or ends in a backslash."""
        line = self._terminal.read_line("> ")
        if line is None:
            return None
        lines = []
        if line.startswith('"""'):
            line = line[3:]
            while line is not None and not line.endswith('"""'):
                lines.append(line)
                line = self._terminal.read_line("... ")
            if line is None:
                raise InvalidArgumentError('a message begins with """ and does not end with it')
            return "\n".join([*lines, line[:-3]]).strip("\n")
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._terminal.read_line("... ")
        return "\n".join([*lines, line or ""])

    def _take(self, message: str) -> None:
        if message.startswith("//"):
            message = message[1:]
        elif message.startswith("/"):
            word, _, argument = message[1:].partition(" ")
            if word not in COMMANDS:
                raise InvalidArgumentError(_unknown(word))
            argument = argument.strip()
            if argument and not COMMANDS[word][0]:
                raise InvalidArgumentError(f"/{word}: takes no argument, got {argument!r:.40}")
            getattr(self, f"_command_{word}")(argument)
            return
        if message.strip():
            self._retries = 0
            self._answer(lambda *hooks: self._conversation.ask(message, *hooks))

    def _answer(self, start: Callable[..., dict[str, Any]]) -> None:
        streams = self._stream and self._print_json is None
        with _interruptible(self._terminal.interactive) as interrupted:
            result = start(self._terminal.show if streams else lambda piece: None, interrupted)
        if self._print_json is not None:
            self._ended = not self._print_json(json.dumps(result))
            return
        if not self._stream:
            self._terminal.show(result["text"])
        self._terminal.end_answer()
        self._say_cut(result["stop_reason"], _count(result))

    def _say_cut(self, reason: str, count: int) -> None:
        if reason == "max_tokens":
            self._terminal.note(f"the answer is cut after {count} tokens; /set max_tokens N")
        elif reason == "context_full":
            self._terminal.note(
                f"the answer is cut: the context of {self._conversation.context} tokens is full; "
                "make room with /undo or /clear"
            )

    def _command_help(self, _: str) -> None:
        rows = [(f"/{name} {usage}".rstrip(), text) for name, (usage, text) in COMMANDS.items()]
        width = max(len(usage) for usage, _ in rows)
        lines = [f"{usage:<{width}}  {text}" for usage, text in rows]
        self._terminal.say("\n".join([*lines, HELP]))

    def _command_system(self, text: str) -> None:
        if not text:
            self._terminal.say(self._conversation.system or "there is no system message")
            return
        self._conversation.system = None if text == "-" else text

    def _command_set(self, argument: str) -> None:
        settings = self._conversation.settings
        name, _, text = argument.partition(" ")
        if not argument:
            shown = {key: self._conversation.unset if value is None else f"{value:.6g}"
                     for key, value in settings.items()}  # fmt: skip
            self._terminal.say("\n".join(f"{key} {value}" for key, value in shown.items()))
            return
        if name not in settings:
            close = difflib.get_close_matches(name, settings, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f": {', '.join(settings)}"
            raise InvalidArgumentError(f"/set: unknown setting {name!r:.40}{hint}")
        try:
            value: float = int(text) if name in _WHOLE else float(text)
        except ValueError:
            kind = "a whole number" if name in _WHOLE else "a number"
            raise InvalidArgumentError(f"/set {name}: expected {kind}, got {text!r:.40}") from None
        if name == "max_tokens" and value < 1:
            raise InvalidArgumentError(f"/set max_tokens: expected 1 or more, got {value}")
        self._conversation.check({**settings, name: value})
        settings[name] = value

    def _command_retry(self, _: str) -> None:
        conversation = self._conversation
        messages = conversation.messages
        before = list(messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            conversation.messages = before
            raise InvalidArgumentError("/retry: there is no message to answer")
        if conversation.settings.get("temperature", 0) == 0:
            self._terminal.note("temperature is 0: the answer is the same; /set temperature 0.7")
        self._retries += 1
        seed = conversation.settings.get("seed", 0)
        if seed is not None:  # Otherwise every answer has another one.
            conversation.settings["seed"] = seed + self._retries
        try:
            self._answer(conversation.answer)
        except BaseException:
            conversation.messages = before
            raise
        finally:
            conversation.settings["seed"] = seed

    def _command_undo(self, _: str) -> None:
        if not self._conversation.undo():
            raise InvalidArgumentError("/undo: there is no message")

    def _command_clear(self, _: str) -> None:
        self._conversation.messages.clear()

    def _command_save(self, argument: str) -> None:
        path = _path("/save", argument)
        if path.exists() and path != self._file:
            raise InvalidArgumentError(f"/save: {path} exists; give another name, or /load it")
        temporary = path.with_name(path.name + ".partial")
        try:
            text = json.dumps(self._conversation.document(), indent=2, ensure_ascii=False)
            temporary.write_text(text + "\n", encoding="utf-8", errors="replace")
            temporary.replace(path)
        except OSError as error:
            raise FileError(f"/save: {path}: {error.strerror}") from error
        self._file = path

    def _command_load(self, argument: str) -> None:
        path = _path("/load", argument)
        try:
            self._conversation.load(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise FileError(f"/load: {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise MalformedFileError(f"/load: {path}: {error}") from None
        self._file = path
        self._terminal.note(f"{len(self._conversation.messages)} messages")

    def _command_stats(self, _: str) -> None:
        conversation, last = self._conversation, self._conversation.last
        count = len(conversation.messages)
        known = conversation.context is not None
        holds = f"; the context holds {conversation.context} tokens" if known else ""
        self._terminal.say(f"messages {count}{holds}")
        if last:
            tokens = last["prompt_tokens"] + _count(last)
            self._terminal.say(
                f"last answer: {_count(last)} tokens at "
                f"{last['tokens_per_second']:.1f} per second, ended by {last['stop_reason']}; "
                f"conversation {tokens} tokens; prompt {last['prompt_tokens']}, of which "
                f"{last['cached_tokens']} were in the KV cache, in {last['prefill_seconds']:.3f} s"
            )

    def _command_exit(self, _: str) -> None:
        self._ended = True


def _count(result: Mapping[str, Any]) -> int:
    """Tokens of an answer."""
    ids = result.get("token_ids")
    return int(result["completion_tokens"]) if ids is None else len(ids)


def _unknown(word: str) -> str:
    close = difflib.get_close_matches(word, COMMANDS, n=1)
    if close:
        return f"unknown command '/{word:.40}'; did you mean '/{close[0]}'?"
    return f"unknown command '/{word:.40}'; /help lists them, and // begins a message with a slash"


def _path(command: str, argument: str) -> Path:
    try:
        words = shlex.split(argument)
    except ValueError as error:
        raise InvalidArgumentError(f"{command}: {error}") from None
    if len(words) != 1:
        raise InvalidArgumentError(f"{command}: expected one file name, got {len(words)}")
    return Path(words[0]).expanduser()


@contextlib.contextmanager
def _interruptible(interactive: bool) -> Iterator[Callable[[], bool]]:
    """Lets Ctrl-C in a terminal end an answer: the function says whether it was pressed. A second
    one ends the program, as one does where there is no terminal."""
    pressed = False

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    before = signal.signal(signal.SIGINT, press if interactive else signal.SIG_DFL)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def text_argument(argument: bytes | None, name: str) -> str | None:
    try:
        return None if argument is None else argument.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{name}: {error}") from None


def encode_message(
    codec: TextCodec,
    directory: AnyPath,
    message: bytes,
    system: bytes | None,
    template_file: bytes | None,
    variables: bytes | None,
) -> list[int]:
    """The token ids of one message of the user, for `metal-marlin generate --chat`."""
    given = None if template_file is None else os.fsdecode(template_file)
    template = find_template(directory, given)
    messages = [{"role": "user", "content": text_argument(message, "--prompt")}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": text_argument(system, "--system")})
    named = parse_variables(text_argument(variables, "--chat-template-kwargs"))
    return codec.encode(template.render(messages, **named), add_special_tokens=False)


def run(
    codec: TextCodec,
    directory: AnyPath,
    *,
    system: bytes | None,
    template_file: bytes | None,
    variables: bytes | None,
    max_tokens: int | None,
    stream: bool,
    as_json: bool,
    quiet: bool,
    open_model: Callable[[], tuple[Any, dict[str, Any], Any]],
    print_json: Callable[[str], bool],
) -> None:
    """`metal-marlin chat`, with what the command has parsed."""
    given = None if template_file is None else os.fsdecode(template_file)
    template = find_template(directory, given)
    named = parse_variables(text_argument(variables, "--chat-template-kwargs"))
    model, settings, speculation = open_model()
    conversation = Conversation(
        model,
        codec,
        template,
        system=text_argument(system, "--system"),
        variables=named,
        settings={**settings, "max_tokens": max_tokens},
        speculation=speculation,
    )
    talk(conversation, stream=stream, as_json=as_json, quiet=quiet, print_json=print_json)


def talk(
    conversation: Messages,
    *,
    stream: bool,
    as_json: bool,
    quiet: bool,
    print_json: Callable[[str], bool],
) -> None:
    """Holds a conversation on stdin and stdout."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    terminal = make_terminal(interactive=interactive, as_json=as_json, quiet=quiet)
    if interactive:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        context = conversation.context
        holds = "" if context is None else f"context of {context} tokens; "
        terminal.note(f"{holds}/help lists the commands")
    chat = Chat(conversation, terminal, stream=stream, print_json=print_json if as_json else None)
    try:
        chat.run()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone: nobody hears of an error, and the interpreter must not write either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_terminal(*, interactive: bool, as_json: bool, quiet: bool) -> Terminal:
    """The best terminal that the installed packages and the user's terminal allow: a dumb one
    cannot redraw an unfinished answer, so that rich would show it at its end only."""
    if interactive and not as_json and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        with contextlib.suppress(ImportError):
            from ._rich_terminal import RichTerminal

            return RichTerminal([f"/{name}" for name in COMMANDS], quiet=quiet)
    return Terminal(interactive=interactive, as_json=as_json, quiet=quiet)
