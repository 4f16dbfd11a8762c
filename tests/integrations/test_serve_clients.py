"""The server with the clients of OpenAI and Anthropic, which parse every answer and event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import metal_marlin as mm
import pytest
from serving import (
    NAME,
    USER,
    FakeScheduler,
    app_of,
    make_engine,
    make_folder,
    open_model,
    process,
    served,
)

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

from metal_marlin.serve.limits import Limits  # noqa: E402
from pydantic import BaseModel  # noqa: E402

EXACT = ("--device", "cpu", "--exact", "--batch-invariant")
KEY = "a-key"
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION = {"name": "weather", "description": "Now.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
# The form of Qwen's calls and thinking, by which the server knows them.
FORM = "{# <think></think> <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call> #}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("serve"))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + FORM)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> mm.Model:
    return open_model(folder)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The URL of a server process with the sample model."""
    with process(folder, *EXACT, "--api-key", KEY) as (_, document):
        yield document["url"].rstrip("/")


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(address: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(folder: Path, model: mm.Model) -> Iterator[tuple[Any, Any, FakeScheduler]]:
    """Both clients of a server whose model says what a test gives its scheduler."""
    scheduler = FakeScheduler([10])
    with served(app_of(make_engine(model, scheduler), folder)) as http:
        address = str(http.base_url).rstrip("/")
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0) as one,
            anthropic.Anthropic(base_url=address, api_key="k", max_retries=0) as other,
        ):
            yield one, other, scheduler


def says(scheduler: FakeScheduler, model: mm.Model, text: str) -> int:
    """Lets the model say a text and end; returns the number of its tokens."""
    scheduler.reason = "stop_token"
    scheduler.tokens = model.tokenizer.encode(text, add_special_tokens=False)
    assert model.tokenizer.decode(scheduler.tokens) == text
    return len(scheduler.tokens)


def wanted(model: mm.Model, *messages: dict[str, str]) -> str:
    made = model.chat(list(messages), GREEDY["max_tokens"], temperature=0)
    text: str = made["text"]
    return text


def test_chat(client: Any, model: mm.Model) -> None:
    made = client.chat.completions.create(model=NAME, messages=[USER], **GREEDY)
    assert made.choices[0].message.content == wanted(model, USER)
    assert made.usage.completion_tokens == 12 and made.choices[0].finish_reason == "length"
    parts = list(client.chat.completions.create(
        model=NAME, messages=[USER], stream=True, stream_options={"include_usage": True}, **GREEDY
    ))  # fmt: skip
    text = "".join(part.choices[0].delta.content or "" for part in parts[:-1])
    assert text == wanted(model, USER) and parts[-1].usage.completion_tokens == 12


def test_several_answers(client: Any) -> None:
    made = client.chat.completions.create(
        model=NAME, messages=[USER], n=3, temperature=2, seed=5, max_tokens=12
    )
    texts = [choice.message.content for choice in made.choices]
    assert len(set(texts)) == 3
    again = client.chat.completions.create(
        model=NAME, messages=[USER], n=3, temperature=2, seed=5, max_tokens=12
    )
    assert [choice.message.content for choice in again.choices] == texts


def test_logprobs(client: Any) -> None:
    made = client.chat.completions.create(
        model=NAME, messages=[USER], logprobs=True, top_logprobs=3, **GREEDY
    )
    tokens = made.choices[0].logprobs.content
    assert len(tokens) == 12
    assert bytes(sum((token.bytes for token in tokens), [])).decode() == (
        made.choices[0].message.content
    )
    for token in tokens:
        assert token.top_logprobs[0].logprob == token.logprob < 0
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (top.logprob for top in token.top_logprobs), reverse=True
        )


def test_completions_and_models(client: Any, model: mm.Model) -> None:
    made = client.completions.create(model=NAME, prompt="And God said", temperature=0, max_tokens=8)
    assert made.choices[0].text == model.generate("And God said", 8)["text"]
    parts = client.completions.create(
        model=NAME, prompt="And God said", temperature=0, max_tokens=8, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == made.choices[0].text
    assert [each.id for each in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_errors(client: Any, claude: Any, address: str) -> None:
    def chat(**members: Any) -> Any:
        return client.chat.completions.create(**{"model": NAME, "messages": [USER], **members})

    with pytest.raises(openai.BadRequestError, match="logit_bias: is not supported") as refused:
        chat(logit_bias={"1": 1})
    assert (refused.value.param, refused.value.type) == ("logit_bias", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="'other' is not here"):
        chat(model="other")
    with pytest.raises(openai.BadRequestError, match="tools of type 'web_search'"):
        client.responses.create(model=NAME, input="a", tools=[{"type": "web_search"}])
    wrong = openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="API key"):
        wrong.models.list()
    with pytest.raises(anthropic.BadRequestError, match="container: is not supported") as other:
        claude.messages.create(model=NAME, max_tokens=9, messages=[USER], container="c")
    assert other.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=9, messages=[USER])
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=address, api_key="wrong", max_retries=0).messages.create(
            model=NAME, max_tokens=9, messages=[USER]
        )


