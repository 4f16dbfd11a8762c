"""`metal-marlin serve` as a process: start, texts, signals, keys and quantized copies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from metal_marlin.models import Model
from serving import COMMAND, SAMPLE, USER, events, make_folder, open_model, process

CHAT = "/v1/chat/completions"
EXACT = ["--exact", "--batch-invariant", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("command"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return open_model(folder)


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[dict[str, Any]]:
    with process(folder, *EXACT) as (_, document):
        yield document


def refused(code: int, *words: object) -> str:
    done = subprocess.run([*COMMAND, "serve", *map(str, words)], capture_output=True, text=True,
                          check=False, timeout=60)  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("metal-marlin: error: ") and done.stderr.count("\n") == 1
    return done.stderr


def test_start(started: dict[str, Any], folder: Path) -> None:
    assert started["model"] == "tiny" and started["context"] == 1024
    assert started["url"] == f"http://127.0.0.1:{started['port']}"
    listed = httpx.get(f"{started['url']}/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["tiny"] and listed[0]["root"] == str(folder)


def test_texts_are_those_of_generate(started: dict[str, Any], model: Model) -> None:
    with httpx.Client(base_url=started["url"], timeout=60) as client:
        body = {"messages": [USER], "max_tokens": 24}
        want = model.chat([USER], 24)
        made = client.post(CHAT, json=body).json()
        assert made["choices"][0]["message"]["content"] == want["text"] != ""
        assert made["usage"]["completion_tokens"] == len(want["token_ids"])
        chunks = events(client.post(CHAT, json={**body, "stream": True}).text)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == want["text"]
        prompts = ["And God said", "In the beginning", "And it came to pass"]
        made = client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 20}).json()
        texts = [choice["text"] for choice in made["choices"]]
        assert texts == [each["text"] for each in model.generate(prompts, 20)]
        sampled = {"prompt": prompts[0], "max_tokens": 20, "temperature": 1.2, "seed": 7, "n": 2}
        made = client.post("/v1/completions", json=sampled).json()
        wanted = [model.generate(prompts[0], 20, temperature=1.2, seed=seed) for seed in (7, 8)]
        assert [choice["text"] for choice in made["choices"]] == [each["text"] for each in wanted]
        del sampled["seed"]
        made = [client.post("/v1/completions", json=sampled).json()["choices"] for _ in range(2)]
        assert made[0][0]["text"] != made[1][0]["text"]
        stop = want["text"][5:9]
        made = client.post(CHAT, json={**body, "stop": stop}).json()["choices"][0]
        assert made["message"]["content"] == want["text"].partition(stop)[0]
        assert made["finish_reason"] == "stop"
        answer = client.post(CHAT, json={**body, "temperature": -1})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_end(folder: Path, number: signal.Signals) -> None:
    with process(folder, *EXACT) as (running, document):
        body = {"prompt": "And God said", "max_tokens": 300, "ignore_eos": True, "stream": True}
        url = f"{document['url']}/v1/completions"
        with httpx.Client(timeout=60) as client, client.stream("POST", url, json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            running.send_signal(number)
            assert list(lines)[-2] == "data: [DONE]"
        assert running.wait(60) == 0


def test_a_second_signal_ends(folder: Path) -> None:
    with process(folder, *EXACT) as (running, document):
        body = {"prompt": ["And God said"] * 64, "max_tokens": 1000, "ignore_eos": True, "n": 4,
                "stream": True}  # fmt: skip
        url = f"{document['url']}/v1/completions"
        with httpx.Client(timeout=60) as client, client.stream("POST", url, json=body) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
            running.send_signal(signal.SIGTERM)
            assert running.stderr is not None
            log = ""
            while "a second signal ends" not in log:
                log += running.stderr.read()
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0


def test_two_signals_at_once(folder: Path) -> None:
    with process(folder, *EXACT) as (running, _):
        running.send_signal(signal.SIGTERM)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0
        assert running.stderr is not None
        assert "Traceback" not in running.stderr.read()


def test_the_log_has_no_texts(folder: Path) -> None:
    with process(folder, *EXACT, METAL_MARLIN_API_KEY="secret-key") as (running, document):
        body = {"messages": [{"role": "user", "content": "a secret prompt"}], "max_tokens": 4}
        assert httpx.post(document["url"] + CHAT, json=body).status_code == 401
        headers = {"authorization": "Bearer secret-key"}
        answer = httpx.post(document["url"] + CHAT, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
        assert running.stderr is not None
        log = running.stderr.read()
        assert f"{answer.headers['x-request-id']} {CHAT} 200 ended, prompt " in log
        assert "secret" not in log and "[assistant]" not in log


def test_a_quantized_copy_is_made_once(folder: Path, tmp_path: Path) -> None:
    words = [folder, *EXACT, "--quantize", "u4/g32", "-q"]
    with process(*words, XDG_CACHE_HOME=str(tmp_path)) as (_, document):
        assert document["model"] == "tiny"
        answer = httpx.post(document["url"] + CHAT, json={"messages": [USER], "max_tokens": 4},
                            timeout=60)  # fmt: skip
        first = answer.json()["choices"][0]["message"]["content"]
    made = [path for path in (tmp_path / "metal-marlin" / "quantized").iterdir() if path.is_dir()]
    assert len(made) == 1
    time = made[0].joinpath("config.json").stat().st_mtime_ns
    with process(*words, XDG_CACHE_HOME=str(tmp_path)) as (_, document):
        answer = httpx.post(document["url"] + CHAT, json={"messages": [USER], "max_tokens": 4},
                            timeout=60)  # fmt: skip
        assert answer.json()["choices"][0]["message"]["content"] == first
    assert made[0].joinpath("config.json").stat().st_mtime_ns == time
    quantized = open_model(made[0])
    assert quantized.info["bits_per_weight"] < 8


def test_wrong_use(folder: Path, tmp_path: Path) -> None:
    assert "--api-key, or --no-api-key" in refused(1, folder, "--host", "0.0.0.0")
    assert "no such file" in refused(3, folder, "--port", 0, "--chat-template", tmp_path / "absent")
    assert "--quantize: " in refused(1, folder, "--port", 0, "--quantize", "u5/g3")
    assert "unknown name 'u9'" in refused(1, folder, "--port", 0, "--quantize", "u9/g32")
    assert "missing: no such file" in refused(3, tmp_path / "missing")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}: Address already in use" in refused(1, folder, "--port", port)


def test_a_model_without_a_template(tmp_path: Path) -> None:
    with process(SAMPLE, *EXACT) as (_, document):
        answer = httpx.post(document["url"] + CHAT, json={"messages": [USER]}, timeout=60)
        assert answer.status_code == 400 and "--chat-template" in answer.text
        body = {"prompt": "And God said", "max_tokens": 4}
        assert httpx.post(document["url"] + "/v1/completions", json=body).status_code == 200


def test_the_lines_at_the_start(folder: Path) -> None:
    words = [*COMMAND, "serve", str(folder), *EXACT, "--port", "0", "--served-model-name", "x"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env=dict(os.environ)) as running:  # fmt: skip
        try:
            assert running.stdout is not None
            first, second = running.stdout.readline(), running.stdout.readline()
            assert first.startswith("device: ") and " KV cache " in first
            url, _, rest = second.partition(" ")
            shown = "page: / API: /v1 docs: /docs metrics: /metrics"
            assert rest.split() == shown.split()
            assert json.loads(httpx.get(url + "/v1/models").text)["data"][0]["id"] == "x"
        finally:
            running.kill()
