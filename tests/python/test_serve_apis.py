"""/v1/responses and /v1/messages over HTTP, with a scheduler that makes what a test says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from metal_marlin.models import Model
from metal_marlin.serve.limits import Limits
from serving import (
    NAME,
    USER,
    FakeScheduler,
    app_of,
    make_engine,
    make_folder,
    open_model,
    served,
)

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOKENS = [10, 300, 400]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return open_model(folder)


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler(TOKENS)


@pytest.fixture
def client(folder: Path, model: Model, scheduler: FakeScheduler) -> Iterator[httpx.Client]:
    with served(app_of(make_engine(model, scheduler), folder)) as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json={"model": NAME, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def messages_refused(client: httpx.Client, status: int, **body: Any) -> dict[str, Any]:
    answer = client.post(MESSAGES, json={"model": NAME, "max_tokens": 6, "messages": [USER],
                                         **body})  # fmt: skip
    assert answer.status_code == status, answer.text
    document = answer.json()
    assert document["type"] == "error"
    error: dict[str, Any] = document["error"]
    return error


def events(text: str) -> list[Any]:
    """The documents of a stream, whose events have the names of their types."""
    made = []
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


def test_messages(client: httpx.Client, model: Model) -> None:
    made = post(client, MESSAGES, max_tokens=6, messages=[USER], system="Speak.")
    text = model.tokenizer.decode(TOKENS * 2)
    prompt = len(model.tokenizer.encode("[system]Speak.\n[user]And God said\n[assistant]", False))
    assert made["content"] == [{"type": "text", "text": text}]
    assert made["stop_reason"] == "max_tokens" and made["model"] == NAME
    assert (made["usage"]["input_tokens"], made["usage"]["output_tokens"]) == (prompt, 6)
    count = post(client, f"{MESSAGES}/count_tokens", messages=[USER], system="Speak.")
    assert count == {"input_tokens": prompt}
    answer = client.post(MESSAGES, json={"model": NAME, "max_tokens": 6, "messages": [USER],
                                         "system": "Speak.", "stream": True})  # fmt: skip
    shown = events(answer.text)
    assert shown[0]["message"]["usage"]["input_tokens"] == prompt
    assert "".join(event["delta"].get("text", "") for event in shown if "delta" in event) == text
    stop = text[3:6]
    made = post(client, MESSAGES, max_tokens=60, messages=[USER], stop_sequences=["zz", stop])
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", stop)


def test_an_answer_that_was_begun(
    client: httpx.Client, model: Model, scheduler: FakeScheduler
) -> None:
    begun = {"role": "assistant", "content": "Let the"}
    post(client, MESSAGES, max_tokens=2, messages=[USER, begun])
    prompt = scheduler.submitted[max(scheduler.submitted)].prompt
    assert prompt == model.tokenizer.encode("[user]And God said\n[assistant]Let the", False)


def test_errors_of_messages(
    client: httpx.Client, folder: Path, model: Model, scheduler: FakeScheduler
) -> None:
    error = messages_refused(client, 400, container="c")
    assert error == {"type": "invalid_request_error", "message": "container: is not supported"}
    error = messages_refused(client, 400, stop_sequences=["a"] * 5)
    assert error["message"] == "stop_sequences: expected at most 4 texts, got 5"
    assert messages_refused(client, 404, model="x")["type"] == "not_found_error"
    assert client.post(MESSAGES, content=b"{").json()["error"]["message"].startswith("content-type")
    answer = client.post(MESSAGES, content=b"{", headers={"Content-Type": "application/json"})
    assert answer.json()["error"]["message"].startswith("the body is no JSON: EOF")
    assert client.get(MESSAGES).json()["type"] == "error"
    scheduler.most = 0
    answer = client.post(MESSAGES, json={"model": NAME, "max_tokens": 6, "messages": [USER]})
    assert answer.status_code == 429 and answer.headers["Retry-After"]
    assert answer.json()["error"]["type"] == "rate_limit_error"
    engine = make_engine(model, FakeScheduler(TOKENS))
    with served(app_of(engine, folder, limits=Limits(api_key="k"))) as other:
        assert messages_refused(other, 401)["type"] == "authentication_error"
        other.headers["x-api-key"] = "k"
        post(other, MESSAGES, max_tokens=2, messages=[USER])


def test_an_error_within_a_stream(client: httpx.Client, scheduler: FakeScheduler) -> None:
    scheduler.error = MemoryError("full")
    body = {"model": NAME, "max_tokens": 6, "messages": [USER], "stream": True}
    shown = events(client.post(MESSAGES, json=body).text)
    assert shown[-1]["type"] == "error" and shown[-1]["error"]["type"] == "api_error"
    scheduler.error = MemoryError("full")
    shown = events(client.post(RESPONSES, json={"input": "a", "stream": True}).text)
    assert shown[-1]["type"] == "response.failed"
    assert shown[-1]["response"]["error"]["code"] == "server_error"


def test_responses(client: httpx.Client, model: Model) -> None:
    text = model.tokenizer.decode(TOKENS * 2)
    made = post(client, RESPONSES, input="And God said", instructions="Speak.",
                max_output_tokens=6, store=False)  # fmt: skip
    prompt = len(model.tokenizer.encode("[system]Speak.\n[user]And God said\n[assistant]", False))
    assert made["output"][0]["content"][0]["text"] == text and made["status"] == "incomplete"
    assert (made["usage"]["input_tokens"], made["usage"]["output_tokens"]) == (prompt, 6)
    assert client.get(f"{RESPONSES}/{made['id']}").status_code == 404
    answer = client.post(RESPONSES, json={"input": "a", "max_output_tokens": 6, "stream": True})
    shown = events(answer.text)
    assert [event["sequence_number"] for event in shown] == list(range(len(shown)))
    assert shown[-1]["response"]["output"][0]["content"][0]["text"] == text
    answer = client.post(RESPONSES, json={"input": [{"role": "user", "content": "and " * 2000}]})
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "input"
    assert error["message"].startswith("input: have")


def test_kept_responses(client: httpx.Client, model: Model, scheduler: FakeScheduler) -> None:
    first = post(client, RESPONSES, input="And God said", instructions="Speak.",
                 max_output_tokens=2)  # fmt: skip
    assert client.get(f"{RESPONSES}/{first['id']}").json() == first
    said = first["output"][0]["content"][0]["text"]
    before = "[user]And God said\n[assistant]" + said
    second = post(client, RESPONSES, input="More", previous_response_id=first["id"],
                  max_output_tokens=2)  # fmt: skip
    assert second["previous_response_id"] == first["id"]
    post(client, RESPONSES, previous_response_id=second["id"], max_output_tokens=2,
         input=[{"type": "item_reference", "id": second["output"][0]["id"]}, USER])  # fmt: skip
    decoded = model.tokenizer.decode(scheduler.submitted[max(scheduler.submitted)].prompt)
    assert decoded.startswith(before + "\n[user]More\n[assistant]")
    assert decoded.count("[assistant]") == 4
    assert client.delete(f"{RESPONSES}/{first['id']}").json()["deleted"]
    assert client.delete(f"{RESPONSES}/{first['id']}").status_code == 404
    answer = client.post(RESPONSES, json={"input": "a", "previous_response_id": first["id"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    assert client.get(f"{RESPONSES}/{second['id']}?stream=true").status_code == 400


def test_a_client_that_goes(client: httpx.Client, scheduler: FakeScheduler) -> None:
    scheduler.go.clear()
    for path, body in (
        (RESPONSES, {"input": "a"}),
        (MESSAGES, {"model": NAME, "max_tokens": 1000, "messages": [USER]}),
    ):
        scheduler.cancelled.clear()
        with client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert "event: " in next(answer.iter_text())
        for _ in range(1000):
            if scheduler.cancelled:
                break
            client.get("/health")
        assert len(scheduler.cancelled) == 1
