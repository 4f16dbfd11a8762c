"""Chat templates: where they are found, how they are rendered, and what stops a hostile one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metal_marlin as mm
import pytest
from metal_marlin import chat_template
from metal_marlin.chat_template import ChatTemplate
from metal_marlin.errors import InvalidArgumentError, MalformedFileError

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
USER = [{"role": "user", "content": "Hello"}]
ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def render(text: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate({"default": text}, {"bos_token": "<s>"}, "test.jinja").render(
        messages, **options
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the sample model, which has no template."""
    return Path(shutil.copytree(SAMPLE, tmp_path / "model"))


def write_config(model: Path, **keys: Any) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps(keys))


def found(path: Path, given: Any = None) -> dict[str, str]:
    template = ChatTemplate.find(path, given)
    return {} if template is None else dict(template.templates)


def test_where_templates_are(model: Path) -> None:
    assert ChatTemplate.find(model) is None and mm.load(model, verbose=False).chat_template is None
    write_config(model, chat_template="config", bos_token={"content": "<b>"}, eos_token="<e>",
                 pad_token=None)
    assert found(model) == {"default": "config"}
    template = ChatTemplate.find(model)
    assert template is not None and template.source == "tokenizer_config.json"
    assert template.special_tokens == {"bos_token": "<b>", "eos_token": "<e>"}
    (model / "special_tokens_map.json").write_text('{"bos_token": "<x>", "unk_token": "<u>"}')
    template = ChatTemplate.find(model)
    assert template is not None
    assert template.special_tokens == {"bos_token": "<b>", "eos_token": "<e>", "unk_token": "<u>"}
    write_config(model, chat_template=[{"name": "default", "template": "1"},
                                       {"name": "tool_use", "template": "2"}])
    assert found(model) == {"default": "1", "tool_use": "2"}
    (model / "chat_template.jinja").write_bytes(b"file\r\n")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("3")
    assert found(model) == {"default": "file\n", "tool_use": "2", "rag": "3"}


def test_a_given_template(model: Path, tmp_path: Path) -> None:
    write_config(model, chat_template=[{"name": "rag", "template": "R"}], bos_token="<b>")
    file = tmp_path / "own.jinja"
    file.write_text("{{ bos_token }}own")
    for given, want in ((file, "{{ bos_token }}own"), (str(file), "{{ bos_token }}own"),
                        ("rag", "R"), ("{{ 1 }}", "{{ 1 }}")):
        assert found(model, given) == {"default": want}
    template = ChatTemplate.find(model, file)
    assert template is not None and template.render(USER) == "<b>own"
    with pytest.raises(mm.FileError, match="chat template: absent: no such file.* own are rag"):
        ChatTemplate.find(model, "absent")
    with pytest.raises(InvalidArgumentError, match="none of rag is the default"):
        ChatTemplate(found(model), {}, "x").render(USER)


def test_in_a_gguf_file(model: Path, tmp_path: Path) -> None:
    write_config(model, chat_template=ROLES, bos_token="<|endoftext|>")
    file = tmp_path / "model.gguf"
    mm.export_model(model, file, "gguf")
    loaded = mm.load(file, exact=True, verbose=False)
    assert loaded.chat_template is not None
    assert loaded.chat_template.templates == {"default": ROLES}
    assert loaded.chat_template.special_tokens["bos_token"] == "<|endoftext|>"
    assert loaded.chat(USER, 3)["text"] == mm.load(model, exact=True, verbose=False).chat(
        USER, 3)["text"]
    directory = tmp_path / "directory"
    directory.mkdir()
    shutil.copy(file, directory / "model.gguf")
    assert found(directory) == {"default": ROLES}
    write_config(directory, chat_template="beside")
    assert found(directory) == {"default": "beside"}


