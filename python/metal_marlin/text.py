"""Text to tokens and back, with the tokenizer of a model's directory."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from . import _core
from .errors import FileError, InvalidArgumentError, MalformedFileError, UnsupportedError

_T = TypeVar("_T")

# How much longer a tokenizer's own rules may make a text before it is cut into tokens. The rules of
# models insert a character here and there; a chain of replacements can ask for all memory.
_MOST_GROWTH = 64
_MOST_TOKEN_ID = 2**31 - 1
# Post-processors that add no tokens: a sequence of none, and those that change offsets only.
_WITHOUT_TOKENS = (None, "ByteLevel")
# Published files are smaller. The parser has no limit of its own and can exhaust the memory.
_MOST_FILE_BYTES = 64 << 20


def _read_file(path: Path) -> bytes | None:
    """A file of a model's directory; None if it does not exist."""
    if path.parent.is_dir():
        _core.check_model_file(path.parent, path.name)
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_FILE_BYTES + 1)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    if len(content) > _MOST_FILE_BYTES:
        raise MalformedFileError(
            f"{path}: {path.stat().st_size} bytes, at most {_MOST_FILE_BYTES} are supported"
        )
    return content


def read_model_file(path: Path, *, contained: bool = False) -> bytes | None:
    """The file of a directory, or else (contained: only) what a model's own file holds in its
    place; None if there is neither."""
    content = None if contained else _read_file(path)
    if content is not None or not (path.parent.is_file() or any(path.parent.glob("*.gguf"))):
        return content
    found = _core.Checkpoint(path.parent).read_file(path.name)
    return found if isinstance(found, bytes) else None


def _read_tokenizer(path: Path) -> bytes:
    content = read_model_file(path)
    if content is None:
        if not path.parent.exists():
            raise FileError(f"{path.parent}: no such file or directory")
        raise FileError(f"{path}: no tokenizer; token ids can be used instead")
    return content


