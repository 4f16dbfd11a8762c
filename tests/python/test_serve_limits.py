"""Limits and failures of the server, with a scheduler that fails on demand."""

from __future__ import annotations

import json
import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from metal_marlin.errors import DeviceLostError, InvalidArgumentError, NonFiniteInputError
from metal_marlin.models import Model
from metal_marlin.serve import requests, streams
from metal_marlin.serve.limits import Limits
from metal_marlin.serve.server import listen, read_options
from serving import (
    USER,
    FakeScheduler,
    app_of,
    events,
    make_engine,
    make_folder,
    open_model,
    served,
)

CHAT = "/v1/chat/completions"
BODY = {"messages": [USER], "max_tokens": 4}
STREAM = {**BODY, "stream": True}
SECONDS = 30
Serve = Callable[..., tuple[httpx.Client, FakeScheduler]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("limits"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return open_model(folder)


@pytest.fixture
def serve(folder: Path, model: Model) -> Iterator[Serve]:
    """Starts servers with options of the engine and the app."""
    with ExitStack() as stack:

        def start(timeout: float | None = None, most: int = 256, **options: Any) -> Any:
            scheduler = FakeScheduler([10, 300], most=most)
            stack.callback(scheduler.go.set)
            app = app_of(make_engine(model, scheduler, timeout=timeout), folder, **options)
            return stack.enter_context(served(app)), scheduler

        yield start


def connect(client: httpx.Client) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((client.base_url.host, client.base_url.port))
    return connection


def send(client: httpx.Client, body: dict[str, Any], length: int | None = None) -> socket.socket:
    """A connection over which a request was sent."""
    content = json.dumps(body).encode()
    connection = connect(client)
    connection.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content) if length is None else length}\r\n\r\n".encode() + content
    )
    return connection


def test_a_key(serve: Serve) -> None:
    client, _ = serve(limits=Limits(api_key="secret"))
    wrong: list[dict[bytes, bytes]] = [
        {}, {b"authorization": b"Bearer wrong"}, {b"authorization": b"Basic secret"},
        {b"x-api-key": "\u00e9".encode()}]  # fmt: skip
    for headers in wrong:
        for path in (CHAT, "/metrics", "/v1/models", "/tokenize"):
            answer = client.post(path, json=BODY, headers=headers)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json()["error"]["code"] == "invalid_api_key"
    for given in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
        assert client.post(CHAT, json=BODY, headers=given).status_code == 200
    assert client.get("/health").status_code == 200
    # A key is worth more than the name.
    assert client.get("/health", headers={"host": "other"}).status_code == 200


def test_a_full_queue(serve: Serve) -> None:
    client, scheduler = serve(most=1)
    scheduler.go.clear()
    with send(client, BODY):
        assert scheduler.has_submitted.wait(SECONDS)
        answer = client.post(CHAT, json=BODY)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"
        # All texts of a request or none.
        scheduler.most = 3
        assert client.post(CHAT, json={**BODY, "n": 4}).status_code == 429
        assert sorted(scheduler.cancelled) == [1, 2]


def test_too_many_requests(serve: Serve) -> None:
    client, scheduler = serve(limits=Limits(most_requests=1))
    scheduler.go.clear()
    with send(client, BODY):
        assert scheduler.has_submitted.wait(SECONDS)
        assert client.post(CHAT, json=BODY).status_code == 429
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_a_client_that_goes(serve: Serve, body: dict[str, Any]) -> None:
    client, scheduler = serve()
    scheduler.go.clear()
    with send(client, {**body, "n": 2}) as connection:
        assert scheduler.has_submitted.wait(SECONDS)
        if body is STREAM:
            received = b""
            while b"assistant" not in received:
                received += connection.recv(4096)
    assert scheduler.has_cancelled.wait(SECONDS)
    scheduler.go.set()
    assert client.post(CHAT, json=BODY).status_code == 200
    assert sorted(scheduler.cancelled) == [0, 1]
    assert 'finished_reason="abort"} 2.0' in client.get("/metrics").text


