"""The endpoints of the server, on the sample model with a template of the tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from metal_marlin.models import Model
from serving import (
    NAME,
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
COMPLETIONS = "/v1/completions"
TOKENS = [10, 300, 400]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return open_model(folder)


@pytest.fixture(scope="module")
def client(folder: Path, model: Model) -> Iterator[httpx.Client]:
    with served(app_of(make_engine(model, FakeScheduler(TOKENS)), folder)) as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: httpx.Client, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error that a body is answered with."""
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


def test_chat(client: httpx.Client, model: Model) -> None:
    made = post(client, CHAT, messages=[USER], max_tokens=6, model=NAME)
    text = model.tokenizer.decode(TOKENS * 2)
    assert made["object"] == "chat.completion" and made["model"] == NAME
    choice = made["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    prompt = len(model.tokenizer.encode("[user]And God said\n[assistant]", False))
    assert made["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_usage_counts_guesses(model: Model, folder: Path) -> None:
    scheduler = FakeScheduler(TOKENS)
    scheduler.drafts = (7, 4)
    with served(app_of(make_engine(model, scheduler), folder)) as client:
        for path, body in ((CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "And"})):
            made = post(client, path, **body, max_tokens=6, n=2)
            assert made["usage"]["completion_tokens_details"] == {
                "accepted_prediction_tokens": 8,
                "rejected_prediction_tokens": 6,
            }


def test_a_stream_of_chat(client: httpx.Client, model: Model) -> None:
    body = {"messages": [USER], "max_tokens": 6, "n": 2, "stream": True}
    answer = client.post(CHAT, json={**body, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12
    texts, reasons = ["", ""], ["", ""]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk" and chunk["usage"] is None
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [model.tokenizer.decode(TOKENS * 2)] * 2
    assert reasons == ["length", "length"]
    assert "usage" not in events(client.post(CHAT, json=body).text)[0]


def test_completions(client: httpx.Client, model: Model) -> None:
    text = model.tokenizer.decode(TOKENS)
    made = post(client, COMPLETIONS, prompt=["a", "b"], n=2, echo=True, max_tokens=3, logprobs=1)
    assert [choice["text"] for choice in made["choices"]] == ["a" + text] * 2 + ["b" + text] * 2
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert made["usage"]["prompt_tokens"] == 2 and made["usage"]["completion_tokens"] == 12
    ids = model.tokenizer.encode("a")
    for prompt in ("a", ids, [ids]):
        assert post(client, COMPLETIONS, prompt=prompt, max_tokens=3)["choices"][0]["text"] == text
    answer = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3, "stream": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in events(answer.text)) == text


def test_token_ids(client: httpx.Client, model: Model) -> None:
    prompt = model.tokenizer.encode("[user]And God said\n[assistant]", False)
    body = {"messages": [USER], "max_tokens": 6, "return_token_ids": True}
    made = post(client, CHAT, **body)
    assert made["prompt_token_ids"] == prompt and made["choices"][0]["token_ids"] == TOKENS * 2
    chunks = events(client.post(CHAT, json={**body, "stream": True}).text)
    assert chunks[0]["prompt_token_ids"] == prompt
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == TOKENS * 2
    made = post(client, COMPLETIONS, prompt="a", max_tokens=4, return_token_ids=True)
    assert made["choices"][0]["token_ids"] == [*TOKENS, TOKENS[0]]


class SlowScheduler(FakeScheduler):
    """Makes one pass after the last one's tokens have been read."""

    def step(self, idle: float) -> list[Any]:
        time.sleep(0.01)
        return super().step(idle)


def test_token_ids_of_characters_in_several_tokens(model: Model, folder: Path) -> None:
    tokens = model.tokenizer.encode("日本")
    assert len(tokens) > 2
    body = {"messages": [USER], "max_tokens": len(tokens), "return_token_ids": True}
    with served(app_of(make_engine(model, SlowScheduler(tokens)), folder)) as client:
        assert post(client, CHAT, **body)["choices"][0]["token_ids"] == tokens
        chunks = events(client.post(CHAT, json={**body, "stream": True}).text)
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == tokens


def test_a_stop_string(client: httpx.Client, model: Model) -> None:
    whole = model.tokenizer.decode(TOKENS * 2)
    stop = whole[3:6]
    for body in ({"stop": stop}, {"stop": ["zzz", stop]}):
        made = post(client, CHAT, messages=[USER], max_tokens=60, **body)
        choice = made["choices"][0]
        assert choice["message"]["content"] == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop" and made["usage"]["completion_tokens"] < 7


def test_reasoning_and_calls(model: Model, folder: Path, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{{ tools }}{# <tool_call> <think></think> #}"
    (tmp_path / "t.jinja").write_text(template)
    said = '<think>\nLet us see.</think>\n\nA moment.<tool_call>\n{"name": "f", "arguments": '
    said += '{"a": [1, "b"]}}\n</tool_call>'
    tokens = model.tokenizer.encode(said)
    engine = make_engine(model, FakeScheduler(tokens))
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [USER], "tools": tools, "max_tokens": len(tokens), "logprobs": True}
    with served(app_of(engine, folder, tmp_path / "t.jinja")) as client:
        made = post(client, CHAT, **body)
        choice = made["choices"][0]
        message = choice["message"]
        assert message["reasoning_content"] == "Let us see." and message["content"] == "A moment."
        texts = [model.tokenizer.decode(tokens[: i + 1]) for i in range(len(tokens))]
        reasoning = [text for text in texts if "see." not in text]
        details = made["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": len(reasoning) + 1}
        call = message["tool_calls"][0]
        assert call["type"] == "function" and call["id"]
        assert call["function"] == {"name": "f", "arguments": '{"a": [1, "b"]}'}
        # The scheduler of the test ends texts by their length alone.
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["content"]) == len(tokens)
        body["stream_options"] = {"include_usage": True}
        chunks = events(client.post(CHAT, json={**body, "stream": True}).text)
    assert chunks.pop()["usage"]["completion_tokens_details"] == details
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"]["name"] == "f" and calls[0]["id"] and calls[0]["index"] == 0
    assert all("id" not in each and "name" not in each["function"] for each in calls[1:])
    assert "".join(each["function"]["arguments"] for each in calls) == '{"a": [1, "b"]}'
    for field, text in (("reasoning_content", "Let us see."), ("content", "A moment.")):
        assert "".join(delta.get(field, "") for delta in deltas) == text


def test_wrong_bodies(client: httpx.Client) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"max_token": 3}, "max_token", "is not a known field; did you mean 'max_tokens'?"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "is not supported"),
        ({"functions": []}, "functions", "is not supported; use tools"),
        ({"n": 9}, "n", "expected less than or equal to 8"),
        ({"temperature": "1"}, "temperature", "expected a valid number"),
        ({"stop": ["a"] * 5}, "stop", "expected at most 4 texts, got 5"),
        ({"stop": "a" * 257}, "stop", "expected texts of 1 to 256 bytes, got 257"),
        ({"top_logprobs": 2}, "top_logprobs", "only with logprobs"),
        ({"stream_options": {}}, "stream_options", "only with stream"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "excludes"),
        ({"messages": []}, "messages", "expected"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type", "'image_url' is not supported"),
        ({"messages": [{**USER, "x": 1}]}, "messages[0].x", "not supported"),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "only 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "chat template has none"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "cannot set"),
    ]  # fmt: skip
    for body, param, says in cases:
        error = refused(client, CHAT, **{"messages": [USER], **body})
        assert error["param"] == param and error["message"].startswith(param + ":"), error
        assert says in error["message"], error
    assert refused(client, CHAT)["message"] == "messages: is required"
    assert refused(client, CHAT, 404, messages=[USER], model="x")["code"] == "model_not_found"
    assert refused(client, COMPLETIONS, prompt="a", suffix="b")["param"] == "suffix"
    assert refused(client, COMPLETIONS, prompt="a", best_of=2)["param"] == "best_of"
    assert refused(client, COMPLETIONS, prompt=[5000])["param"] == "prompt"
    long = refused(client, CHAT, messages=[{"role": "user", "content": "and " * 2000}])
    assert long["code"] == "context_length_exceeded"