def test_errors_of_the_engine(scripted: Any) -> None:
    client, claude, scheduler = scripted
    chat = {"model": NAME, "messages": [USER], "max_tokens": 9}
    for stream in (False, True):
        scheduler.error = MemoryError("full")
        with pytest.raises((openai.InternalServerError, openai.APIError)):
            list(client.chat.completions.create(**chat, stream=stream))
        scheduler.error = MemoryError("full")
        with pytest.raises(anthropic.APIStatusError) as error:
            list(claude.messages.create(**chat, stream=stream))
        assert error.value.type == "api_error"
    scheduler.error = MemoryError("full")
    kinds = [event.type for event in client.responses.create(model=NAME, input="a", stream=True)]
    assert kinds[-1] == "response.failed"
    scheduler.most = 0
    for error, call in (
        (openai.RateLimitError, lambda: client.chat.completions.create(**chat)),
        (openai.RateLimitError, lambda: client.responses.create(model=NAME, input="a")),
        (anthropic.RateLimitError, lambda: claude.messages.create(**chat)),
    ):
        with pytest.raises(error):
            call()


def test_async_clients(address: str, model: mm.Model) -> None:
    async def run() -> None:
        async with (
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY) as one,
            anthropic.AsyncAnthropic(base_url=address, api_key=KEY) as other,
        ):
            chats = [
                one.chat.completions.create(model=NAME, messages=[USER], **GREEDY)
                for _ in range(4)
            ]
            answers = [
                other.messages.create(model=NAME, messages=[USER], max_tokens=12,
                                      extra_body={"temperature": 0})
                for _ in range(4)
            ]  # fmt: skip
            made = await asyncio.gather(*chats, *answers)
            texts = [each.choices[0].message.content for each in made[:4]]
            texts += [each.content[0].text for each in made[4:]]
            assert set(texts) == {wanted(model, USER)}
            stream = await one.chat.completions.create(
                model=NAME, messages=[USER], stream=True, **GREEDY
            )
            text = [part.choices[0].delta.content or "" async for part in stream]
            assert "".join(text) == texts[0]
            async with other.messages.stream(
                model=NAME, messages=[USER], max_tokens=12, extra_body={"temperature": 0}
            ) as events:
                assert "".join([text async for text in events.text_stream]) == texts[0]

    asyncio.run(run())


def test_tools_of_chat(scripted: Any, model: mm.Model) -> None:
    client, _, scheduler = scripted
    count = says(scheduler, model, "Let me see." + CALL)
    asked: Any = {"model": NAME, "messages": [USER], "tools": [TOOL], "max_tokens": count}
    choice = client.chat.completions.create(**asked).choices[0]
    call = choice.message.tool_calls[0]
    assert choice.message.content == "Let me see."
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert streamed.tool_calls[0].function.arguments == call.function.arguments
    messages = [USER, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    asked = {**asked, "messages": messages, "max_tokens": says(scheduler, model, "It rains.")}
    assert client.chat.completions.create(**asked).choices[0].message.content == "It rains."


def test_responses(client: Any, model: mm.Model) -> None:
    asked: Any = {"model": NAME, "input": "And God said", "instructions": "Speak.",
                  "temperature": 0, "max_output_tokens": 12}  # fmt: skip
    text = wanted(model, {"role": "system", "content": "Speak."}, USER)
    included = ["message.output_text.logprobs"]
    made = client.responses.create(**asked, top_logprobs=2, include=included)
    assert made.output_text == text and made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage.output_tokens == 12 == len(made.output[0].content[0].logprobs)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == text
    assert client.responses.retrieve(made.id).output_text == text
    second = client.responses.create(model=NAME, input="More", previous_response_id=made.id,
                                     temperature=0, max_output_tokens=12)  # fmt: skip
    assert second.output_text == wanted(
        model, USER, {"role": "assistant", "content": text}, {"role": "user", "content": "More"}
    )
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="no response has the id"):
        client.responses.create(model=NAME, input="a", previous_response_id=made.id)


