"""Bodies that no client should send: each is answered, and never as an error of the server."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import USER, FakeScheduler, app_of, make_engine, make_folder, open_model, served

SEED, ROUNDS = 5, 50
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAMPLING = {"temperature": 0.5, "top_p": 0.5, "max_tokens": 2, "stop": ["a"], "stream": False}
# A valid body of each endpoint, with as many fields as it has.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "b"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "n": 1,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 1,
        "user": "u",
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"start": "x"},
        "cache_salt": "s",
        "stop_token_ids": [1],
        "stream_options": None,
        **SAMPLING,
    },
    "/v1/completions": {
        "prompt": ["a", "b"],
        "echo": True,
        "logprobs": 1,
        "best_of": None,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        **SAMPLING,
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "instructions": "b",
        "max_output_tokens": 2,
        "store": False,
        "tools": [{"type": "function", **FUNCTION}],
        "temperature": 0.5,
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 2,
        "system": "a",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "stop_sequences": ["a"],
    },
    "/tokenize": {"messages": [USER], "return_token_strs": True, "add_generation_prompt": True},
    "/detokenize": {"tokens": [1, 2]},
}
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 1.5, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63), 10**40, "", "a",
    "\x00", "\u202e", "{", "{{ 1/0 }}", "{% for i in range(10**9) %}x{% endfor %}", "a" * 5000, [],
    [[]], [None], [1, "a"], ["a"] * 300, {}, {"a": {}}, {"type": "text"}, {"role": "user"},
    {"": None}, [{}], {"$ref": "#"}, "/etc/passwd", "<|endoftext|>"]  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = make_folder(tmp_path_factory.mktemp("hostile"))
    engine = make_engine(open_model(folder), FakeScheduler([10, 300]))
    with served(app_of(engine, folder)) as client:
        yield client


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each member of a document, as its container and its key."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    found = [(value, key) for key, _ in items]
    for _, item in items:
        if isinstance(item, dict | list):
            found += places(item)
    return found


def changed(body: dict[str, Any], random_of: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(body))
    for _ in range(random_of.choice((1, 1, 1, 2, 4))):
        if not places(made):
            break
        container, key = random_of.choice(places(made))
        how = random_of.random()
        if how < 0.7:
            container[key] = copy.deepcopy(random_of.choice(STRANGE))
        elif isinstance(container, dict) and how < 0.85:
            container[random_of.choice(("x", "", "type", "role", "n\n", "a" * 300))] = 1
        else:
            del container[key]
    return made


@pytest.mark.parametrize("path", BODIES)
def test_changed_bodies(client: httpx.Client, path: str) -> None:
    body = BODIES[path]
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    random_of = random.Random(f"{SEED} {path}")
    refused = 0
    for _ in range(ROUNDS):
        made = changed(body, random_of)
        if path.startswith("/v1/") and "max_output_tokens" not in body:
            made.setdefault("max_tokens", 2)
        answer = client.post(path, json=made)
        assert answer.status_code in (200, 400, 404), (made, answer.text)
        if answer.status_code != 200:
            message = answer.json()["error"]["message"]
            assert message and "\n" not in message and len(message) < 600, (made, message)
            refused += 1
    assert ROUNDS / 4 < refused < ROUNDS


@pytest.mark.parametrize("path", BODIES)
def test_bytes_that_are_no_body(client: httpx.Client, path: str) -> None:
    valid = json.dumps(BODIES[path]).encode()
    random_of = random.Random(f"{SEED} {path} bytes")
    contents = [b"", b"null", b"[]", b"\xff\xfe", b"{" * 5000, b'{"a":' * 5000, b"[" * 100_000,
                b'{"messages": [' + b"[" * 150 + b"]" * 150 + b"]}", valid[:-1], valid + b"}",
                valid.replace(b'"a"', b'"\\ud800"'), valid.replace(b"2", b"2e999"),
                valid.replace(b"2", b"NaN"), b"9" * 100_000]  # fmt: skip
    for _ in range(16):
        made = bytearray(valid)
        for _ in range(random_of.randrange(1, 4)):
            made[random_of.randrange(len(made))] = random_of.randrange(256)
        contents.append(bytes(made))
    for content in contents:
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404), (content[:200], answer.text)
        assert answer.status_code == 200 or answer.json()["error"]["message"]


def test_schemas_that_are_too_deep(client: httpx.Client) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(90):
        schema = {"type": "object", "properties": {"a": schema}}
    body = {"messages": [USER], "max_tokens": 2}
    for more in ({"response_format": {"type": "json_schema",
                                      "json_schema": {"name": "a", "schema": schema}}},
                 {"structured_outputs": {"regex": "(a{1000}){1000}{1000}"}},
                 {"structured_outputs": {"grammar": "start: start"}},
                 {"chat_template_kwargs": {"a": schema}}):  # fmt: skip
        answer = client.post("/v1/chat/completions", json={**body, **more})
        assert answer.status_code in (200, 400), answer.text