class TextCodec:
    """The tokenizer.json of a model. Nothing is cut or padded.

    `quiet` keeps what the library prints on its own about its failures from the standard error,
    for programs that print the error themselves; it moves a descriptor of the whole process.
    """

    def __init__(self, directory: str | bytes | os.PathLike[Any], *, quiet: bool = False) -> None:
        self._path = Path(os.fsdecode(directory)) / "tokenizer.json"
        self._quiet = quiet
        content = _read_tokenizer(self._path)
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UnsupportedError("text needs the tokenizers package: pip install it") from error
        self._tokenizer = self._call(lambda: Tokenizer.from_buffer(content))
        # A file says how its training batches were cut and filled up; a text here is one whole.
        self._call(self._tokenizer.no_truncation)
        self._call(self._tokenizer.no_padding)
        self._check_growth()
        self.vocab_size = int(
            self._call(lambda: self._tokenizer.get_vocab_size(with_added_tokens=True))
        )
        """Tokens, added ones included. A model may have fewer, or more."""
        self._around = self._special_tokens()

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """The ids before and after a text that tokenizer_config.json asks for, where no template in
        tokenizer.json says what is added."""
        processor = self._tokenizer.post_processor
        state = {} if processor is None else json.loads(self._call(processor.__getstate__))
        parts = state.get("processors", [state])
        content = _read_file(self._path.with_name("tokenizer_config.json"))
        if content is None or any(part.get("type") not in _WITHOUT_TOKENS for part in parts):
            return [], []
        try:
            config = json.loads(content)
        except ValueError as error:
            path = self._path.with_name("tokenizer_config.json")
            raise MalformedFileError(f"{path}: {error}") from None
        return self._named_token(config, "bos"), self._named_token(config, "eos")

    def _named_token(self, config: Any, name: str) -> list[int]:
        """The id of a token that is added, in a list; an empty one if it is not."""
        if not isinstance(config, dict) or config.get(f"add_{name}_token") is not True:
            return []
        token = config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        number = self._tokenizer.token_to_id(text) if isinstance(text, str) else None
        return [] if number is None else [number]

    def _call(self, body: Callable[[], _T]) -> _T:
        """Calls into the library, whose panics are no Exception; they say that a file is wrong."""
        with _without_stderr() if self._quiet else contextlib.nullcontext():
            try:
                return body()
            except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
                raise
            except BaseException as error:
                text = " ".join(str(error).split())[:500]
                raise MalformedFileError(f"{self._path}: {text}") from None

    def _check_growth(self) -> None:
        """Refuses rules that could make a text many times longer."""
        growth = 1.0
        for part in (self._tokenizer.normalizer, self._tokenizer.post_processor):
            if part is not None:
                growth *= _growth(json.loads(self._call(part.__getstate__)))
        if growth == 0:
            raise MalformedFileError(f"{self._path}: its template leaves out the text")
        if growth > _MOST_GROWTH:
            raise MalformedFileError(
                f"{self._path}: its rules may make a text {growth:.0f} times longer, "
                f"at most {_MOST_GROWTH} are allowed"
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, with the special tokens that the tokenizer adds to one (BOS)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"text: {error}") from None
        encoded = self._call(
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )
        ids = list(encoded.ids)
        if add_special_tokens:
            before, after = self._around
            ids = before + ids + after
        if ids and not 0 <= max(ids) <= _MOST_TOKEN_ID:
            raise MalformedFileError(
                f"{self._path}: the token id {max(ids)}, at most {_MOST_TOKEN_ID} is supported"
            )
        return ids

    def encode_bytes(self, text: bytes, add_special_tokens: bool = True) -> list[int]:
        """The token ids of UTF-8 text."""
        try:
            return self.encode(text.decode("utf-8"), add_special_tokens)
        except UnicodeDecodeError as error:
            raise MalformedFileError(str(error)) from None

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no character become U+FFFD."""
        for token in tokens:
            if not 0 <= token <= _MOST_TOKEN_ID:
                raise InvalidArgumentError(
                    f"tokens: expected 0..{_MOST_TOKEN_ID}, got {token}"
                )
        return str(
            self._call(
                lambda: self._tokenizer.decode(
                    list(tokens), skip_special_tokens=skip_special_tokens
                )
            )
        )

    def token(self, number: int) -> str | None:
        """A token as the vocabulary writes it; None for a number that is none."""
        text = self._call(lambda: self._tokenizer.id_to_token(number))
        return text if isinstance(text, str) else None

    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that texts leave out, by their names."""
        added = self._call(self._tokenizer.get_added_tokens_decoder)
        return {token.content: number for number, token in added.items() if token.special}

    def vocabulary(self) -> dict[int, str]:
        """All tokens by number, as the vocabulary writes them."""
        found = self._call(lambda: self._tokenizer.get_vocab(with_added_tokens=True))
        return {number: text for text, number in found.items()}

    def check_same(self, name: str, other: TextCodec, path: Path | str) -> None:
        """Errors: InvalidArgumentError naming the first token that is another one in `other`, the
        tokenizer of `path`."""
        own, others = self.vocabulary(), other.vocabulary()
        if own == others:
            return
        number = min(i for i in {*own, *others} if own.get(i) != others.get(i))
        raise InvalidArgumentError(
            f"{name}: {path} has another tokenizer: token {number} is "
            f"{others.get(number)!r}, expected {own.get(number)!r}"
        )

    def document(self) -> str:
        """The text of tokenizer.json, of a tokenizer that cuts and pads nothing."""
        return str(self._call(self._tokenizer.to_str))

    def has_byte_level(self) -> bool:
        """Whether the vocabulary writes bytes as the characters of GPT-2's table."""
        decoder = self._tokenizer.decoder
        return decoder is not None and b"ByteLevel" in self._call(decoder.__getstate__)

    def continuation(
        self, prompt: Sequence[int], tokens: Sequence[int], skip_special_tokens: bool = True
    ) -> str:
        """The text that tokens add to a prompt's: the beginning that both share is left out."""
        before = self.decode(prompt, skip_special_tokens)
        after = self.decode([*prompt, *tokens], skip_special_tokens)
        return after[len(os.path.commonprefix([before, after])) :]

    def stream(self, prompt: Sequence[int], skip_special_tokens: bool = True) -> TextStream:
        """The text of tokens that follow a prompt, as they come."""
        return TextStream(self, prompt, skip_special_tokens)

    def _decode_stream(self, ids: list[int], skip_special_tokens: bool) -> Callable[[int], str]:
        """The text of each token that follows `ids`; empty for one that only begins a character.
        Errors, of the function: MalformedFileError for a text that does not extend the last one."""
        from tokenizers.decoders import DecodeStream

        stream = self._call(
            lambda: DecodeStream(ids=ids, skip_special_tokens=skip_special_tokens)
        )
        return lambda token: self._call(lambda: stream.step(self._tokenizer, token)) or ""