def test_tools_and_reasoning_of_responses(scripted: Any, model: mm.Model) -> None:
    client, _, scheduler = scripted
    count = says(scheduler, model, "<think>Hm.</think>Let me see." + CALL)
    tools = [{"type": "function", **FUNCTION, "strict": False}]
    asked: Any = {"model": NAME, "tools": tools, "max_output_tokens": count, "store": False,
                  "include": ["reasoning.encrypted_content"]}  # fmt: skip
    made = client.responses.create(input="a", **asked)
    reasoning, message, call = made.output
    assert reasoning.content[0].text == "Hm." and message.content[0].text == "Let me see."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    with client.responses.stream(input="a", **asked) as stream:
        streamed = stream.get_final_response()
    assert [item.type for item in streamed.output] == ["reasoning", "message", "function_call"]
    assert streamed.output[2].arguments == call.arguments
    later = [
        {"role": "user", "content": "a"}, *(item.to_dict() for item in made.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]  # fmt: skip
    asked["max_output_tokens"] = says(scheduler, model, "It rains.")
    assert client.responses.create(input=later, **asked).output_text == "It rains."


def test_messages(claude: Any, model: mm.Model) -> None:
    asked: Any = {"model": NAME, "messages": [USER], "max_tokens": 12, "system": "Speak.",
                  "extra_body": {"temperature": 0}}  # fmt: skip
    text = wanted(model, {"role": "system", "content": "Speak."}, USER)
    made = claude.messages.create(**asked)
    assert made.content[0].text == text and made.stop_reason == "max_tokens"
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage.output_tokens == 12
    count = claude.messages.count_tokens(model=NAME, messages=[USER], system="Speak.")
    usage = made.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens
    beta = claude.beta.messages.create(**asked, betas=["context-management-2025-06-27"],
                                       context_management={"edits": []})  # fmt: skip
    assert beta.context_management.applied_edits == []


def test_tools_and_thinking_of_messages(scripted: Any, model: mm.Model) -> None:
    _, claude, scheduler = scripted
    count = says(scheduler, model, "<think>Hm.</think>Let me see." + CALL)
    tools = [{"name": "weather", "description": "Now.", "input_schema": SCHEMA}]
    asked: Any = {"model": NAME, "max_tokens": count, "tools": tools,
                  "tool_choice": {"type": "auto"},
                  "thinking": {"type": "enabled", "budget_tokens": 1024}}  # fmt: skip
    made = claude.messages.create(messages=[USER], **asked)
    thinking, said, call = made.content
    assert thinking.thinking == "Hm." and said.text == "Let me see."
    assert (call.name, call.input) == ("weather", {"city": "Oslo"})
    with claude.messages.stream(messages=[USER], **asked) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
    assert streamed.content[2].input == call.input
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]
    later = [USER, {"role": "assistant", "content": made.content},
             {"role": "user", "content": results}]  # fmt: skip
    asked["max_tokens"] = says(scheduler, model, "It rains.")
    said = claude.messages.create(messages=later, **asked)
    assert said.content[0].text == "It rains." and said.stop_reason == "end_turn"


class City(BaseModel):
    city: Literal["Oslo", "Rome"]


def test_structured_outputs(client: Any, claude: Any) -> None:
    made = client.chat.completions.parse(
        model=NAME, messages=[USER], response_format=City, temperature=0, max_tokens=300
    )
    assert isinstance(made.choices[0].message.parsed, City)
    response = client.responses.parse(
        model=NAME, input="a", text_format=City, temperature=0, max_output_tokens=300
    )
    assert isinstance(response.output_parsed, City)
    message = claude.messages.parse(
        model=NAME, messages=[USER], output_format=City, max_tokens=300,
        extra_body={"temperature": 0},
    )  # fmt: skip
    assert isinstance(message.parsed_output, City)


def test_a_tool_that_must_be_called(client: Any, claude: Any) -> None:
    function = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", function):
        made = client.chat.completions.create(
            model=NAME, messages=[USER], tools=[TOOL], tool_choice=choice, temperature=0,
            max_tokens=300, parallel_tool_calls=False,
        )  # fmt: skip
        (call,) = made.choices[0].message.tool_calls
        assert call.function.name == "weather" and "city" in json.loads(call.function.arguments)
        assert made.choices[0].finish_reason == "tool_calls"
    message = claude.messages.create(
        model=NAME, messages=[USER], max_tokens=300, extra_body={"temperature": 0},
        tools=[{"name": "weather", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    )  # fmt: skip
    assert message.stop_reason == "tool_use" and "city" in message.content[-1].input
    response = client.responses.create(
        model=NAME, input="a", tools=[{"type": "function", **FUNCTION, "strict": False}],
        tool_choice="required", parallel_tool_calls=False, temperature=0, max_output_tokens=300,
    )  # fmt: skip
    assert response.output[-1].type == "function_call" and response.status == "completed"


def test_a_key_is_asked_for(folder: Path, model: mm.Model) -> None:
    engine = make_engine(model, FakeScheduler([10]))
    with served(app_of(engine, folder, limits=Limits(api_key="k"))) as http:
        address = str(http.base_url).rstrip("/")
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=address, auth_token="x", max_retries=0).models.list()
        claude = anthropic.Anthropic(base_url=address, auth_token="k", max_retries=0)
        assert claude.messages.create(model=NAME, max_tokens=2, messages=[USER]).content
