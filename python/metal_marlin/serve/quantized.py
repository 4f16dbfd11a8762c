"""Quantized copies of models, which `serve --quantize` makes once and keeps in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import __version__, _core
from ..errors import FileError, InvalidArgumentError, MarlinError
from ..quantization import quantize_model

# Smaller files are known by their bytes, and larger ones by their size and time.
_MOST_READ = 1 << 20


def cache_folder() -> Path:
    """Where quantized models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "metal-marlin" / "quantized"


def find_recipe(text: str) -> Any:
    """A recipe by name or file, or a format such as u4/g128 for all matrices. Errors: as
    MixedPrecisionConfig.from_name_or_file."""
    try:
        return _core.MixedPrecisionConfig.from_name_or_file(text)
    except MarlinError as error:
        if Path(text).exists():
            raise
        try:
            return _core.MixedPrecisionConfig.from_name_or_file(f"uniform:{text}")
        except MarlinError as other:
            found = other if "/" in text else error
            raise InvalidArgumentError(f"--quantize: {found}") from None


def quantized_directory(source: Path, recipe: str, *, quiet: bool) -> Path:
    """The directory of a model in a recipe; quantizes it where the cache does not have it yet.
    Processes that want the same wait for the first. Errors: as quantize_model, FileError."""
    config = find_recipe(recipe)
    key = _key(source, config)
    name = re.sub(r"[^\w.-]+", "-", f"{source.resolve().name}-{recipe}")[:80].strip("-.")
    folder = cache_folder()
    directory = folder / f"{name}-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{name}-{key}.lock", quiet):
            if not directory.exists():
                _say(f"quantizing {source} as {recipe}, to {directory}", quiet)
                quantize_model(
                    source, directory, config, resume=True, progress=None if quiet else True
                )
            else:
                _say(f"quantized as {recipe}: {directory}", quiet)
    except MarlinError:
        raise
    except OSError as error:
        raise FileError(f"{folder}: {error.strerror}") from error
    return directory


def _key(source: Path, config: Any) -> str:
    """Identifies the source's files, the recipe and the program."""
    digest = hashlib.sha256(json.dumps([__version__, config.to_json()]).encode())
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    for file in files:
        if not file.is_file():
            continue
        resolved = file.resolve()
        status = resolved.stat()
        known: list[Any] = [file.name, status.st_size]
        if status.st_size <= _MOST_READ:
            known.append(hashlib.sha256(resolved.read_bytes()).hexdigest())
        elif resolved.parent.name == "blobs":
            # In the cache of the Hub the name of a file is its checksum.
            known.append(resolved.name)
        else:
            known.append(status.st_mtime_ns)
        digest.update(json.dumps(known).encode())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _lock(path: Path, quiet: bool) -> Iterator[None]:
    """Held by one process at a time; the system releases it with the process."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that quantizes ({path})", quiet)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, file=sys.stderr, flush=True)