class TextStream:
    """The text that tokens add to a prompt's, in pieces; joined, TextCodec.continuation.

    `tokenizers.decoders.DecodeStream` makes the pieces. It has no end, where characters that were
    only begun are due; it repeats the text of a prompt that ends within a character; and it raises
    for decoders that change text which is already there. Then `continuation` makes a piece, and a
    new stream continues after it. Text that was returned and changes later is not taken back.
    """

    def __init__(
        self, codec: TextCodec, prompt: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._codec, self._skip = codec, skip_special_tokens
        self._prompt = list(prompt)
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._step: Callable[[int], str] | None = None
        self._held = False

    def add(self, token: int) -> str:
        """The text that a token adds, once its characters are complete; otherwise nothing."""
        self._tokens.append(token)
        piece = ""
        if self._step is not None:
            try:
                piece = self._step(token)
            except MalformedFileError:
                self._step = None
        if self._step is None:
            piece = self._restart()
        return self._take(piece)

    def finish(self) -> str:
        """The text held back: incomplete characters, as U+FFFD."""
        return self._take(self._missing()) if self._held else ""

    def _take(self, piece: str) -> str:
        self._held = not piece
        self._pieces.append(piece)
        return piece

    def _missing(self) -> str:
        """The end of the text, which the pieces lack."""
        shown = "".join(self._pieces)
        whole = self._codec.continuation(self._prompt, self._tokens, self._skip)
        return whole[len(os.path.commonprefix([shown, whole])) :]

    def _restart(self) -> str:
        """The next piece without DecodeStream, which continues after it."""
        ids = [*self._prompt, *self._tokens]
        # A stream that begins within a character would return its context, too.
        if self._codec.decode(ids, self._skip).endswith("\ufffd"):
            return ""
        self._step = self._codec._decode_stream(ids, self._skip)
        return self._missing()


def _growth(rules: Any) -> float:
    """How many times longer rules can make a text: an upper bound for those that insert.

    0 where a template has no place for it.
    """
    kind = rules.get("type") if isinstance(rules, dict) else None
    if kind == "Sequence":
        product = 1.0
        for part in rules.get("normalizers") or rules.get("processors") or ():
            product *= _growth(part)
        return product
    if kind == "Replace":
        pattern, content = rules.get("pattern", {}), len(rules.get("content", ""))
        literal = pattern.get("String", "") if isinstance(pattern, dict) else ""
        # A literal is replaced where it stands; an expression may match nothing, everywhere.
        return max(1.0, content / len(literal)) if literal else 1.0 + content
    if kind == "Prepend":
        return 1.0 + len(rules.get("prepend", ""))
    if kind == "TemplateProcessing":
        texts = [part for part in rules.get("single", ()) if "Sequence" in part]
        return float(len(texts))
    return 1.0


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discards everything written to the file descriptor of stderr."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