def test_other_errors(client: httpx.Client) -> None:
    kind = {"content-type": "application/json"}
    for content in (b"[" * 100_000, b"{", b"[]", b'{"messages": NaN}', b"\xff", b'"\\ud800"'):
        answer = client.post(CHAT, content=content, headers=kind)
        assert answer.status_code == 400 and "error" in answer.json(), answer.text
    assert client.post(CHAT, content=b"{}").status_code == 415
    assert client.post(CHAT, content=b" " * (9 << 20), headers=kind).status_code == 413
    parts = (b" " * (1 << 20) for _ in range(9))
    assert client.post(CHAT, content=parts, headers=kind).status_code == 413
    answer = client.get(CHAT)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    answer = client.get("/v2")
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
    assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
    assert client.get("/health", headers={"host": "localhost:1"}).status_code == 200


def test_status(client: httpx.Client, model: Model) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert listed[0]["id"] == NAME and listed[0]["max_model_len"] == 1024
    assert client.get(f"/v1/models/{NAME}").json() == listed[0]
    assert client.get("/v1/models/x").status_code == 404
    post(client, CHAT, messages=[USER], max_tokens=2)
    metrics = client.get("/metrics").text
    for name in ("time_to_first_token_seconds_count", "inter_token_latency_seconds_bucket",
                 "num_requests_running", "prefix_cache_hits_total", "generation_tokens_total",
                 'request_success_total{finished_reason="length"}'):  # fmt: skip
        assert f"\nmetal_marlin:{name}" in metrics, name
    info = client.get("/info").json()
    assert info["model"] == NAME and not info["needs_key"] and info["compare"] is None
    assert info["kv_cache"]["tokens"] >= 0 and info["sampling"]["top_p"] == 1.0
    assert client.get("/").headers["content-type"].startswith("text/html")
    assert "max_completion_tokens" in client.get("/docs").text
    assert "ChatBody" in client.get("/openapi.json").json()["components"]["schemas"]


def test_tokenize(client: httpx.Client, model: Model) -> None:
    ids = model.tokenizer.encode("And God said")
    made = post(client, "/tokenize", prompt="And God said", return_token_strs=True)
    assert made["tokens"] == ids and made["count"] == len(ids) and made["max_model_len"] == 1024
    assert made["token_strs"][0] == "And"
    rendered = model.tokenizer.encode("[user]And God said\n[assistant]", False)
    assert post(client, "/tokenize", messages=[USER])["tokens"] == rendered
    assert post(client, "/detokenize", tokens=ids)["prompt"] == "And God said"
    assert refused(client, "/tokenize")["param"] == "prompt"
    assert refused(client, "/detokenize", tokens=[-1])["param"] == "tokens[0]"
