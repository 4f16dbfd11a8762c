"""`chat --url`, with a server whose answers are scripts."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metal_marlin.chat_client import RemoteConversation, Server
from metal_marlin.errors import FileError, InvalidArgumentError, MalformedFileError

COMMAND = [sys.executable, "-m", "metal_marlin.cli", "chat"]
KEY = "secret"
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


class Script(http.server.ThreadingHTTPServer):
    """Answers each conversation with the next of `answers`: deltas, an error, or bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.key: str | None = None
        self.models: Any = {"data": [{"id": "tiny", "max_model_len": 1024}]}
        self.gone = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Script

    def log_message(self, *_: Any) -> None:
        pass

    def _say(self, status: int, document: Any) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refused(self) -> bool:
        key = self.server.key
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            return False
        self._say(401, {"error": {"message": "no key"}})
        return True

    def do_GET(self) -> None:
        if not self._refused():
            self._say(200 if self.path == "/v1/models" else 404, self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        self.server.requests.append(body)
        answer = self.server.answers.pop(0)
        if isinstance(answer, tuple):
            self._say(*answer)
            return
        self.send_response(200)
        self.end_headers()
        if isinstance(answer, bytes):
            self.wfile.write(answer)
            return
        for delta in answer:
            if delta == "wait":
                with contextlib.suppress(OSError):
                    self.connection.recv(1)
                self.server.gone.set()
                return
            self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": USAGE})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, document: Any) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())


@pytest.fixture
def script() -> Iterator[Script]:
    with Script() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def run(script: Script, said: str, *words: object, **more: str) -> Any:
    command = [*COMMAND, "--url", script.url, *map(str, words)]
    environment = {**os.environ, **more}
    return subprocess.run(command, input=said, capture_output=True, text=True, check=False,
                          env=environment)


def never() -> bool:
    return False


def test_a_conversation(script: Script, tmp_path: Path) -> None:
    script.answers = [[{"content": "Let there "}, {"content": "be light."}],
                      [{"reasoning_content": "Day"}, {"reasoning_content": "."},
                       {"content": "And it was so."}]]  # fmt: skip
    file = tmp_path / "saved.json"
    done = run(script, f"And God said\nAnd then?\n/stats\n/save {file}\n", "--system", "Speak.",
               "--temperature", 0.5, "--seed", 7, "--max-tokens", 99,
               "--chat-template-kwargs", '{"enable_thinking": false}')  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "Let there be light.\n<think>\nDay.\n</think>\n\nAnd it was so.\nmessages 4; the context"
    )
    assert "last answer: 3 tokens" in done.stdout and "of which 4 were in" in done.stdout
    first, second = script.requests
    assert first == {
        "model": "tiny", "stream": True, "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "Speak."},
                     {"role": "user", "content": "And God said"}],
        "temperature": 0.5, "seed": 7, "max_tokens": 99,
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert second["messages"][2:] == [{"role": "assistant", "content": "Let there be light."},
                                      {"role": "user", "content": "And then?"}]  # fmt: skip
    saved = json.loads(file.read_text())["messages"]
    assert saved[-1] == {"role": "assistant", "content": "And it was so.",
                         "reasoning_content": "Day."}  # fmt: skip


def test_settings(script: Script) -> None:
    script.answers = [[{"content": "a"}], [{"content": "b"}], [{"content": "c"}]]
    done = run(script, "one\n/retry\n/set\n/set temperature 0.25\n/set seed 3\n/retry\n", "--json")
    assert done.returncode == 0, done.stderr
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["text"] for each in documents] == ["a", "b", "c"]
    assert documents[0]["completion_tokens"] == 3 and documents[0]["cached_tokens"] == 4
    assert documents[0]["stop_reason"] == "stop_token"
    assert "temperature the server's default" in done.stderr
    assert "seed" not in script.requests[1]
    assert script.requests[2]["temperature"] == 0.25 and script.requests[2]["seed"] == 5


def test_the_key(script: Script) -> None:
    script.key = KEY
    script.answers = [[{"content": "Yes."}]] * 2
    refused = run(script, "a\n")
    assert refused.returncode == 1
    assert "the server wants an API key: --api-key, or METAL_MARLIN_API_KEY" in refused.stderr
    assert run(script, "a\n", "--api-key", KEY).stdout == "Yes.\n"
    assert run(script, "a\n", METAL_MARLIN_API_KEY=KEY).stdout == "Yes.\n"
    assert KEY not in refused.stderr