def test_a_quantized_directory_keeps_it(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text(ROLES)
    mm.quantize_model(model, tmp_path / "small", "uniform:u4/g32")
    assert found(tmp_path / "small") == {"default": ROLES}


def test_wrong_files(model: Path, tmp_path: Path) -> None:
    for content, says in ((b"[]", "expected an object, got list"), (b"{", "tokenizer_config.json"),
                          (b'{"chat_template": 5}', "expected a text, or a list"),
                          (b'{"chat_template": [{"name": "a"}]}', "expected a text, or a list"),
                          (b'{"chat_template": [{"name": "a", "template": 1}]}', "expected a text"),
                          (b"[" * 100000, "tokenizer_config.json")):
        (model / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(MalformedFileError, match=says):
            ChatTemplate.find(model)
    (model / "tokenizer_config.json").unlink()
    (model / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(MalformedFileError, match="chat_template.jinja"):
        ChatTemplate.find(model)
    secret = tmp_path / "secret.jinja"
    secret.write_text("secret")
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(mm.UnsupportedError, match="outside of the model's directory"):
        ChatTemplate.find(model)
    (model / "chat_template.jinja").unlink()
    (model / "additional_chat_templates").symlink_to(tmp_path)
    with pytest.raises(mm.UnsupportedError, match="outside of the model's directory"):
        ChatTemplate.find(model)


def test_messages() -> None:
    assert render(ROLES + "{{ bos_token }}") == "<user>Hello<s>"
    given = render("{{ add_generation_prompt }}{{ a }}", add_generation_prompt=False, a=1)
    assert given == "False1"
    for messages, says in (
        ([], "messages: expected at least one"),
        (["a"], r"messages\[0\]: expected .*role"),
        ([{"role": "user", "content": object()}], r"messages\[0\].content: .*JSON has, got object"),
        ([{"role": "user", "content": [1, {"a": b""}]}], r"content\[1\].a: .* got bytes"),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            render("{{ messages }}", messages)
    with pytest.raises(InvalidArgumentError, match=r"tools\[1\]: expected values"):
        render("", tools=[{}, print])
    with pytest.raises(InvalidArgumentError, match="exclude each other"):
        render("", continue_final_message=True)
    own = ROLES + "{% if add_generation_prompt %}<a>{% endif %}"
    last = [*USER, {"role": "a", "content": "The "}]
    assert render(own, last, add_generation_prompt=False, continue_final_message=True) == (
        "<user>Hello<a>The "
    )
    with pytest.raises(InvalidArgumentError, match="leaves out the last message"):
        render("x", last, add_generation_prompt=False, continue_final_message=True)


def test_errors_of_a_template_have_a_line() -> None:
    for text, says in (
        ("a\n{{ 1 +", "test.jinja: line 2: unexpected 'end of template'"),
        ("\n\n{{ messages[0].a.b }}", "test.jinja: line 3: 'dict object' has no attribute 'a'"),
        ("{% include 'x' %}", "test.jinja: line 1: no loader"),
        ("{{ ''.__class__.__mro__ }}", "line 1: access to attribute '__class__' .* is unsafe"),
        ("{{ messages.append(1) }}", "line 1: .* unsafe"),
        ("{% set n = namespace(__init__=1) %}", "line 1: a namespace cannot have"),
        ("{{ cycler.__init__.__globals__ }}", "line 1: .* unsafe"),
        ("{{ '%c' | format(0xd800) }}", "characters that UTF-8 does not have"),
        ("{{ 1 // 0 }}", "line 1: .* zero"),
    ):
        with pytest.raises(MalformedFileError, match=says):
            render(text)
    refused = r"^messages: the chat template refuses them: a b \\x1b$"
    with pytest.raises(InvalidArgumentError, match=refused):
        render("{{ raise_exception('a\nb \x1b') }}")


@pytest.fixture(params=["address space", "watch"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both ways in which memory is limited."""
    chat_template._end()
    if request.param == "watch":
        monkeypatch.setattr(chat_template, "_WORKER_ARGUMENTS", ["--watch-memory"])
    yield
    chat_template._end()


LOOP = "{% for i in range(99999) %}"


@pytest.mark.parametrize("text, says", [
    (3 * LOOP + 3 * "{% endfor %}", "takes longer than 1 s"),
    ("{{ 9 ** 9 ** 8 }}{{ (9 ** 999999) ** 99999 }}", "takes longer|digits"),
    ("{% set n = namespace(a='x' * 99) %}" + LOOP + "{% set n.a = n.a + n.a %}{% endfor %}",
     "needs more than 256 MiB"),
    # Little enough that a busy machine fills it before the time ends.
    ("{{ ('x' * 399999999) | length }}", "needs more than 256 MiB"),
    ("{{ '%399999999d' | format(1) | length }}", "needs more than 256 MiB"),
    (LOOP + "{{ 'x' * 99 }}{% endfor %}", "more than 4 MiB"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "recursion|nested|ended the process"),
])
def test_limits(limits: None, text: str, says: str) -> None:
    with pytest.raises(MalformedFileError, match=f"^test.jinja: .*({says})"):
        render(text)
    assert render(ROLES) == "<user>Hello"


def test_a_worker_that_dies_is_replaced() -> None:
    assert render(ROLES) == "<user>Hello"
    assert chat_template._running is not None
    first = chat_template._running._process
    assert render("1") == "1" and chat_template._running._process is first
    first.send_signal(signal.SIGSTOP)
    first.kill()
    with pytest.raises(MalformedFileError, match="ended the process"):
        render(ROLES)
    assert render(ROLES) == "<user>Hello"


def test_threads_and_children() -> None:
    done: list[str] = []

    def work(number: int) -> None:
        done.append(render("{{ x }}" * 5000, x=number))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [str(i) * 5000 for i in range(8)]
    child = os.fork()
    if child == 0:
        os._exit(0 if render("{{ 1 + 1 }}") == "2" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render("{{ 1 + 2 }}") == "3"


def test_the_worker_opens_no_files() -> None:
    """Even code that has left the sandbox."""
    folder = Path(chat_template.__file__).parent
    program = (
        "import os, _template_worker as w\nw.limit_resources(False)\n"
        "try: open(os.devnull)\nexcept OSError as error: print(error.errno)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True,
                          text=True, check=True)
    assert int(done.stdout) > 0


def test_importing_starts_nothing() -> None:
    program = (
        "import metal_marlin, sys; from metal_marlin import chat_template; "
        "print(chat_template._running, 'jinja2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=True)
    assert done.stdout == "None False\n"


def test_an_interrupted_render_leaves_no_answer_to_the_next() -> None:
    assert render("warm") == "warm"
    loops = "{% for a in range(90000) %}{{ '' }}{% endfor %}" * 4
    worker = chat_template._running
    assert worker is not None

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        with pytest.raises(KeyboardInterrupt):
            render(loops + "old")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert render("new") == "new"
