"""The chat page in a browser, with answers that are scripts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
playwright = pytest.importorskip("playwright.sync_api")

from page_server import KEY, Script, make_app, serve, tokens_of  # noqa: E402

CHROMIUM = os.environ.get("MARLIN_CHROMIUM") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 860}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Chat:
    """The page in a browser of its own, which fails at every error of a script."""

    def __init__(self, browser: Any, script: Script, address: str, **options: Any) -> None:
        self.script, self.address = script, address
        self.context = browser.new_context(viewport=options.pop("viewport", DESK), **options)
        self.context.set_default_timeout(20000)
        self.problems: list[str] = []
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._console)
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))

    def _console(self, message: Any) -> None:
        # The browser reports answers with an error status itself.
        if message.type == "error" and "status of" not in message.text:
            self.problems.append(message.text)

    def open(self) -> Chat:
        self.page.goto(self.address)
        self.page.wait_for_selector("#welcome h2, .message")
        return self

    def send(self, text: str, *, wait: bool = True) -> None:
        count = self.page.locator(".message").count()
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")
        if wait:
            self.page.locator(".message").nth(count + 1).wait_for()
            self.idle()

    def idle(self) -> None:
        """Until no answer is coming."""
        self.page.wait_for_selector("#stop", state="hidden")

    def texts(self) -> list[str]:
        shown = ".message.user .bubble, .message.assistant .markdown"
        return [text.strip() for text in self.page.locator(shown).all_inner_texts()]

    def shown(self, selector: str) -> Any:
        found = self.page.locator(selector)
        found.first.wait_for()
        return found


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def chat(browser: Any, script: Script) -> Iterator[Chat]:
    with serve(make_app(script)) as address:
        made = Chat(browser, script, address)
        yield made
        made.context.close()
        assert made.problems == []


def test_a_message_and_its_answer(chat: Chat) -> None:
    chat.open()
    chat.script.say("It is **bold", "** and `code`.\n\n", "- one\n- two\n")
    chat.send("Hello there")
    assert chat.texts()[0] == "Hello there"
    assert chat.shown(".markdown strong").inner_text() == "bold"
    assert chat.shown(".markdown li").all_inner_texts() == ["one", "two"]
    asked = chat.script.requests[0]
    assert asked["messages"] == [{"role": "user", "content": "Hello there"}]
    assert asked["stream"] and asked["stream_options"] == {"include_usage": True}
    assert asked["model"] == "tiny-fp4" and "temperature" not in asked
    footer = chat.shown("#statistics").inner_text()
    for words in ("tokens/s", "First token", "1,234 + 3", "Cached 1,200", "KV cache 12 %"):
        assert words in footer
    assert "Hello" in chat.page.title()


def test_lines_of_a_message(chat: Chat) -> None:
    chat.open()
    chat.page.fill("#message", "one")
    chat.page.press("#message", "Shift+Enter")
    chat.page.keyboard.type("two")
    chat.page.press("#message", "Enter")
    chat.idle()
    assert chat.script.requests[0]["messages"][0]["content"] == "one\ntwo"


def test_a_reload_keeps_conversations(chat: Chat) -> None:
    chat.open()
    chat.script.say("First answer.")
    chat.send("First")
    chat.page.click("#new-chat")
    chat.script.say("Second answer.")
    chat.send("Second")
    assert len(chat.script.requests[1]["messages"]) == 1
    chat.page.reload()
    chat.shown(".message.assistant")
    assert chat.texts() == ["Second", "Second answer."]
    assert chat.page.locator(".row .open").all_inner_texts() == ["Second", "First"]
    chat.page.click(".row .open >> text=First")
    assert chat.texts() == ["First", "First answer."]
    chat.script.say("Third answer.")
    chat.send("More")
    assert [m["content"] for m in chat.script.requests[2]["messages"]] == [
        "First", "First answer.", "More"]  # fmt: skip


def test_stop(chat: Chat) -> None:
    chat.open()
    chat.script.answers.append([{"content": "Once upon"}, {"wait": True}])
    chat.send("Tell", wait=False)
    chat.shown("text=Once upon")
    assert chat.page.get_by_role("article", name="").last.get_attribute("aria-busy") == "true"
    chat.page.get_by_role("button", name="Stop the answer").click()
    chat.idle()
    assert chat.script.cancelled.wait(10)
    assert chat.texts() == ["Tell", "Once upon"]
    assert chat.shown(".note").inner_text() == "Stopped."
    chat.script.answers.append([{"content": "Again"}, {"wait": True}])
    chat.send("And?", wait=False)
    chat.shown("text=Again")
    chat.page.keyboard.press("Escape")
    chat.idle()
    assert [m["content"] for m in chat.script.requests[1]["messages"]] == [
        "Tell", "Once upon", "And?"]  # fmt: skip


def test_a_reload_while_an_answer_comes(chat: Chat) -> None:
    chat.open()
    chat.script.answers.append([{"content": "Once upon"}, {"wait": True}])
    chat.send("Tell", wait=False)
    chat.shown("text=Once upon")
    chat.page.reload()
    assert chat.shown(".note:visible").inner_text() == "Stopped."
    assert chat.texts() == ["Tell", "Once upon"]
    assert chat.script.cancelled.wait(10)


def test_retry_and_undo(chat: Chat) -> None:
    chat.open()
    chat.script.say("One.")
    chat.send("Count")
    chat.script.say("Two.")
    chat.page.get_by_role("button", name="Answer again").click()
    chat.shown("text=Two.")
    chat.idle()
    assert chat.texts() == ["Count", "Two."]
    assert chat.script.requests[1]["messages"] == [{"role": "user", "content": "Count"}]
    chat.page.click("#toast >> text=Undo")
    assert chat.texts() == ["Count", "One."]


def test_edit_a_message(chat: Chat) -> None:
    chat.open()
    for text in ("A", "B"):
        chat.script.say(f"Answer {text}")
        chat.send(text)
    message = chat.page.locator(".message.user").first
    message.hover()
    message.get_by_role("button", name="Edit").click()
    chat.script.say("Answer C")
    field = chat.page.get_by_role("textbox", name="Your message")
    field.fill("C")
    field.press("Enter")
    chat.shown("text=Answer C")
    chat.idle()
    assert chat.texts() == ["C", "Answer C"]
    assert chat.script.requests[2]["messages"] == [{"role": "user", "content": "C"}]
    chat.page.click("#toast >> text=Undo")
    assert chat.texts() == ["A", "Answer A", "B", "Answer B"]
    chat.page.press("#message", "ArrowUp")
    field = chat.page.get_by_role("textbox", name="Your message")
    assert field.input_value() == "B"
    field.press("Escape")
    answer = chat.page.locator(".message.assistant").last
    answer.get_by_role("button", name="Edit").click()
    chat.page.get_by_role("textbox", name="The answer").fill("My answer")
    chat.page.click(".editor >> text=Save")
    chat.send("D")
    assert chat.script.requests[3]["messages"][3] == {"role": "assistant", "content": "My answer"}


HOSTILE = """<img src=x onerror="alert(1)"> <script>alert(2)</script>