@pytest.mark.parametrize("answer, error, says", [
    ((429, {"error": {"message": "256 wait"}}), FileError, "busy; try again in a moment: 256 wait"),
    ((400, {"error": {"message": "top_p: too\nlarge"}}), InvalidArgumentError, "top_p: too large"),
    ((500, []), FileError, "the server answers 500"),
    ((302, {}), FileError, "the server answers 302"),
    (b"data: {", FileError, "connection was lost within the answer"),
    (b"data: {\n\n", MalformedFileError, "an event that is no JSON object"),
    (b'data: {"error": {"message": "lost"}}\n\n', FileError, "lost"),
    (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', FileError, "connection was lost"),
])
def test_errors(script: Script, answer: Any, error: type[Exception], says: str) -> None:
    conversation = RemoteConversation(Server(script.url, None))
    script.answers = [answer]
    with pytest.raises(error) as raised:
        conversation.ask("a", lambda piece: None, never)
    assert says in str(raised.value) and "\n" not in str(raised.value)
    assert conversation.messages == []
    script.answers = [[{"content": "Yes."}]]
    assert conversation.ask("a", lambda piece: None, never)["text"] == "Yes."


def test_addresses(script: Script) -> None:
    for url in (script.url, script.url + "/", script.url + "/v1", script.url[len("http://"):]):
        assert Server(url, None).model() == ("tiny", 1024)
    for url in ("ftp://a", "http://", "http://a:b", "http://a/?x", "http://u@a"):
        with pytest.raises(InvalidArgumentError, match="--url"):
            Server(url, None)
    with pytest.raises(InvalidArgumentError, match="--api-key"):
        Server(script.url, "a\nb")
    script.models = {"data": []}
    with pytest.raises(MalformedFileError, match="no list of models"):
        Server(script.url, None).model()
    script.models = {"data": [{"id": "other"}]}
    assert Server(script.url, None).model() == ("other", None)
    with contextlib.closing(__import__("socket").socket()) as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(FileError, match="cannot be reached"):
            Server(f"http://127.0.0.1:{free.getsockname()[1]}", None).model()


def test_stop(script: Script) -> None:
    conversation = RemoteConversation(Server(script.url, None))
    script.answers = [[{"content": "Once"}, "wait"], ["wait"]]
    shown: list[str] = []
    result = conversation.ask("a", shown.append, lambda: bool(shown))
    assert result["stop_reason"] == "interrupted" and shown == ["Once"]
    assert conversation.messages[-1] == {"role": "assistant", "content": "Once"}
    assert script.gone.wait(30)
    # While nothing has come, too.
    assert conversation.ask("b", shown.append, lambda: len(script.requests) == 2)["text"] == ""


def test_ctrl_c_in_a_terminal(script: Script) -> None:
    script.answers = [[{"content": "Once upon"}, "wait"]]
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "dumb"
        os.execv(COMMAND[0], [*COMMAND, "--url", script.url])
    text = b""
    try:
        def until(wanted: bytes) -> None:
            nonlocal text
            while wanted not in text:
                text += os.read(terminal, 4096)
            text = text.partition(wanted)[2]

        until(b"> ")
        os.write(terminal, b"Tell\n")
        until(b"Once upon")
        os.write(terminal, b"\x03")
        until(b"> ")
        assert script.gone.wait(30)
        os.write(terminal, b"/stats\n")
        until(b"messages 2")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def test_wrong_use(script: Script, tmp_path: Path) -> None:
    for words, says in (
        (["--device", "cpu"], "--url"),
        (["--chat-template", "x"], "--chat-template: not with --url"),
        ([tmp_path], "expected either MODEL or --url"),
        (["--temperature", "-1"], "--temperature"),
    ):
        done = run(script, "a\n", *words)
        assert done.returncode == 1 and says in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    none = subprocess.run([*COMMAND], capture_output=True, text=True, check=False)
    assert none.returncode == 1 and "expected either MODEL or --url" in none.stderr
    alone = subprocess.run([*COMMAND, str(tmp_path), "--api-key", "x"], capture_output=True,
                           text=True, check=False)
    assert "--api-key: only with --url" in alone.stderr
