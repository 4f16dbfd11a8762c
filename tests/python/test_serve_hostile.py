"""Hostile requests: each is answered within limits, the server lives, and every text ends."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from metal_marlin.models import Model
from metal_marlin.serve.limits import Limits
from serving import USER, FakeScheduler, app_of, make_engine, make_folder, open_model, served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SECONDS = 60
# Loops and repeats as its variables say, and shows what real templates show.
TEMPLATE = (
    "{% for i in range(n | default(0)) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    "{{ start }}{% for m in messages %}[{{ m.role }}]{{ m.content.strip() }}"
    "{% if m.reasoning_content %}{{ m.reasoning_content.strip() }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + call.id }}"
    "{% for key, value in call.function.arguments.items() %}{{ key }}{{ value | tojson }}"
    "{% endfor %}{% endfor %}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}"
    "{% for key, value in tool.function.parameters.properties.items() %}{{ key + value.type }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
VALUES: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.5, 1e308, "", "a", "\0", "a" * 5000,
    [], [None], [[]], [1, "a"], ["a"] * 100, {}, {"a": 1}, {"type": "text"}, {"type": []},
    {"role": "user"}, {"": {}}, [{"type": "text", "text": 1}], "\u202e\U0001f600", "{{ 7 * 7 }}",
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
FLAT = {"type": "function", "name": "f", "parameters": {"properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKED = {"role": "assistant", "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "tool_call_id": "c", "content": "a"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [USER, ASKED, ANSWERED], "tools": [TOOL], "tool_choice": "auto", "n": 1,
        "stop": ["a"], "temperature": 1, "seed": 1, "max_tokens": 2, "stream": False,
        "response_format": {"type": "text"}, "chat_template_kwargs": {"start": "a"},
        "stream_options": None, "top_p": 1, "top_k": 1, "min_p": 0, "logprobs": False,
        "top_logprobs": None, "cache_salt": "a", "user": "a", "metadata": {},
        "structured_outputs": None, "reasoning_effort": None, "stop_token_ids": [1],
        "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
        "logit_bias": {}, "parallel_tool_calls": True,
    },
    COMPLETIONS: {
        "prompt": "a", "max_tokens": 2, "n": 1, "best_of": 1, "echo": False, "logprobs": None,
        "stop": "a", "suffix": None,
    },
    RESPONSES: {
        "input": [USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "c", "output": "a"}],
        "instructions": "a", "max_output_tokens": 2, "tools": [FLAT], "tool_choice": "auto",
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "metadata": {},
        "include": [], "store": False, "previous_response_id": None, "top_logprobs": None,
    },
    MESSAGES: {
        "model": "tiny", "max_tokens": 2, "system": "a", "stop_sequences": ["a"], "top_k": 1,
        "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c",
                                          "content": "a"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"properties": {}}}],
        "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "metadata": {},
        "output_config": {"effort": "low"}, "cache_control": {"type": "ephemeral"},
    },
    "/tokenize": {"prompt": "a", "messages": None, "add_special_tokens": True, "tools": None},
    "/detokenize": {"tokens": [1]},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_folder(tmp_path_factory.mktemp("hostile"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return open_model(folder)


@pytest.fixture(scope="module")
def scheduler() -> FakeScheduler:
    return FakeScheduler([10, 300])


@pytest.fixture(scope="module")
def server(model: Model, scheduler: FakeScheduler) -> Iterator[httpx.Client]:
    app = app_of(
        make_engine(model, scheduler), Path(model.path), limits=Limits(body_seconds=1.0)
    )
    with pytest.MonkeyPatch.context() as patch, served(app) as client:
        patch.setattr("metal_marlin.serve.limits._DRAIN_SECONDS", 0.2)
        yield client


@pytest.fixture
def client(server: httpx.Client, scheduler: FakeScheduler) -> Iterator[httpx.Client]:
    """A client of the server, which must answer as before once the test has ended."""
    yield server
    scheduler.go.set()
    answer = server.post(CHAT, json={"messages": [USER], "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    end = time.monotonic() + SECONDS
    while scheduler.statistics["running"] and time.monotonic() < end:
        server.get("/health")
    assert scheduler.statistics["running"] == 0


def check(answer: httpx.Response, *statuses: int) -> None:
    """The answer is one of success, or an error of the client's in one line."""
    if answer.status_code == 200 and not statuses:
        return
    assert answer.status_code in (statuses or range(400, 500)), answer.text
    error = answer.json()["error"]
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 1000
    assert "Traceback" not in answer.text


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value within a document."""
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def replaced(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    copied = document.copy()
    copied[at[0]] = replaced(document[at[0]], at[1:], value)
    return copied


@pytest.mark.parametrize("path", BODIES)
def test_wrong_values(client: httpx.Client, path: str) -> None:
    """Every member of a body, at any depth, with values of every type."""
    body = BODIES[path]
    assert client.post(path, json=body).status_code == 200
    draw = random.Random(path)
    for at in places(body):
        # All values in all places would take minutes.
        for value in draw.sample(VALUES, 3 if at else 12):
            content = json.dumps(replaced(body, at, value)).encode()
            check(client.post(path, content=content, headers={"Content-Type": "application/json"}))


@pytest.mark.parametrize("path", BODIES)
def test_broken_json(client: httpx.Client, path: str) -> None:
    whole = json.dumps(BODIES[path]).encode()
    draw = random.Random(path)
    contents = [
        b"", b"{", b"[]", b"null", b"nan", b"\xff", b"\xef\xbb\xbf{}", b"{}{}", b'{"a":1,"a":2}',
        b'{"messages": "\xed\xa0\x80"}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"input": "\\udfff", "prompt": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000,
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"n": ' + b"9" * 5000 + b"}",
        b'{"temperature": 1e999}', b'{"temperature": NaN}', b'{"\\ud800": 1}', b'{"\\u0000": 1}',
    ]  # fmt: skip
    for _ in range(30):
        mutated = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(mutated))
            mutated[at : at + draw.randint(0, 3)] = bytes([draw.randrange(256)])
        contents.append(bytes(mutated))
    for content in contents:
        check(client.post(path, content=content, headers={"Content-Type": "application/json"}))


def test_large_values(client: httpx.Client) -> None:
    message = {"role": "user", "content": "and " * 1_500_000}
    check(client.post(CHAT, json={"messages": [message]}), 400)
    check(client.post(RESPONSES, json={"input": "a" * 5_000_000}), 400)
    check(client.post(CHAT, json={"messages": [USER] * 100_000}), 400)
    check(client.post(CHAT, json={"messages": [USER], "stop": ["a" * 300]}), 400)
    check(client.post(CHAT, json={"messages": [USER], "stop": ["a"] * 100_000}), 400)
    check(client.post(CHAT, json={"messages": [USER], "n": 10**6}), 400)
    check(client.post(COMPLETIONS, json={"prompt": ["a"] * 100_000}), 400)
    check(client.post(COMPLETIONS, json={"prompt": [[1]] * 2000, "n": 8}), 400)
    check(client.post(COMPLETIONS, json={"prompt": "a", "logprobs": 10**6}), 400)
    check(client.post(CHAT, json={"messages": [USER], "tools": [TOOL] * 10_000}), 400)
    check(client.post(CHAT, json={"messages": [USER], "f" * 1_000_000: 1}), 400)
    check(client.post(MESSAGES, json={"f" * 1_000_000: 1}), 400)
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(90):
        deep = {"type": "object", "properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    check(client.post(CHAT, json={"messages": [USER], "tools": [tool], "max_tokens": 2}))


def test_template_bombs(client: httpx.Client) -> None:
    bombs: list[dict[str, Any]] = [
        {"n": 10**5}, {"n": 10**9}, {"n": "a"}, {"start": "a" * (5 << 20)}, {"messages": []},
        {"self": 1}, {"__class__": "a"}, {"start": {"a": [{}] * 1000}}, {"namespace": 1},
        {"range": 1}, {"raise_exception": None}, {"": 1}, {"n": -1}]  # fmt: skip
    for variables in bombs:
        body = {"messages": [USER], "max_tokens": 2, "chat_template_kwargs": variables}
        check(client.post(CHAT, json=body))
        check(client.post("/tokenize", json={"messages": [USER],
                                             "chat_template_kwargs": variables}))  # fmt: skip


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port), SECONDS)


def status(connection: socket.socket) -> int:
    """The status of an answer; 0 if the connection was closed without one."""
    data = b""
    try:
        while b"\r\n" not in data:
            piece = connection.recv(65536)
            if not piece:
                break
            data += piece
    except ConnectionError:
        pass
    return int(data.split()[1]) if data else 0


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("raw", "statuses"),
    [
        (b"\xff\xfe\r\n\r\n", {400}),
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404}),
        (b"GET /%ff%00%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
        (b"GET /page/../../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
        (b"GET /v1/models/%ed%a0%80 HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
        (b"GET /v1/responses/%ff HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
        (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", {200, 400, 505}),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: a\r\n" * 50_000, {400, 431}),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 500_000, {400, 431}),
        (b"GET /" + b"a" * 500_000, {400, 414, 431}),
        (HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", {400, 413}),
        (HEAD + b"Content-Length: 99999999999\r\n\r\n", {400, 413}),
        (HEAD + b"Content-Length: -1\r\n\r\n", {400}),
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", {400, 408}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", {400}),
        (HEAD + b"Content-Length: 10\r\n\r\n{", {408}),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", {400}),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", {403}),
        (b"GET /health HTTP/1.1\r\n\r\n", {400, 403}),
    ],
)  # fmt: skip
def test_raw_requests(client: httpx.Client, raw: bytes, statuses: set[int]) -> None:
    with connect(client) as connection:
        try:
            connection.sendall(raw)
        except ConnectionError:
            pass
        assert status(connection) in {*statuses, 0}


def test_bodies_without_end(client: httpx.Client) -> None:
    """100 MB that no header announces: 413 long before their end."""
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    with connect(client) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        try:
            for _ in range(100):
                connection.sendall(chunk)
                sent += 1
        except (ConnectionError, TimeoutError):
            pass
        assert status(connection) in (413, 0) and sent < 100


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_clients_that_go_at_any_moment(
    client: httpx.Client, scheduler: FakeScheduler, path: str
) -> None:
    stop = {"max_output_tokens": 900} if path == RESPONSES else {"max_tokens": 900}
    body = {name: value for name, value in BODIES[path].items()
            if name not in ("stop", "stop_sequences")}  # fmt: skip
    for stream in (False, True):
        content = json.dumps({**body, **stop, "stream": stream}).encode()
        whole = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        ).encode() + content
        for cut in (10, 60, len(whole) - len(content), len(whole) - 5, len(whole)):
            with connect(client) as connection:
                connection.sendall(whole[:cut])
        scheduler.go.clear()
        for _ in range(5):
            with connect(client) as connection:
                connection.sendall(whole)
                if stream and path != COMPLETIONS:
                    connection.recv(10)
        scheduler.go.set()


def test_slots_and_pages_return(model: Model) -> None:
    """The real scheduler, with clients that go while it reads prompts and generates."""
    engine = make_engine(model)
    draw = random.Random(1)
    with served(app_of(engine, Path(model.path))) as client:
        wanted = client.post(CHAT, json={"messages": [USER], "max_tokens": 8, "temperature": 0})
        for i in range(40):
            path = draw.choice([CHAT, COMPLETIONS, RESPONSES, MESSAGES])
            limit = {"max_output_tokens": 500} if path == RESPONSES else {"max_tokens": 500}
            body = {name: value for name, value in BODIES[path].items()
                    if name not in ("stop", "stop_sequences", "stop_token_ids")}  # fmt: skip
            content = json.dumps({**body, **limit, "stream": bool(i % 2)}).encode()
            with connect(client) as connection:
                connection.sendall(
                    f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
                    .encode() + content
                )
                if i % 2:
                    connection.recv(draw.choice([1, 300, 2000]))
        end = time.monotonic() + SECONDS
        kept = ("running", "waiting", "pages_used")
        while any(engine.statistics[name] for name in kept) and time.monotonic() < end:
            client.get("/health")
        assert [engine.statistics[name] for name in kept] == [0, 0, 0]
        again = client.post(CHAT, json={"messages": [USER], "max_tokens": 8, "temperature": 0})
        assert again.json()["choices"] == wanted.json()["choices"]


def test_large_bodies_together(model: Model) -> None:
    """Requests keep their bodies: one too many is refused, and room returns with the others."""
    scheduler = FakeScheduler([10])
    limits = Limits(body_bytes=2000, all_body_bytes=3000)
    body = {"messages": [USER], "max_tokens": 2, "stream": True, "user": "a" * 1200}
    with served(app_of(make_engine(model, scheduler), Path(model.path), limits=limits)) as client:
        scheduler.go.clear()
        with client.stream("POST", CHAT, json=body), client.stream("POST", CHAT, json=body):
            check(client.post(CHAT, json=body), 429)
            scheduler.go.set()
        # The server sees that both have gone only when it looks.
        for _ in range(1000):
            if (answer := client.post(CHAT, json=body)).status_code == 200:
                break
        assert answer.status_code == 200, answer.text


def test_many_idle_connections(client: httpx.Client) -> None:
    idle = [connect(client) for _ in range(200)]
    check(client.post(CHAT, json={"messages": [USER], "max_tokens": 2}))
    for connection in idle:
        connection.close()