<div onclick="alert(3)">click</div>

[a](javascript:alert(4)) [b](JaVaScRiPt:alert(5)) [c](data:text/html,<script>alert(6)</script>)
[d](vbscript:x) [e](&#106;avascript:alert(7)) <javascript:alert(8)> [f](//evil.example/x)
![g](javascript:alert(9)) ![h](https://evil.example/pixel.png) [i](https://good.example/?a=1&b=2)
[j](https://good.example "a\\" onmouseover=alert(10)")

| a | b |
|---|---|
| <svg onload=alert(11)> | `<b>` |

```html" onload="alert(12)
<script>alert(13)</script>
```

<style>body { display: none }</style><iframe src="javascript:alert(14)"></iframe>
"""


def test_hostile_answers_do_nothing(chat: Chat) -> None:
    asked: list[str] = []
    chat.page.on("request", lambda request: asked.append(request.url))
    chat.open()
    chat.script.answers.append([
        {"reasoning_content": "<img src=x onerror=alert(15)>"},
        *({"content": HOSTILE[i : i + 7]} for i in range(0, len(HOSTILE), 7)),
        {"tool_calls": [{"index": 0, "id": "1", "function": {
            "name": "<img src=x onerror=alert(16)>",
            "arguments": json.dumps({"<b>": "<script>alert(17)</script>"})}}]},
    ])  # fmt: skip
    chat.send("<img src=x onerror=alert(18)>")
    shown = chat.page.locator("#thread")
    for tag in ("img", "script", "style", "iframe", "svg:not(.icon)", "b", "[onclick]", "[onload]",
                "[onmouseover]"):  # fmt: skip
        assert shown.locator(tag).count() == 0, tag
    links = shown.locator("a").evaluate_all("all => all.map(a => a.href)")
    assert links == ["https://evil.example/pixel.png", "https://good.example/?a=1&b=2",
                     "https://good.example/"]  # fmt: skip
    for link in shown.locator("a").all():
        assert link.get_attribute("rel") == "noopener noreferrer"
    for click in (".no-link", ".raw"):
        shown.locator(click).first.click()
    assert '<img src=x onerror="alert(1)">' in shown.inner_text()
    assert all(url.startswith(chat.address) for url in asked), asked
    # The policy stops what a fault of the page would let through.
    stopped = chat.page.evaluate("""() => {
      try { document.body.innerHTML = '<img src=x onerror=alert(19)>'; return false; }
      catch { return true; }
    }""")
    assert stopped
    chat.problems = [each for each in chat.problems if "TrustedHTML" not in each]


def test_headers(chat: Chat) -> None:
    files = ["", "page/main.js", "page/style.css", "page/marked/Lexer.js", "page/icon.svg"]
    for file in files:
        answer = chat.context.request.get(chat.address + file)
        assert answer.ok, file
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
    assert not chat.context.request.get(chat.address + "page/../__init__.py").ok
    assert not chat.context.request.get(chat.address + "page/marked/README.md").ok


def test_thoughts_and_calls(chat: Chat) -> None:
    chat.open()
    call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": ""}}
    chat.script.answers.append([
        {"reasoning_content": "The user wants "}, {"reasoning_content": "the weather."},
        {"content": "I look."}, {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Sofia",'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "days": 3}'}}]},
    ])  # fmt: skip
    chat.send("Weather?")
    thought = chat.page.locator(".thought")
    assert not thought.is_visible()
    chat.page.click(".reasoning summary")
    assert thought.inner_text() == "The user wants the weather."
    assert chat.shown(".call summary").inner_text().strip() == "Calls get_weather"
    assert chat.shown(".arguments dd").all_inner_texts() == ["Sofia", "3"]
    chat.script.say("Sunny.")
    chat.page.get_by_label("Result of get_weather").fill('{"sky": "clear"}')
    chat.page.click("text=Send results")
    chat.shown("text=Sunny.")
    chat.idle()
    asked = chat.script.requests[1]["messages"]
    assert asked[1]["tool_calls"] == [{"id": "call_1", "type": "function", "function": {
        "name": "get_weather", "arguments": '{"city": "Sofia", "days": 3}'}}]  # fmt: skip
    assert asked[2] == {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "clear"}'}
    assert "Result of get_weather" in chat.page.locator(".message.tool").inner_text()


def test_settings(chat: Chat) -> None:
    chat.open()
    chat.page.get_by_role("button", name="Settings").click()
    dialog = chat.page.get_by_role("dialog", name="Settings")
    assert dialog.get_by_label("Temperature").get_attribute("placeholder") == "0.7"
    dialog.get_by_label("System prompt").fill("Be brief.")
    dialog.get_by_label("Temperature").fill("-1")
    dialog.get_by_label("JSON schema of the answer").fill("{")
    dialog.get_by_role("button", name="Save").click()
    problems = " ".join(dialog.get_by_role("alert").all_inner_texts())
    assert "0 or more." in problems and "JSON schema" in problems
    dialog.get_by_label("Temperature").fill("0.25")
    dialog.get_by_label("Max tokens").fill("77")
    dialog.get_by_label("Seed").fill("5")
    dialog.get_by_label("JSON schema of the answer").fill('{"type": "object"}')
    dialog.get_by_role("button", name="Save").click()
    chips = chat.page.locator("#chips .chip").all_inner_texts()
    assert chips == ["system prompt", "temperature 0.25", "seed 5", "max tokens 77", "JSON schema"]
    chat.send("Hello")
    asked = chat.script.requests[0]
    assert (asked["temperature"], asked["max_tokens"], asked["seed"]) == (0.25, 77, 5)
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert asked["response_format"]["json_schema"]["schema"] == {"type": "object"}
    chat.page.get_by_role("button", name="Answer again").click()
    chat.idle()
    assert chat.script.requests[1]["seed"] != 5
    chat.page.reload()
    chat.shown(".message")
    chat.page.get_by_role("button", name="Settings").click()
    assert dialog.get_by_label("Temperature").input_value() == "0.25"
    assert dialog.get_by_label("System prompt").input_value() == "Be brief."
    dialog.get_by_role("button", name="Defaults").click()
    dialog.get_by_role("button", name="Save").click()
    chat.send("More")
    assert "temperature" not in chat.script.requests[2]


def test_errors_in_words(chat: Chat) -> None:
    chat.open()
    for status, message, words in (
        (429, "queue", "The server is busy"),
        (400, "temperature: expected 0 or more", "temperature: expected 0 or more"),
        (500, "broken", "The server failed. broken"),
    ):
        chat.script.error = (status, message)
        chat.send(f"Hello {status}")
        assert words in chat.shown(".note.error:visible").last.inner_text()
    assert chat.script.requests[2]["messages"] == [
        {"role": "user", "content": "Hello 429\n\nHello 400\n\nHello 500"}]
    chat.page.route("**/v1/chat/completions", lambda route: route.abort())
    chat.send("Hello")
    assert "cannot be reached" in chat.shown(".note.error:visible").last.inner_text()
    # An answer without a part of the end is not taken for whole.
    chat.page.unroute("**/v1/chat/completions")
    chat.page.route("**/v1/chat/completions", lambda route: route.fulfill(
        content_type="text/event-stream",
        body='data: {"choices": [{"index": 0, "delta": {"content": "Half"}}]}\n\n'))
    chat.send("Hello")
    assert "connection was lost" in chat.shown(".note.error:visible").last.inner_text()
    assert chat.texts()[-1] == "Half"
    chat.problems = [each for each in chat.problems if "ERR_FAILED" not in each]


def test_the_api_key(browser: Any, script: Script) -> None:
    script.needs_key = True
    with serve(make_app(script)) as address:
        chat = Chat(browser, script, address).open()
        dialog = chat.page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key").fill("wrong")
        dialog.get_by_role("button", name="Use this key").click()
        # Functions that wait in the page would need eval, which the policy forbids.
        playwright.expect(dialog.get_by_label("Key")).to_have_value("")
        dialog.get_by_label("Key").fill(KEY)
        dialog.get_by_role("button", name="Use this key").click()
        chat.shown("#model:has-text('tiny-fp4')")
        chat.send("Hello")
        assert chat.texts() == ["Hello", "Yes."]
        assert KEY not in chat.page.evaluate("JSON.stringify(localStorage)")
        chat.context.close()
        assert chat.problems == []


def test_the_list(chat: Chat) -> None:
    chat.open()
    for text in ("One", "Two"):
        chat.page.click("#new-chat")
        chat.send(text)
    row = chat.page.locator(".row").last
    row.hover()
    row.get_by_role("button", name="Rename One").click()
    chat.page.get_by_label("Name of the conversation").fill("Uno")
    chat.page.keyboard.press("Enter")
    names = chat.page.locator(".row .open")
    assert names.all_inner_texts() == ["Two", "Uno"]
    chat.page.locator(".row").first.hover()
    chat.page.get_by_role("button", name="Delete Two").click()
    assert names.all_inner_texts() == ["Uno"] and chat.texts() == []
    chat.page.click("#toast >> text=Undo")
    assert names.all_inner_texts() == ["Two", "Uno"] and chat.texts()[0] == "Two"


def test_a_deleted_conversation_does_not_come_back(chat: Chat) -> None:
    chat.open()
    chat.script.answers.append([{"content": "Once"}, {"wait": True}])
    chat.send("Tell", wait=False)
    chat.shown("text=Once")
    chat.page.locator(".row").first.hover()
    chat.page.get_by_role("button", name="Delete Tell").click()
    assert chat.script.cancelled.wait(10)
    chat.send("Other")
    assert chat.page.locator(".row .open").all_inner_texts() == ["Other"]
    chat.page.reload()
    chat.shown(".message")
    assert chat.page.locator(".row .open").all_inner_texts() == ["Other"]


def test_export_and_import(chat: Chat, tmp_path: Path) -> None:
    chat.open()
    chat.page.get_by_role("button", name="Settings").click()
    chat.page.get_by_label("System prompt").fill("Speak.")
    chat.page.click("#settings >> text=Save")
    chat.send("One")
    chat.page.locator(".row").first.hover()
    with chat.page.expect_download() as started:
        chat.page.get_by_role("button", name="Export One").click()
    saved = json.loads(Path(started.value.path()).read_text())
    messages = [{"role": "system", "content": "Speak."}, {"role": "user", "content": "One"},
                {"role": "assistant", "content": "Yes."}]  # fmt: skip
    assert saved["messages"] == messages
    with chat.page.expect_download() as started:
        chat.page.click("#export-all")
    assert len(json.loads(Path(started.value.path()).read_text())["conversations"]) == 1
    file = tmp_path / "saved.json"
    for document in ({"messages": messages}, messages, {"conversations": [saved]}):
        file.write_text(json.dumps(document))
        count = chat.page.locator(".row").count()
        with chat.page.expect_file_chooser() as chooser:
            chat.page.click("#import")
        chooser.value.set_files(file)
        chat.page.locator(".row").nth(count).wait_for()
        assert chat.texts() == ["One", "Yes."]
    file.write_text('{"messages": [{"role": "me"}]}')
    with chat.page.expect_file_chooser() as chooser:
        chat.page.click("#import")
    chooser.value.set_files(file)
    chat.shown("#toast:has-text('none of the roles')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours(browser: Any, script: Script, scheme: str) -> None:
    with serve(make_app(script)) as address:
        chat = Chat(browser, script, address, color_scheme=scheme).open()

        def background() -> int:
            value = chat.page.evaluate("getComputedStyle(document.body).backgroundColor")
            return int(value.removeprefix("rgb(").split(",")[0])

        assert (background() > 200) == (scheme == "light")
        other = "dark" if scheme == "light" else "light"
        while chat.page.locator("html").get_attribute("data-theme") != other:
            chat.page.get_by_role("button", name="Colours").click()
        assert (background() > 200) == (other == "light")
        chat.page.reload()
        chat.shown("#welcome h2")
        assert (background() > 200) == (other == "light")
        chat.context.close()


def test_names_for_screen_readers(chat: Chat) -> None:
    chat.open()
    chat.script.say("```python\nx = 1\n```\n")
    chat.send("Code")
    for role, name in (("navigation", "Conversations"), ("log", "Messages"),
                       ("textbox", "Message"), ("button", "Send"), ("button", "Settings"),
                       ("button", "New chat"), ("button", "Copy code"),
                       ("button", "Answer again")):  # fmt: skip
        assert chat.page.get_by_role(role, name=name, exact=True).count() == 1, (role, name)
    for selector in ("button:visible", "input:visible", "textarea:visible"):
        for control in chat.page.locator(selector).all():
            label = control.evaluate(
                "e => e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText"
            )
            assert label and label.strip(), control.evaluate("e => e.outerHTML")
    assert "Answer complete" in chat.page.locator("#status").inner_text()
    assert chat.page.locator("#status").get_attribute("aria-live") == "polite"


def test_a_phone(browser: Any, script: Script) -> None:
    with serve(make_app(script)) as address:
        chat = Chat(browser, script, address, viewport=PHONE, has_touch=True).open()
        chat.script.say("A long line of code:\n\n```\n", "word " * 100, "\n```\n\n", "x" * 400)
        chat.send("Hello")
        width = chat.page.evaluate("document.scrollingElement.scrollWidth")
        assert width == PHONE["width"]
        thread = chat.page.evaluate("document.querySelector('#scroll').scrollWidth")
        assert thread <= PHONE["width"]
        side = chat.page.locator("#side")
        assert not side.is_visible()
        chat.page.get_by_role("button", name="Conversations").click()
        chat.page.get_by_role("button", name="Hello", exact=True).click()
        side.wait_for(state="hidden")
        chat.context.close()
        assert chat.problems == []


def _scored(texts: list[str], difference: float) -> dict[str, Any]:
    def one(number: int, text: str, logprob: float) -> dict[str, Any]:
        top = [{"id": number, "text": text, "logprob": logprob},
               {"id": 99, "text": " other", "logprob": -1.5}]  # fmt: skip
        return {"logprob": logprob, "top": sorted(top, key=lambda each: -each["logprob"])}

    return {"tokens": [
        {"id": i, "text": text, "own": one(i, text, -0.5),
         "other": one(i, text, -0.5 + difference * i)}
        for i, text in enumerate(texts)
    ]}  # fmt: skip


def test_compare(browser: Any, script: Script) -> None:
    script.compares = True
    mine, other = "the small model says", "the large one does"
    with serve(make_app(script)) as address:
        chat = Chat(browser, script, address).open()
        script.say(mine)
        chat.send("Hello")
        assert script.requests[0]["return_token_ids"] is True
        script.say(other)
        script.scores = [_scored(tokens_of(mine), -1.0), _scored(tokens_of(other), 0.1)]
        chat.page.get_by_role("button", name="Compare").click()
        dialog = chat.page.get_by_role("dialog", name="tiny-fp4 beside tiny")
        first = dialog.get_by_role("listbox", name="Tokens, Answer of tiny-fp4")
        second = dialog.get_by_role("listbox", name="Tokens, Answer of tiny", exact=True)
        second.get_by_role("option").nth(3).wait_for()
        asked = script.requests[1]
        assert asked["messages"] == [{"role": "user", "content": "Hello"}]
        assert asked["token_ids"] == [0, 1, 2, 3]
        assert asked.keys() == {"messages", "token_ids", "top_logprobs"}
        classes = [each.get_attribute("class") or ""
                   for each in first.get_by_role("option").all()]  # fmt: skip
        assert [each.split()[1:2] for each in classes] == [[], ["less-2"], ["less-2"], ["less-3"]]
        assert ["changed" in each for each in classes] == [False, False, True, True]
        first.get_by_role("option").first.focus()
        chat.page.keyboard.press("End")
        name = first.get_by_role("option", selected=True).get_attribute("aria-label")
        assert name == "␣says: 60.7 % under tiny-fp4, 3.02 % under tiny"
        detail = dialog.get_by_label("The token", exact=True)
        assert "difference −3.00 nats" in detail.inner_text()
        assert "␣other" in detail.inner_text()
        dialog.get_by_label("Probability").check(force=True)
        last = first.get_by_role("option").last.get_attribute("class") or ""
        assert "rare-3" in last
        chat.page.keyboard.press("Escape")
        dialog.wait_for(state="hidden")
        chat.context.close()
        assert chat.problems == []


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`metal-marlin serve` of a quantized model, with the original to compare with."""
    folder = Path(shutil.copytree(SAMPLE, tmp_path_factory.mktemp("page") / "tiny"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "metal_marlin.cli"]
    small = folder.with_name("tiny-u4")
    made = subprocess.run([*command, "quantize", folder, "-o", small, "--recipe", "uniform:u4/g64"],
                          capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    words = ["serve", small, "--compare", folder, "--port", "0", "--json", "--device", "cpu"]
    with subprocess.Popen([*command, *map(str, words)], stdout=subprocess.PIPE,
                          text=True) as running:
        try:
            assert running.stdout is not None
            yield json.loads(running.stdout.readline())["url"] + "/"
        finally:
            running.kill()


def test_the_whole_server(browser: Any, server: str) -> None:
    chat = Chat(browser, Script(), server).open()
    assert "tiny-u4" in chat.shown("#model").inner_text()
    assert "compared with tiny." in chat.shown("#welcome").inner_text()
    chat.page.get_by_role("button", name="Settings").click()
    chat.page.get_by_label("Max tokens").fill("12")
    chat.page.get_by_label("Temperature").fill("0.5")
    chat.page.click("#settings >> text=Save")
    chat.send("And God said")
    assert chat.texts()[1] != "" and chat.page.locator(".note.error:visible").count() == 0
    assert "First token" in chat.shown("#statistics").inner_text()
    chat.page.get_by_role("button", name="Compare").click()
    dialog = chat.page.get_by_role("dialog", name="tiny-u4 beside tiny")
    for name in ("tiny-u4", "tiny"):
        tokens = dialog.get_by_role("listbox", name=f"Tokens, Answer of {name}", exact=True)
        tokens.get_by_role("option").nth(11).wait_for()
        assert tokens.get_by_role("option").count() == 12
    assert dialog.locator(".verdict dd").nth(1).inner_text().count("under the other") == 1
    chat.context.close()
    assert chat.problems == []
