"""Models of the Hugging Face Hub in place of paths: "org/name", "org/name@revision" and, for GGUF,
"org/name:Q4_K_M" or "org/name:FILE".

Safetensors or GGUF, JSON, tokenizer, template and licence files are downloaded, into the cache of
huggingface_hub; never pickles, never code.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import re
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from . import _core
from .errors import (
    FileError,
    InvalidArgumentError,
    MalformedFileError,
    MarlinError,
    UnsupportedError,
)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_GGUF_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# What names of GGUF files call their types: Q4_K_M, IQ3_XXS, UD-Q4_K_XL, BF16, MXFP4.
_GGUF_TYPE = re.compile(r"(?:UD-)?(?:I?Q|TQ|MXFP|NVFP|BF|F)\d+\w*", re.IGNORECASE)
_MOST_CHOICES = 24
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The sample model of the project, by its path there, which installed packages have, too.
_SAMPLE = "examples/tiny-qwen3-moe"
_PACKAGE = Path(__file__).parent


def local_path(
    name: Any,
    *,
    part: str = "all",
    offline: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> Any:
    """The path of a model: `name` itself, unless it is text that names a model of the Hub and no
    file or directory; then where the model lies in the cache, after it was downloaded.
    "examples/tiny-qwen3-moe", where there is no such directory, is the package's copy.

    part is "all", "headers" (tensors' names, types and shapes, and config.json) or "config". With
    `offline`, or HF_HUB_OFFLINE, only the cache is used. `quiet` prints nothing; `verbose` prints
    progress to a file or pipe as often as to a terminal. Errors: FileError for a model that cannot
    be found or read, UnsupportedError for one that has only pickles, InvalidArgumentError for one
    of several GGUF files or an unknown revision, MalformedFileError.
    """
    if not isinstance(name, str | bytes) or os.path.lexists(name):
        return name
    if os.fsdecode(name) == _SAMPLE and (_PACKAGE / _SAMPLE).is_dir():
        return _PACKAGE / _SAMPLE
    parts: Any = _core.parse_hub_name(name)
    if parts is None:
        return name
    repository, revision, file = parts
    return _Request(
        os.fsdecode(name), repository, revision, file, part, offline, quiet, verbose
    ).resolve()


def resolve(name: str, part: str, offline: bool, quiet: bool, verbose: bool) -> os.PathLike[str]:
    """The path of a model that a command names."""
    path: os.PathLike[str] = local_path(
        name, part=part, offline=offline, quiet=quiet, verbose=verbose
    )
    return path


@dataclass
class _Files:
    """The files of a model at one commit, and their sizes in bytes."""

    commit: str
    sizes: dict[str, int]

    def here(self) -> list[str]:
        """Those that are in no folder."""
        return [name for name in self.sizes if "/" not in name]


@dataclass
class _Choice:
    """Files to download: small ones, weights, and the one that is the model, if one is."""

    small: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    file: str = ""


@dataclass
class _Request:
    """One model that somebody asked for."""

    name: str
    repository: str
    revision: str
    file: str
    part: str
    offline: bool
    quiet: bool
    verbose: bool

    @property
    def shown(self) -> str:
        """The model with its revision."""
        return f"{self.repository}@{self.revision or 'main'}"

    def resolve(self) -> Path:
        try:
            import huggingface_hub
        except ImportError as error:
            raise UnsupportedError(
                f"{self.name}: no such file or directory; models of the Hub need the "
                "huggingface_hub package: pip install it"
            ) from error
        with _silence(), self._one_line():
            if self.offline or huggingface_hub.constants.HF_HUB_OFFLINE:
                return self._cached("run once without --offline and HF_HUB_OFFLINE")
            try:
                files = self._list()
            except _Unreachable as error:
                return self._without_network(error)
            return self._download(files)

    def _without_network(self, error: _Unreachable) -> Path:
        try:
            path = self._cached("")
        except FileError:
            raise FileError(
                f"{self.name}: no such file or directory, and the Hub cannot be reached: {error}"
            ) from None
        self._say(f"{self.shown}: from the cache, as the Hub cannot be reached")
        return path

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        """Gives errors of the library the types and the form of this package's."""
        from huggingface_hub import constants, utils

        try:
            yield
        except (MarlinError, MemoryError):
            raise
        except utils.GatedRepoError:
            raise FileError(
                f"{self.name}: is gated: accept its terms at {constants.ENDPOINT}/"
                f"{self.repository}, then log in with `hf auth login` or set HF_TOKEN"
            ) from None
        except utils.RepositoryNotFoundError:
            raise FileError(
                f"{self.name}: no such file or directory, and the Hub has no such model, or only "
                "for those who log in with `hf auth login` or set HF_TOKEN"
            ) from None
        except utils.RevisionNotFoundError:
            raise InvalidArgumentError(
                f"{self.name}: {self.repository} has no revision '{self.revision}'"
            ) from None
        except utils.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", "no")
            login = ": log in with `hf auth login` or set HF_TOKEN" if status in (401, 403) else ""
            raise FileError(f"{self.name}: the Hub answered with status {status}{login}") from None
        except Exception as error:
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise FileError(f"{constants.HF_HUB_CACHE}: {os.strerror(errno.ENOSPC)}") from None
            raise FileError(f"{self.name}: cannot be downloaded: {_reason(error)}") from None

    def _list(self) -> _Files:
        """The files that the Hub has."""
        from huggingface_hub import HfApi, utils

        try:
            info = HfApi().model_info(
                self.repository, revision=self.revision or None, files_metadata=True
            )
        except utils.HfHubHTTPError as error:
            if getattr(error.response, "status_code", 0) < 500:
                raise
            raise _Unreachable(f"status {error.response.status_code}") from None
        except Exception as error:
            raise _Unreachable(_reason(error)) from None
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        for file in sizes:
            path = PurePosixPath(file)
            if path.is_absolute() or ".." in path.parts or "\\" in file or not file.isprintable():
                raise MalformedFileError(
                    f"{self.name}: lists the file {file!r}, which is outside of the model"
                )
        commit = info.sha or ""
        if not _COMMIT.fullmatch(commit):
            raise MalformedFileError(f"{self.name}: the Hub names the commit {commit!r}")
        return _Files(commit, sizes)

    def _folder(self) -> Path:
        """The model's folder in the cache."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"models--{self.repository.replace('/', '--')}"

    def _cached(self, advice: str) -> Path:
        """The model as the cache has it. Errors: FileError naming what is missing, and what to
        do."""
        folder = self._folder()
        commit = self.revision if _COMMIT.fullmatch(self.revision) else ""
        reference = folder / "refs" / (self.revision or "main")
        if not commit and reference.is_file():
            commit = reference.read_text().strip()
        snapshot = folder / "snapshots" / commit
        if not commit or not snapshot.is_dir():
            raise FileError(f"{self.name}: is not in the cache {folder.parent}; {advice}")
        found = (path for path in snapshot.rglob("*") if path.is_file())
        sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in found}
        files = _Files(commit, sizes)
        try:
            choice = self._choose(files, lambda name: snapshot / name)
        except (UnsupportedError, MalformedFileError) as error:
            # What else the Hub has is unknown.
            raise FileError(f"{error}; in the cache {snapshot}; {advice}") from None
        return snapshot / choice.file

    def _choose(self, files: _Files, fetch: Callable[[str], Path]) -> _Choice:
        """The files to have; `fetch` gives the path of one."""
        here = files.here()
        safetensors = [name for name in here if name.endswith(".safetensors")]
        if self.file or not safetensors:
            return self._choose_file(files)
        small = [name for name in here if _is_small(name)]
        if self.part == "config" and _CONFIG in here:
            return _Choice(small=[_CONFIG])
        if _SINGLE in here:
            return _Choice(small, [_SINGLE])
        if _INDEX not in here:
            return _Choice(small, safetensors)
        return _Choice(small, self._listed(files, fetch(_INDEX)))

    def _listed(self, files: _Files, index: Path) -> list[str]:
        """The shards that an index lists."""
        try:
            listed = json.loads(index.read_bytes())["weight_map"].values()
            shards = sorted({str(file) for file in listed})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedFileError(
                f"{self.name}: {_INDEX}: {type(error).__name__}: {error}"
            ) from None
        for shard in shards:
            if shard not in files.here() or not shard.endswith(".safetensors"):
                raise MalformedFileError(
                    f"{self.name}: {shard!r}, which {_INDEX} lists, is missing"
                )
        return shards

    def _choose_file(self, files: _Files) -> _Choice:
        """The one file that is the model, or its shards."""
        if self.file.endswith((".safetensors", ".onnx")) and self.file in files.sizes:
            return _Choice([], [self.file], self.file)
        if self.part == "config" and not self.file and _CONFIG in files.sizes:
            return _Choice([_CONFIG])
        choices = _gguf_choices(files.sizes)
        if not choices:
            raise self._no_weights(files)
        names = [name for name in choices if _names(self.file, name)]
        if len(names) != 1:
            types = ", ".join(_gguf_type(name) for name in sorted(choices)[:_MOST_CHOICES])
            more = ", ..." if len(choices) > _MOST_CHOICES else ""
            which = f"'{self.file}' names" if self.file else "has"
            how_many = "several GGUF files" if names else "no GGUF file"
            raise InvalidArgumentError(
                f"{self.name}: {which} {how_many}: name one as {self.repository}:TYPE, "
                f"where TYPE is {types}{more}, or by its file's name"
            )
        for shard in choices[names[0]]:
            if shard not in files.sizes:
                raise MalformedFileError(f"{self.name}: {shard!r} is missing")
        return _Choice([], choices[names[0]], names[0])

    def _no_weights(self, files: _Files) -> MarlinError:
        pickles = sorted(name for name in files.sizes if name.endswith(_PICKLES))
        if pickles and not self.file:
            return UnsupportedError(
                f"{self.name}: has only PyTorch pickles ({pickles[0]}), which are never downloaded "
                "because loading one can run code: convert it to safetensors"
            )
        what = f"no file '{self.file}'" if self.file else "no *.safetensors and no *.gguf"
        return UnsupportedError(f"{self.name}: {what}")

    def _download(self, files: _Files) -> Path:
        """The model in the cache, where what is missing is downloaded to."""
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

        def fetch(name: str, revision: str = files.commit) -> Path:
            return Path(hf_hub_download(self.repository, name, revision=revision))

        def missing(names: Iterable[str]) -> list[str]:
            paths = {
                name: try_to_load_from_cache(self.repository, name, revision=files.commit)
                for name in names
            }
            return [name for name, path in paths.items() if not isinstance(path, str)]

        choice = self._choose(files, fetch)
        wanted = missing([*choice.small, *choice.weights])
        if self.part == "headers" and not choice.file and set(choice.weights) & set(wanted):
            headers = self._headers(files, choice, fetch)
            if headers is not None:
                return headers
        if wanted:
            total = sum(files.sizes[name] for name in wanted)
            cache = constants.HF_HUB_CACHE
            _check_room(Path(cache), total)
            self._say(
                f"downloading {self.shown}: {_count(wanted)}, {shown_size(total)}, to {cache}"
            )
            # Weights come last: where they are, the small files are.
            with _Progress(self._folder() / "blobs", total, self.quiet, self.verbose):
                for name in wanted:
                    fetch(name)
        self._remember(files)
        return self._folder() / "snapshots" / files.commit / choice.file

    def _remember(self, files: _Files) -> None:
        """Writes which commit a branch or tag is, as the library does: for use offline."""
        revision = self.revision or "main"
        if revision == files.commit:
            return
        reference = self._folder() / "refs" / revision
        if reference.is_file() and reference.read_text() == files.commit:
            return
        reference.parent.mkdir(parents=True, exist_ok=True)
        partial = reference.with_name(f".{reference.name}.{os.getpid()}")
        partial.write_text(files.commit)
        partial.replace(reference)

    def _headers(self, files: _Files, choice: _Choice, fetch: Callable[[str], Path]) -> Path | None:
        """A temporary directory with the headers of the weights, whose data are holes; None for
        a quantized model of another program, whose numbers say how its tensors are read."""
        from huggingface_hub import HfApi

        config = fetch(_CONFIG) if _CONFIG in choice.small else None
        if config is not None and _is_foreign(config.read_bytes()):
            return None
        size = shown_size(sum(files.sizes[name] for name in choice.weights))
        self._say(
            f"downloading {self.shown}: config.json and the headers of "
            f"{_count(choice.weights)} ({size})"
        )
        temporary = Path(tempfile.mkdtemp(prefix="metal-marlin-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        directory = temporary / self.repository
        directory.mkdir(parents=True)
        for name in {_CONFIG, _INDEX} & set(choice.small):
            shutil.copyfile(fetch(name), directory / name)
        for name in choice.weights:
            metadata = HfApi().parse_safetensors_file_metadata(
                self.repository, name, revision=files.commit
            )
            _write_header(directory / name, metadata)
        return directory


class _Unreachable(Exception):
    """The Hub does not answer."""


def _reason(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())[:200]
    return text or type(error).__name__


def _is_small(name: str) -> bool:
    """Whether a file belongs to a model and is none of its weights."""
    if name.endswith(".index.json"):
        return name == _INDEX
    return name.endswith(".json") or bool(_core.is_side_file(name))


def _is_foreign(config: bytes) -> bool:
    """Whether a config.json describes a checkpoint that another program quantized."""
    try:
        quantization = json.loads(config).get("quantization_config")
        return quantization is not None and quantization.get("quant_method") != "metal_marlin"
    except (ValueError, AttributeError):
        return True


def _gguf_choices(names: Iterable[str]) -> dict[str, list[str]]:
    """The models in GGUF: the first file of each, and all of them."""
    choices = {}
    for name in names:
        base = name.rpartition("/")[2]
        if not name.endswith(".gguf") or base.startswith("mmproj") or "imatrix" in base:
            continue
        shard = _GGUF_SHARD.search(name)
        if shard is None:
            choices[name] = [name]
        elif int(shard[1]) == 1:
            stem, count = name[: shard.start()], int(shard[2])
            choices[name] = [f"{stem}-{i:05}-of-{shard[2]}.gguf" for i in range(1, count + 1)]
    return choices


def _gguf_type(name: str) -> str:
    """The type of a GGUF file, which tells it from others, or its name."""
    base = name.rpartition("/")[2]
    types = _GGUF_TYPE.findall(_GGUF_SHARD.sub("", base).removesuffix(".gguf"))
    return types[-1] if types else base


def _names(text: str, name: str) -> bool:
    """Whether text is a GGUF file's name, or a whole part of it such as its type."""
    if text in ("", name, name.rpartition("/")[2]):
        return True
    return re.search(rf"(?:^|[-./]){re.escape(text)}(?:[-./]|$)", name, re.IGNORECASE) is not None


def _write_header(path: Path, metadata: Any) -> None:
    """Writes a safetensors file with the header of another, whose data are a hole."""
    header: dict[str, Any] = {"__metadata__": metadata.metadata} if metadata.metadata else {}
    end = 0
    for name, tensor in metadata.tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": list(tensor.data_offsets),
        }
        end = max(end, tensor.data_offsets[1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _count(files: list[str]) -> str:
    return f"{len(files)} file{'s' if len(files) != 1 else ''}"


def shown_size(count: int) -> str:
    """A number of bytes as 1.53 GB."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"


def nearest_folder(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _check_room(cache: Path, total: int) -> None:
    """Raises FileError where a disk has not enough room."""
    free = shutil.disk_usage(nearest_folder(cache)).free
    if free < total:
        raise FileError(
            f"{cache}: has {shown_size(free)} free, the download takes {shown_size(total)}"
        )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps the library's own bars and warnings from stderr."""
    from huggingface_hub import utils

    level = utils.logging.get_verbosity()
    shown = not utils.are_progress_bars_disabled()
    utils.logging.set_verbosity_error()
    if shown:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.logging.set_verbosity(level)
        if shown:
            utils.enable_progress_bars()


class _Progress:
    """Says on stderr how far a download is: a bar on a terminal, otherwise a line every 30 seconds,
    every 5 if verbose. It watches the size of the cache's files, which no version of the library
    reports alike."""

    def __init__(self, blobs: Path, total: int, quiet: bool, verbose: bool) -> None:
        self._blobs, self._total, self._quiet = blobs, max(total, 1), quiet
        self._bar = sys.stderr.isatty()
        self._seconds = 0.2 if self._bar else 5.0 if verbose else 30.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._start, self._before = time.monotonic(), self._bytes()
        if not self._quiet:
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if not self._quiet:
            self._thread.join()
            if self._bar:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _bytes(self) -> int:
        try:
            return sum(entry.stat().st_size for entry in os.scandir(self._blobs))
        except OSError:
            return 0

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            done = min(max((self._bytes() - self._before) / self._total, 0.0), 1.0)
            left = ""
            if done > 0.05:
                seconds = round((time.monotonic() - self._start) * (1 - done) / done)
                left = f", {seconds // 60}:{seconds % 60:02} left"
            if self._bar:
                filled = int(30 * done)
                bar = "#" * filled + "." * (30 - filled)
                text = f"\r\x1b[Kdownload [{bar}] {100 * done:3.0f} %{left}"
            else:
                text = f"download: {100 * done:.0f} %{left}\n"
            print(text, end="", file=sys.stderr, flush=True)
