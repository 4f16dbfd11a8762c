"""Commands of metal-marlin in this process: the same code, with a document instead of a text."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from . import _core
from ._arrays import call
from ._core import MixedPrecisionConfig
from .errors import InvalidArgumentError, MarlinError
from .hub import resolve

AnyPath = str | bytes | os.PathLike[Any]
Progress = bool | Callable[[int, int], object] | None

# Arguments of functions that options of the command have other names for.
_OPTIONS = {"shard_bytes": "shard-size"}


def path_bytes(name: str, path: Any) -> bytes:
    """A path as the system's bytes. Errors: InvalidArgumentError for what is no path."""
    try:
        encoded = os.fsencode(path)
    except (TypeError, UnicodeError):
        raise InvalidArgumentError(
            f"{name}: expected a path of str, bytes or os.PathLike, got {type(path).__name__}"
        ) from None
    if b"\0" in encoded:  # Where the system would end the path.
        raise InvalidArgumentError(f"{name}: a path cannot hold a NUL, got {path!r:.80}")
    return encoded


def path_text(path: AnyPath) -> str:
    """A path as text, for results: JSON has no bytes that are not UTF-8."""
    return os.fsdecode(path)


def run_command(
    command: str, paths: dict[str, AnyPath], progress: Progress = None, **options: Any
) -> dict[str, Any]:
    """The JSON document of a command. `paths` are its positional arguments by their names.

    Options are None (left out), True and False (flags), or values. Errors: the command's, with the
    names of the options as the function's arguments.
    """
    words = [command.encode(), b"--json"]
    for name, given in options.items():
        value = given.item() if isinstance(given, np.generic) else given
        if value in ("", b""):  # The command would take the next word for the value.
            raise InvalidArgumentError(f"{name}: expected a value, got {value!r}")
        option = f"--{_OPTIONS.get(name, name.replace('_', '-'))}"
        if value is True:
            words.append(option.encode())
        elif value is not None and value is not False:
            words.append(f"{option}=".encode() + path_bytes(name, _text(value)))
    words.append(b"--")
    words += [path_bytes(name, path) for name, path in paths.items()]
    with listening(progress, command) as listener:
        try:
            document = call(_core.run_document, words, resolve, listener)
        except MarlinError as error:
            raise type(error)(_with_names(str(error), options)) from None
    return dict(document)


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) else value


def _with_names(message: str, options: dict[str, Any]) -> str:
    """A message of the command that speaks of arguments instead of options."""
    for name in options:
        option = _OPTIONS.get(name, name.replace("_", "-"))
        message = re.sub(rf"--{option}(?![\w-])", name, message)
    return message


@contextlib.contextmanager
def recipe_path(recipe: MixedPrecisionConfig | AnyPath | None) -> Iterator[AnyPath | None]:
    """The value of the command's --recipe: a name, or a file."""
    if not isinstance(recipe, MixedPrecisionConfig):
        yield recipe
        return
    with TemporaryDirectory(prefix="metal-marlin-") as folder:
        path = Path(folder) / "recipe.json"
        path.write_text(recipe.to_json(), encoding="utf-8")
        yield path


@contextlib.contextmanager
def listening(progress: Progress, label: str) -> Iterator[Callable[[int, int], object] | None]:
    """The function that hears (done, total): the caller's, or for True a bar's."""
    if progress is None or isinstance(progress, bool):
        if not progress:
            yield None
            return
    elif callable(progress):
        yield progress
        return
    else:
        raise InvalidArgumentError(
            f"progress: expected True or a function of (done, total), got {progress!r}"
        )
    from tqdm.auto import tqdm

    # In percent: commands count bytes, weights or windows.
    with tqdm(desc=label, total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed}") as bar:

        def show(done: int, total: int) -> None:
            bar.update(100 * done // max(total, 1) - bar.n)

        yield show
