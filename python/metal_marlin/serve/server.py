"""`metal-marlin serve`: checks the options, loads the model, and serves until a signal ends it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from .. import _core
from ..chat_template import ChatTemplate
from ..errors import InvalidArgumentError, MarlinError, UnsupportedError
from ..text import TextCodec

try:
    import uvicorn

    from . import compare
    from .app import AppOptions, make_app
    from .chat_service import ChatService
    from .engine import Engine
    from .limits import Limits, is_loopback, most_requests
    from .log import logger
except ImportError as error:
    raise UnsupportedError(
        f"serve: needs {error.name}: pip install 'metal-marlin[serve]'"
    ) from error

_KEY_VARIABLE = "METAL_MARLIN_API_KEY"
_JOIN_SECONDS = 10.0
# Texts that run at a time where the scheduler decides.
_MOST_RUNNING = 512


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    directory: Path
    compare: Path | None
    host: str
    port: int
    api_key: str | None
    cors_origins: tuple[str, ...]
    model_name: str
    timeout: float | None
    template: str | None
    recipe: str | None
    scheduler: dict[str, Any]
    as_json: bool
    quiet: bool


def run(
    directory: bytes,
    *,
    open_model: Callable[[Path], Any],
    speculation_of: Callable[[Any], Any],
    print_json: Callable[[str], bool],
    **given: Any,
) -> None:
    """Serves with what the command has parsed. Errors: InvalidArgumentError for options that
    exclude each other or an address that cannot be listened at; as loading; the error that ended
    the engine."""
    options = read_options(directory, **given)
    with listen(options.host, options.port) as listener:
        template = ChatTemplate.find(options.directory, options.template)
        directory_path = options.directory
        if options.recipe is not None:
            from .quantized import quantized_directory

            directory_path = quantized_directory(
                options.directory, options.recipe, quiet=options.quiet
            )
        codec = TextCodec(directory_path)
        model = open_model(directory_path)
        speculation = speculation_of(model)
        # Before the KV cache of the first takes what memory is left.
        second = _second(options, codec, open_model)
        engine = _engine(options, codec, model, speculation)
        service = ChatService(engine, template)
        if service.warning is not None:
            print(service.warning, file=sys.stderr, flush=True)
        app = _app(engine, service, options)
        if second is not None:
            other = ChatService(_engine(options, *second), template)
            scorers = compare.Scorer(model), compare.Scorer(second[1])
            compare.register(app, other, scorers, _name_of(options.compare or Path()))
        set_up_log(options.quiet)
        server = Server(
            app, engine, lambda: _announce(options, model, engine, listener, print_json)
        )
        server.run(sockets=[listener])
        server.join()
    if engine.failure is not None:
        raise engine.failure


def _engine(
    options: Options, codec: TextCodec, model: Any, speculation: Any = None
) -> Engine:
    scheduler = _core.Scheduler(model, **options.scheduler, speculation=speculation)
    return Engine(scheduler, codec, model.info, timeout=options.timeout)


def _second(
    options: Options, codec: TextCodec, open_model: Callable[[Path], Any]
) -> tuple[TextCodec, Any] | None:
    """The model of --compare, with its tokenizer."""
    if options.compare is None:
        return None
    other = TextCodec(options.compare)
    compare.check_same_tokenizer(codec, other, options.compare)
    return other, open_model(options.compare)


def _app(engine: Engine, service: ChatService, options: Options) -> Any:
    running = options.scheduler["max_running"] or _MOST_RUNNING
    limits = Limits(
        options.host,
        options.api_key,
        most_requests(running, options.scheduler["max_waiting"]),
    )
    return make_app(
        engine,
        service,
        AppOptions(
            options.model_name,
            _core.printable(str(options.directory)),
            limits,
            options.cors_origins,
        ),
    )


def read_options(
    directory: bytes,
    *,
    compare: bytes | None,
    host: bytes,
    port: int,
    api_key: bytes | None,
    no_api_key: bool,
    cors_origins: Sequence[bytes],
    model_name: bytes | None,
    timeout: float,
    template_file: bytes | None,
    recipe: bytes | None,
    as_json: bool,
    quiet: bool,
    **scheduler: Any,
) -> Options:
    """The command's options. Errors: InvalidArgumentError naming one."""
    path = Path(os.fsdecode(directory))
    address = os.fsdecode(host)
    known, found = _core.read_environment(_KEY_VARIABLE)
    key = found or None if api_key is None else os.fsdecode(api_key)
    if key is not None and no_api_key:
        raise InvalidArgumentError(f"--no-api-key excludes --api-key and {known}")
    if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
        raise InvalidArgumentError("--api-key: expected printable ASCII characters")
    if key is None and not no_api_key and not is_loopback(address):
        raise InvalidArgumentError(
            f"--host {address}: others reach this address: give --api-key, or --no-api-key to let "
            "everybody use the server"
        )
    name = _name_of(path) if model_name is None else os.fsdecode(model_name)
    if not name.isprintable():  # Names of files may hold bytes that are no text.
        raise InvalidArgumentError(f"--served-model-name: expected printable text, got {name!r}")
    return Options(
        directory=path,
        compare=None if compare is None else Path(os.fsdecode(compare)),
        host=address,
        port=port,
        api_key=key,
        cors_origins=tuple(os.fsdecode(origin) for origin in cors_origins),
        model_name=name,
        timeout=timeout or None,
        template=None if template_file is None else os.fsdecode(template_file),
        recipe=None if recipe is None else os.fsdecode(recipe),
        scheduler=scheduler,
        as_json=as_json,
        quiet=quiet,
    )


