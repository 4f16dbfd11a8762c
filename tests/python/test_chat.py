"""Model.chat, `generate --chat` and `chat`, on the sample model with a template of the tests."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import metal_marlin as mm
import pytest
from metal_marlin import chat
from metal_marlin.errors import FileError, InvalidArgumentError

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
COMMAND = [sys.executable, "-m", "metal_marlin.cli"]
TEMPLATE = (
    "{{ start }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
EXACT = ["--exact", "--batch-invariant", "--device", "cpu"]
SYSTEM = {"role": "system", "content": "Speak."}
USER = {"role": "user", "content": "And God said"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(SAMPLE, tmp_path_factory.mktemp("chat") / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> mm.Model:
    return mm.load(folder, device="cpu", exact=True, batch_invariant=True, verbose=False)


def run(*words: object, said: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, words)], input=said, capture_output=True,
                          text=True, check=False)


def refused(code: int, *words: object, said: str | None = None) -> str:
    done = run(*words, said=said)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("metal-marlin: error: ") and done.stderr.count("\n") == 1
    return done.stderr


def answers(folder: Path, said: str, *words: object) -> list[dict[str, Any]]:
    done = run("chat", folder, "--json", *EXACT, *words, said=said)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_model_chat(model: mm.Model) -> None:
    assert model.chat_template is not None
    text = model.chat_template.render([SYSTEM, USER])
    assert text == "[system]Speak.\n[user]And God said\n[assistant]"
    alone = model.generate(text, 12, add_special_tokens=False)
    made = model.chat([SYSTEM, USER], 12)
    assert made["token_ids"] == alone["token_ids"] and made["text"] == alone["text"] != ""
    other = [{"role": "user", "content": "And Jesus wept"}]
    both = model.chat([[SYSTEM, USER], other], 12)
    assert both[0]["text"] == made["text"] != both[1]["text"] == model.chat(other, 12)["text"]
    assert model.chat([USER], 8, tools=[{}])["text"] != model.chat([USER], 8)["text"]
    started = model.chat([USER], 8, chat_template_kwargs={"start": "In the beginning "})
    assert started["text"] == model.generate(
        "In the beginning [user]And God said\n[assistant]", 8, add_special_tokens=False
    )["text"]
    own = model.chat([USER], 8, chat_template="{{ messages[0].content }}")
    assert own["text"] == model.generate("And God said", 8, add_special_tokens=False)["text"]
    going_on = model.chat([USER, {"role": "assistant", "content": "Let the"}], 8,
                          add_generation_prompt=False, continue_final_message=True)
    assert going_on["text"] == model.generate(
        "[user]And God said\n[assistant]Let the", 8, add_special_tokens=False
    )["text"]


def test_an_answer_fills_the_context(model: mm.Model) -> None:
    made = model.chat([USER], ignore_eos=True)
    assert model.chat_template is not None
    prompt = model.tokenizer.encode(model.chat_template.render([USER]), add_special_tokens=False)
    assert len(prompt) + len(made["token_ids"]) == model.info["max_positions"] + 1


def test_a_missing_model(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert f"{missing}: no such file or directory" in refused(3, "chat", missing, said="a\n")


def test_a_model_without_a_template(tmp_path: Path) -> None:
    says = "no chat template: pass --chat-template FILE, or use generate without --chat"
    with pytest.raises(mm.UnsupportedError, match=says):
        mm.load(SAMPLE, verbose=False).chat([USER])
    assert says in refused(1, "generate", SAMPLE, "--chat", "--prompt", "a")
    assert says in refused(1, "chat", SAMPLE, said="a\n")
    file = tmp_path / "t.jinja"
    file.write_text(TEMPLATE)
    for words in (["generate", SAMPLE, "--chat", "--prompt", "a"], ["chat", SAMPLE]):
        assert run(*words, "--chat-template", file, "--max-tokens", 3, said="a\n").returncode == 0
        absent = refused(3, *words, "--chat-template", tmp_path / "absent", said="a\n")
        assert "absent: no such file" in absent


def test_generate_chat(folder: Path, model: mm.Model, tmp_path: Path) -> None:
    words = ["generate", folder, "--chat", "--max-tokens", 12, *EXACT, "--json"]
    shown = json.loads(run(*words, "--prompt", "And God said", "--system", "Speak.").stdout)
    assert shown["text"] == model.chat([SYSTEM, USER], 12)["text"]
    shown = json.loads(run(*words, "--prompt", "And God said",
                           "--chat-template-kwargs", '{"start": "x"}').stdout)
    want = model.chat([USER], 12, chat_template_kwargs={"start": "x"})
    assert shown["token_ids"] == want["token_ids"]
    prompts = tmp_path / "prompts"
    prompts.write_text('{"prompt": "And God said"}\n{"tokens": [1, 2]}\n')
    rows = [json.loads(row) for row in run(*words, "--prompts", prompts).stdout.splitlines()]
    assert rows[0]["text"] == model.chat([USER], 12)["text"]
    assert rows[1]["token_ids"] == model.generate([1, 2], 12)["token_ids"]


def test_wrong_use(folder: Path, tmp_path: Path) -> None:
    generate = ["generate", folder, "--prompt", "a"]
    for option in ("--system", "--chat-template", "--chat-template-kwargs"):
        assert f"{option}: only with --chat" in refused(1, *generate, option, "{}")
    assert "exclude each other" in refused(1, *generate, "--chat", "--no-special-tokens")
    tokens = tmp_path / "tokens"
    tokens.write_text("1")
    assert "only with --prompt" in refused(1, "generate", folder, "--chat", "--tokens", tokens)
    for variables, says in (("{", "--chat-template-kwargs: "), ("[]", "expected an object")):
        for words in ([*generate, "--chat"], ["chat", folder]):
            assert says in refused(1, *words, "--chat-template-kwargs", variables, said="a\n")
    assert "refuses them: no" in refused(
        1, *generate, "--chat", "--chat-template-kwargs", '{"start": "x"}',
        "--chat-template", "{{ raise_exception('no') }}")
    assert "line 1" in refused(2, *generate, "--chat", "--chat-template", "{{")
    assert "--temperature" in refused(1, "chat", folder, "--temperature", -1, said="a\n")
    assert "did you mean" in refused(1, "chat", folder, "--temperatur", 1, said="a\n")


def test_a_conversation(folder: Path, model: mm.Model) -> None:
    said = "And God said\nAnd then?\n"
    first, second = answers(folder, said, "--system", "Speak.", "--max-tokens", 12)
    messages = [SYSTEM, USER]
    want = model.chat(messages, 12)
    assert first["text"] == want["text"] and first["token_ids"] == want["token_ids"]
    messages += [{"role": "assistant", "content": first["text"]},
                 {"role": "user", "content": "And then?"}]
    assert second["text"] == model.chat(messages, 12)["text"]
    assert first["cached_tokens"] == 0
    # All but a token or two, which differ where the texts are joined.
    assert second["cached_tokens"] >= first["prompt_tokens"] + 9
    assert first["stop_reason"] == "max_tokens"
    plain = run("chat", folder, *EXACT, "--system", "Speak.", "--max-tokens", 12, said=said)
    assert plain.stdout == f"{first['text']}\n{second['text']}\n"
    whole = run("chat", folder, *EXACT, "--system", "Speak.", "--max-tokens", 12, "--no-stream",
                said=said)
    assert whole.stdout == plain.stdout
    assert plain.stderr.count("cut after 12 tokens; /set max_tokens N") == 2
    assert run("chat", folder, *EXACT, "-q", "--max-tokens", 1, said=said).stderr == ""


def test_commands(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a chat.json"
    text = "And God said"
    said = "\n".join([
        text, "/retry", "/retry", "/undo", text, "/set temperature 0", "/undo", text, "/clear",
        "/system Speak.", text, f"/save '{file}'", "/clear", "/system -", f'/load "{file}"',
        "/retry", "//slash", '"""', "two", "lines", '"""', "one \\", "more", f'/save "{file}"',
        "/exit", text, ""])
    made = answers(folder, said, "--max-tokens", 8, "--seed", 3, "--temperature", 1.5)
    assert len(made) == 10
    assert len({one["text"] for one in made[:3]}) == 3  # Each retry has a seed of its own.
    assert made[3]["text"] == made[0]["text"]
    assert made[4]["text"] != made[3]["text"]
    assert made[6]["text"] == made[5]["text"]
    saved = json.loads(file.read_text())["messages"]
    assert saved[:3] == [{"role": "system", "content": "Speak."},
                         {"role": "user", "content": text},
                         {"role": "assistant", "content": made[5]["text"]}]
    assert [m["content"] for m in saved if m["role"] == "user"][1:] == [
        "/slash", "two\nlines", "one \nmore"]
    done = run("chat", folder, *EXACT, "--max-tokens", 4,
               said=f"/stats\n{text}\n/stats\n/set\n/set top_k 5\n/set\n/system\n/help\n")
    for line in ("messages 0", "messages 2; the context holds 1024 tokens", "4 tokens at",
                 "top_k 0", "top_k 5", "max_tokens 4", "there is no system message",
                 "/retry"):
        assert line in done.stdout, line


def test_every_command_is_known() -> None:
    how_to = (Path(__file__).parents[2] / "docs" / "howto" / "chat.md").read_text()
    for name in chat.COMMANDS:
        assert hasattr(chat.Chat, f"_command_{name}")
        assert f"`/{name}" in how_to
    for name in re.findall(r"`/(\w+)", how_to):
        assert name in chat.COMMANDS


@pytest.mark.parametrize("code, said, says", [
    (1, "/rety", "unknown command '/rety'; did you mean '/retry'?"),
    (1, "/xyz", "unknown command '/xyz'; /help lists them"),
    (1, "/set temperatur 1", "unknown setting 'temperatur'; did you mean 'temperature'?"),
    (1, "/set temperature -1", "temperature: expected 0 or more, got -1"),
    (1, "/set top_k 1.5", "/set top_k: expected a whole number, got '1.5'"),
    (1, "/set max_tokens 0", "/set max_tokens: expected 1 or more, got 0"),
    (1, "/undo", "/undo: there is no message"),
    (1, "/retry", "/retry: there is no message to answer"),
    (1, "/stats now", "/stats: takes no argument, got 'now'"),
    (1, "/save", "/save: expected one file name, got 0"),
    (1, "/save /", "/save: / exists"),
    (3, "/save /absent/file", "/save: /absent/file: No such file"),
    (3, "/load /absent", "/load: /absent: No such file"),
    (1, '"""\nopen', 'begins with """ and does not end with it'),
    (1, "word " * 3000, "tokens, the context holds 1024: write a shorter message"),
])
def test_errors_end_a_script(folder: Path, code: int, said: str, says: str) -> None:
    assert says in refused(code, "chat", folder, said=said + "\n")


def test_wrong_conversations_are_not_loaded(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    for text, says in (("{", "Expecting"), ("{}", 'expected {"messages"'), ("[1]", "messages[0]"),
                       ('[{"role": "me"}]', "messages[0]: expected a role of system, user"),
                       ('[{"role": "system"}]', "messages[0]: expected a text")):
        file.write_text(text)
        assert says in refused(2, "chat", folder, said=f"/load {file}\n")


def test_a_reader_that_goes_away_ends_it(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for more in ([], ["--json"]):
        with os.fdopen(os.dup(writer), "w") as out:
            done = subprocess.run([*COMMAND, "chat", str(folder), "--max-tokens", "2", *more],
                                  input=b"a\nb\n" * 50, stdout=out, stderr=subprocess.PIPE,
                                  check=False)
        assert done.returncode == 0 and b"rror" not in done.stderr, done.stderr
    os.close(writer)


class Screen:
    """A command in a terminal of its own."""

    def __init__(self, *words: object) -> None:
        self.child, self._terminal = pty.fork()
        if self.child == 0:
            os.environ |= {"TERM": "dumb", "MARLIN_CPU": "scalar"}  # Slow enough to interrupt.
            os.execv(COMMAND[0], [*COMMAND, *map(str, words)])
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait(self, pattern: str, seconds: float = 60.0) -> str:
        """Until what was shown since the last call has a pattern; returns what matched."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < end, self.text
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.text += os.read(self._terminal, 4096).decode(errors="replace")
        self.text = self.text[found.end() :]
        return found[0]

    def press(self, keys: str, pattern: str) -> str:
        """Types keys until a pattern is shown. The line editor shows its prompt shortly before it
        reads keys itself, and those that it misses in between are lost."""
        for _ in range(30):
            self.type(keys)
            with contextlib.suppress(AssertionError):
                return self.wait(pattern, 2.0)
        raise AssertionError(self.text)

    def end(self, key: str) -> int:
        """The exit code after a key that ends the program, typed as by `press`; of a program that
        does not end, that of a closed terminal."""
        ended, status = 0, 0
        for turn in range(3000):
            if turn % 200 == 0:
                self.type(key)
            ended, status = os.waitpid(self.child, os.WNOHANG)
            if ended != 0:
                break
            time.sleep(0.01)
        os.close(self._terminal)
        if ended == 0:
            status = os.waitpid(self.child, 0)[1]
        return os.waitstatus_to_exitcode(status)