def test_a_request_that_takes_too_long(serve: Serve) -> None:
    client, scheduler = serve(timeout=0.05)
    scheduler.go.clear()
    answer = client.post(CHAT, json=BODY)
    assert answer.status_code == 504 and "longer than 0.05 s" in answer.text
    assert events(client.post(CHAT, json=STREAM).text)[-1]["error"]["code"] == "timeout"
    assert scheduler.cancelled == [0, 1]


def test_a_slow_body(serve: Serve) -> None:
    client, _ = serve(limits=Limits(body_seconds=0.05))
    with send(client, BODY, 10_000) as connection:
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408") and b"longer than 0.05 s" in answer


def test_comments_while_there_is_no_token(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.01)
    client, scheduler = serve()
    scheduler.go.clear()
    with client.stream("POST", CHAT, json=STREAM) as answer:
        for line in answer.iter_lines():
            if line == ": keep-alive":
                scheduler.go.set()
        assert scheduler.go.is_set()


def test_a_client_that_does_not_read(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SEND_SECONDS", 0.05)
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.05)
    logged: queue.Queue[tuple[Any, ...]] = queue.Queue()
    monkeypatch.setattr(requests, "log_answer", lambda *fields: logged.put(fields))
    client, _ = serve()
    # More than the buffers of a connection hold.
    body = {**STREAM, "max_tokens": 200, "logprobs": True, "top_logprobs": 20}
    with send(client, body):
        assert logged.get(timeout=SECONDS)[2] == 499


def test_an_error_of_one_request(serve: Serve) -> None:
    client, scheduler = serve()
    scheduler.error = NonFiniteInputError("logits: NaN")
    answer = client.post(CHAT, json=BODY)
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "logits: NaN"
    scheduler.error = NonFiniteInputError("logits: NaN")
    assert events(client.post(CHAT, json=STREAM).text)[-1]["error"]["message"] == "logits: NaN"
    assert client.post(CHAT, json=BODY).status_code == 200


def test_a_lost_device(serve: Serve) -> None:
    client, scheduler = serve()
    scheduler.go.clear()
    with client.stream("POST", CHAT, json=STREAM) as answer:
        scheduler.failure = DeviceLostError("cuda: the device does not answer")
        scheduler.go.set()
        last = [line for line in answer.iter_lines() if line.startswith("data: {")][-1]
        assert "does not answer" in json.loads(last[6:])["error"]["message"]
    for answer in (client.post(CHAT, json=BODY), client.get("/health")):
        assert answer.status_code == 503 and "does not answer" in answer.text


def test_pages_of_other_origins(serve: Serve) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST",
           "access-control-request-headers": "content-type, authorization"}  # fmt: skip
    client, _ = serve(cors_origins=("https://a.example",), limits=Limits(api_key="k"))
    answer = client.options(CHAT, headers=ask)
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    refused = client.post(CHAT, json=BODY, headers={"origin": "https://a.example"})
    assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
    client, _ = serve()
    assert "access-control-allow-origin" not in client.options(CHAT, headers=ask).headers


def options(**changed: Any) -> Any:
    given: dict[str, Any] = {
        "host": b"127.0.0.1", "port": 0, "api_key": None, "no_api_key": False, "cors_origins": [],
        "model_name": None, "compare": None, "timeout": 0.0, "template_file": None, "recipe": None,
        "as_json": False, "quiet": False}  # fmt: skip
    return read_options(b"models/tiny", **{**given, **changed})


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options().model_name == "tiny" and options(model_name=b"x").model_name == "x"
    for host in (b"0.0.0.0", b"::", b"192.168.1.1", b"example.org"):
        with pytest.raises(InvalidArgumentError, match="--api-key, or --no-api-key"):
            options(host=host)
        assert options(host=host, no_api_key=True).api_key is None
        assert options(host=host, api_key=b"k").api_key == "k"
    for host in (b"localhost", b"::1", b"127.1.2.3"):
        assert options(host=host).api_key is None
    with pytest.raises(InvalidArgumentError, match="excludes"):
        options(api_key=b"k", no_api_key=True)
    monkeypatch.setenv("METAL_MARLIN_API_KEY", "of the environment")
    assert options(host=b"0.0.0.0").api_key == "of the environment"
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match=f"--port {port}"):
            listen("127.0.0.1", port)
    with pytest.raises(InvalidArgumentError, match="--host no.such.host.invalid"):
        listen("no.such.host.invalid", 0)