def _name_of(path: Path) -> str:
    """The model's name for clients: of the Hub, or its directory's or file's."""
    resolved = Path(os.path.abspath(path))
    for part in resolved.parts:
        if part.startswith("models--"):  # A folder of the Hub's cache.
            return part.removeprefix("models--").replace("--", "/")
    return resolved.name.removesuffix(".gguf").removesuffix(".safetensors")


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound; clients are refused until the server listens at it. Errors:
    InvalidArgumentError naming the option."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidArgumentError(f"--host {host}: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise InvalidArgumentError(f"--host {host} --port {port}: {error.strerror}") from None
    return listener


class Server(uvicorn.Server):
    """Ends when the engine fails, and at the first signal once the requests under way have ended;
    a second signal ends those, too."""

    def __init__(self, app: Any, engine: Engine, announce: Callable[[], object]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
            )
        )
        self._engine, self._announce = engine, announce
        engine.on_failure = self._end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    def _end(self, error: MarlinError) -> None:
        logger.error("no text can be generated any more: %s", error)
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            # Otherwise the lifespan that this cancels logs its traceback.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self.force_exit = True
            return
        logger.info("ending: requests under way go on; a second signal ends them")
        self._engine.draining = True
        self.should_exit = True

    def join(self) -> None:
        """Ends the engine where the server did not, because it was to end at once."""
        self._engine.end(_JOIN_SECONDS)


def set_up_log(quiet: bool) -> None:
    """Writes the log to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for name in (logger.name, "uvicorn.error"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.propagate = False
        log.setLevel(logging.WARNING)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


def _announce(
    options: Options,
    model: Any,
    engine: Engine,
    listener: socket.socket,
    print_json: Callable[[str], bool],
) -> None:
    """Prints where the server is, and what it has loaded."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    info, cache = engine.info, engine.kv_cache
    token_bytes = info["kv_cache_bytes_per_token"]
    if options.as_json:
        print_json(json.dumps({
            "url": url,
            "port": port,
            "model": options.model_name,
            "device": model.device.name,
            "weight_bytes": info["bytes"],
            "context": info["max_positions"],
            "kv_cache_tokens": None if cache is None else cache["tokens"],
            "kv_cache_bytes_per_token": token_bytes,
        }))  # fmt: skip
        return
    size = f"{token_bytes / 1e3:.1f} kB a token"
    if cache is not None:
        size = f"{cache['tokens'] * token_bytes / 1e9:.2f} GB, {cache['tokens']:,} tokens"
    print(
        f"device: {model.device.name}   weights {info['bytes'] / 1e9:.2f} GB   "
        f"KV cache {size}   context {info['max_positions']:,} tokens"
    )
    print(f"{url}   page: /   API: /v1   docs: /docs   metrics: /metrics", flush=True)
