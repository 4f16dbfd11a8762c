"""What the tests of the server share: a model that can chat, a scheduler for errors that a real one
does not make on demand, and servers, in this process and in one of their own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from metal_marlin import _core
from metal_marlin.chat_template import ChatTemplate
from metal_marlin.errors import QueueFullError
from metal_marlin.models import Model, load
from metal_marlin.serve.app import AppOptions, make_app
from metal_marlin.serve.chat_service import ChatService
from metal_marlin.serve.engine import Engine
from metal_marlin.text import TextCodec

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
COMMAND = [sys.executable, "-m", "metal_marlin.cli"]
TEMPLATE = (
    "{{ start }}{% for m in messages %}[{{ m.role }}]"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "And God said"}
NAME = "tiny"


def make_folder(directory: Path) -> Path:
    """The sample model with a chat template."""
    folder = Path(shutil.copytree(SAMPLE, directory / NAME))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def open_model(folder: Path) -> Model:
    """On the CPU, where a text does not depend on what else runs."""
    return load(folder, device="cpu", exact=True, batch_invariant=True, verbose=False)


class FakeScheduler:
    """A scheduler that does what a test says, with the interface of _core.Scheduler.

    Each step gives every running request the next of `tokens`, which repeat. `failure` is raised by
    the next step, and `error` ends the next request.
    """

    def __init__(self, tokens: list[int], *, most: int = 256) -> None:
        self.tokens, self.most = tokens, most
        self.submitted: dict[int, Any] = {}
        self.cancelled: list[int] = []
        self.masks: dict[int, int] = {}
        self.failure: Exception | None = None
        self.error: Exception | None = None
        self.reason = "max_tokens"
        self.drafts = (0, 0)
        """Tokens guessed and accepted of every text."""
        self.go = threading.Event()
        """Cleared while no pass is to be made."""
        self.go.set()
        self.has_submitted, self.has_cancelled = threading.Event(), threading.Event()
        self._ids = itertools.count()
        self._running: dict[int, list[int]] = {}
        self._condition = threading.Condition()

    def submit(self, prompt: list[int], options: Any, **more: Any) -> int:
        with self._condition:
            if len(self._running) >= self.most:
                raise QueueFullError(f"{self.most} requests wait already")
            number = next(self._ids)
            self.submitted[number] = SimpleNamespace(prompt=prompt, options=options, **more)
            self._running[number] = []
            self._condition.notify()
            self.has_submitted.set()
            return number

    def cancel(self, number: int) -> None:
        with self._condition:
            self.cancelled.append(number)
            self._running.pop(number, None)
            self.has_cancelled.set()

    def set_allowed(self, number: int, mask: Any) -> None:
        self.masks[number] = self.masks.get(number, 0) + 1

    def wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def step(self, idle: float) -> list[Any]:
        if not self.go.wait(0.001):
            return []
        with self._condition:
            if not self._running:
                self._condition.wait(0.01)
            if self.failure is not None:
                raise self.failure
            return [self._event(number) for number in list(self._running)]

    def _event(self, number: int) -> Any:
        made, asked = self._running[number], self.submitted[number]
        token = self.tokens[len(made) % len(self.tokens)]
        made.append(token)
        ended = self.reason if len(made) == asked.options.max_tokens else None
        if self.error is not None:
            ended = "error"
        error, self.error = self.error, None
        if ended:
            del self._running[number]
        return SimpleNamespace(
            id=number, tokens=[token], ended=ended, error=error, cached_tokens=0,
            drafted=self.drafts[0], accepted=self.drafts[1],
            logprobs=[(-0.5, [(token, -0.5)] * asked.logprobs)] if asked.logprobs >= 0 else [],
            prompt_logprobs=[],
        )  # fmt: skip

    @property
    def statistics(self) -> dict[str, int]:
        names = ("waiting", "pages_used", "pages_cached", "page_tokens", "prompt_tokens",
                 "cached_tokens", "generated_tokens", "draft_tokens", "accepted_tokens",
                 "put_back")  # fmt: skip
        return {"running": len(self._running), "pages": 64, "page_groups": 1,
                **dict.fromkeys(names, 0)}  # fmt: skip


def make_engine(model: Model, scheduler: Any = None, **options: Any) -> Engine:
    """An engine of a model; `scheduler` takes the place of the real one."""
    if scheduler is None:
        scheduler = _core.Scheduler(model._core)
    return Engine(scheduler, TextCodec(model.path), model.info, **options)


def app_of(engine: Engine, folder: Path, template: Path | None = None, **options: Any) -> Any:
    """The app of an engine; `template` takes the place of the folder's."""
    service = ChatService(engine, ChatTemplate.find(folder, template))
    return make_app(engine, service, AppOptions(NAME, **options))


@contextlib.contextmanager
def served(app: Any) -> Iterator[httpx.Client]:
    """A client of an app that this process serves, on a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    # A client that does not read is noticed soon.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    port = listener.getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextlib.contextmanager
def process(*words: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """`metal-marlin serve` on a free port, and the document that it prints at the start. Its log
    goes to a file, since a pipe that is not read would stop the server once it is full."""
    command = [*COMMAND, "serve", *map(str, words), "--port", "0", "--json"]
    with (
        tempfile.NamedTemporaryFile("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True,
                         env={**os.environ, **environment}) as running,
        open(log.name) as running.stderr,
    ):  # fmt: skip
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            assert line, running.stderr.read()
            yield running, json.loads(line)
        finally:
            running.kill()


def events(text: str) -> list[Any]:
    """The documents of a stream of events, without the last, [DONE]."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