def test_in_a_terminal(folder: Path) -> None:
    """Errors do not end the conversation, and Ctrl-C ends the answer alone."""
    screen = Screen("chat", folder, *EXACT, "--threads", 1, "--temperature", 2,
                    "--repetition-penalty", 1.2)
    screen.wait("/help lists the commands")
    screen.type("/rety\n")
    screen.wait("error: unknown command '/rety'; did you mean '/retry'")
    for _ in range(10):  # The answer takes a second, and may end before Ctrl-C.
        screen.type("/clear\nAnd God said\n")
        # The message may be shown twice.
        screen.wait("And God said(?s:.{300})")
        screen.type("\x03")
        if screen.press("/stats\n", "ended by [a-z_]+") == "ended by interrupted":
            break
    else:
        raise AssertionError(screen.text)
    screen.type("/set max_tokens 4\n/retry\n")
    screen.wait("cut after 4 tokens")
    screen.wait("> ")
    screen.press("\x03", "Ctrl-D ends the conversation")
    assert screen.end("\x04") == 0


def test_the_command_line_of_a_script_is_killed_by_ctrl_c(folder: Path) -> None:
    """Without a terminal a signal ends the program, as it ends any other."""
    with subprocess.Popen([*COMMAND, "chat", str(folder)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"a\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


def test_an_error_leaves_the_conversation(model: mm.Model) -> None:
    assert model.chat_template is not None
    talk = chat.Conversation(model._core, model.tokenizer, model.chat_template,
                             settings={"max_tokens": 4})

    def fail(piece: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        talk.ask("And God said", fail, lambda: False)
    assert talk.messages == []
    with pytest.raises(InvalidArgumentError, match="no message"):
        talk.answer(print, lambda: False)
    made = talk.ask("And God said", lambda piece: None, lambda: False)
    assert made["text"] == model.chat([USER], 4)["text"]


@pytest.mark.parametrize("variables", [{"messages": []}, {"self": 1}, {"tools": 1}, "abc", [1]])
def test_variables_that_are_none(model: mm.Model, variables: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="^chat_template_kwargs: "):
        model.chat([USER], 2, chat_template_kwargs=variables)


def test_variables_that_are_none_on_the_command_line(folder: Path) -> None:
    done = run("generate", folder, "--prompt=a", "--chat", "--chat-template-kwargs",
               '{"messages": 1}')
    assert done.returncode == 1
    assert "--chat-template-kwargs: cannot set 'messages'" in done.stderr


def test_conversations_that_are_none(model: mm.Model) -> None:
    deep: list[Any] = []
    deep.append({"role": "user", "content": deep})
    wrong: Any
    for wrong in (deep, USER, "Hello", iter([USER]), 5):
        with pytest.raises(InvalidArgumentError, match="^messages"):
            model.chat(wrong, 2)
    with pytest.raises(FileError, match=r"a\.\.\.: no such file"):
        model.chat([USER], 2, chat_template="a" * 5000)
