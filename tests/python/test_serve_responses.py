"""Requests of OpenAI's Responses API, and its events, on deltas made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from metal_marlin.serve.deltas import (
    ContentDelta,
    Delta,
    Finished,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from metal_marlin.serve.fields import FieldError
from metal_marlin.serve.response_events import ResponseEvents
from metal_marlin.serve.response_input import (
    ResponseRequest,
    conversation,
    encode_reasoning,
    read_response_request,
)
from metal_marlin.serve.response_store import ResponseStore
from metal_marlin.serve.thinking import thinking_variables

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "description": "Now.", "parameters": SCHEMA,
        "strict": False}  # fmt: skip
OTHER = {"type": "function", "name": "time", "parameters": None, "strict": None}
USER = {"role": "user", "content": "Hello"}


def read(**members: Any) -> ResponseRequest:
    return read_response_request({"input": "Hello", **members})


def messages(items: list[Any], instructions: str | None = None) -> list[dict[str, Any]]:
    def find(name: str, path: str) -> Any:
        raise FieldError(path, f"no item {name}")

    made = read(input=items)
    return conversation(made.items, instructions, 0, find)


def refused(says: str, **members: Any) -> None:
    with pytest.raises(FieldError) as error:
        messages(read(**members).items)
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


def test_sampling() -> None:
    made = read(model="m", max_output_tokens=9, temperature=0, top_p=0.5, stream=True, store=False,
                metadata={"a": "b"}, user="u", max_tool_calls=3, service_tier="auto",
                parallel_tool_calls=False, truncation="disabled")  # fmt: skip
    assert made.chat == {
        "model": "m", "max_completion_tokens": 9, "temperature": 0, "top_p": 0.5
    }  # fmt: skip
    assert made.stream and not made.store and read().store
    assert made.repeated["metadata"] == {"a": "b"} and made.repeated["max_tool_calls"] == 3
    assert made.repeated["service_tier"] == "default" and made.repeated["tools"] == []
    assert made.repeated["parallel_tool_calls"] is False


def test_what_a_coding_agent_sends() -> None:
    made = read(
        model="m", instructions="Be brief.", tools=[TOOL], tool_choice="auto",
        parallel_tool_calls=True, reasoning={"effort": "high", "summary": "auto"}, store=False,
        stream=True, include=["reasoning.encrypted_content"], prompt_cache_key="k",
        text={"verbosity": "medium"}, stream_options={"include_obfuscation": False},
    )  # fmt: skip
    assert made.effort == "high" and made.encoded_reasoning and made.instructions == "Be brief."
    function = {name: value for name, value in TOOL.items() if name != "type"}
    assert made.chat["tools"] == [{"type": "function", "function": function}]
    assert made.chat["tool_choice"] == "auto" and made.chat["parallel_tool_calls"] is True


def test_messages() -> None:
    parts = [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]
    made = messages(
        [
            {"type": "message", "role": "developer", "content": "Two."},
            {"role": "user", "content": parts},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "C", "annotations": []}]},
            {"role": "developer", "content": "Three."},
            USER,
        ],
        "One.",
    )  # fmt: skip
    assert made == [
        {"role": "system", "content": "One.\n\nTwo."},
        {"role": "user", "content": "A\nB"},
        {"role": "assistant", "content": "C"},
        {"role": "developer", "content": "Three."},
        USER,
    ]


def test_turns_with_tools() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    made = messages([
        USER,
        {**reasoning, "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "See."},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "noon"}]},
        {**reasoning, "encrypted_content": encode_reasoning("Å.")},
        {"type": "function_call", "call_id": "c3", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": "one"},
    ])  # fmt: skip
    assert [message["role"] for message in made] == [
        "user", "assistant", "tool", "tool", "assistant", "tool",
    ]  # fmt: skip
    answer = made[1]
    assert (answer["content"], answer["reasoning_content"]) == ("See.", "Hm.")
    assert [call["id"] for call in answer["tool_calls"]] == ["c1", "c2"]
    assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
    assert made[3] == {"role": "tool", "tool_call_id": "c2", "content": "noon"}
    assert made[4]["reasoning_content"] == "Å." and "content" not in made[4]


def test_tool_choice() -> None:
    tools = [TOOL, OTHER]
    assert read(tools=tools, tool_choice="required").chat["tool_choice"] == "required"
    one = read(tools=tools, tool_choice={"type": "function", "name": "time"})
    assert one.chat["tool_choice"] == {"type": "function", "function": {"name": "time"}}
    assert len(one.chat["tools"]) == 2
    some = read(tools=tools, tool_choice={
        "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]
    })  # fmt: skip
    assert some.chat["tool_choice"] == "required"
    assert some.chat["tools"] == [{"type": "function", "function": {"name": "time"}}]
    assert len(some.repeated["tools"]) == 2


def test_formats() -> None:
    shape = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    made = read(text={"format": shape})
    assert made.chat["response_format"] == {
        "type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}
    }  # fmt: skip
    assert made.repeated["text"] == {"format": shape}
    made = read(text={"format": {"type": "json_object"}})
    assert made.chat["response_format"] == {"type": "json_object"}
    assert "response_format" not in read(text={"format": {"type": "text"}}).chat


def test_refusals() -> None:
    call = {"type": "function_call_output", "call_id": "none", "output": "a"}
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]
    for says, members in (
        ("background: is not supported", {"background": True}),
        ("conversation: is not supported", {"conversation": "c"}),
        ("prompt: is not supported", {"prompt": {"id": "p"}}),
        ("unknown: is not a known field", {"unknown": 1}),
        ("truncation: 'auto' is not supported", {"truncation": "auto"}),
        ("service_tier: 'flex' is not supported", {"service_tier": "flex"}),
        ("text.verbosity: 'low' is not supported", {"text": {"verbosity": "low"}}),
        ("text.format.type: expected", {"text": {"format": {"type": "xml"}}}),
        ("reasoning.summary: 'detailed'", {"reasoning": {"summary": "detailed"}}),
        ("include[0]: expected", {"include": ["file_search_call.results"]}),
        ("tools[0]: tools of type 'web_search' are not", {"tools": [{"type": "web_search"}]}),
        ("tools[0].defer_loading: is not", {"tools": [{**TOOL, "defer_loading": True}]}),
        ("tool_choice: there are no tools", {"tool_choice": "required"}),
        ("tool_choice.type: 'mcp' is not", {"tool_choice": {"type": "mcp"}}),
        ("tool_choice.name: 'x' is not", {"tool_choice": {"type": "function", "name": "x"}}),
        ("stream_options: is only for", {"stream_options": {"include_obfuscation": False}}),
        ("top_logprobs: expected 0..20", {"top_logprobs": 21}),
        ("temperature: expected 0..2", {"temperature": 10**400}),
        ("metadata.a: expected a string", {"metadata": {"a": 1}}),
        ("input: expected an array", {"input": 3}),
        ("input: is required", {"input": None}),
        ("input: has no message", {"input": []}),
        ("input: has half of a surrogate", {"input": "\udc00"}),
        ("input[0]: items of type 'web_search_call'", {"input": [{"type": "web_search_call"}]}),
        ("input[0].role: expected", {"input": [{"role": "tool", "content": "a"}]}),
        ("input[0].content[0]: parts of type 'input_image'", {"input": image}),
        ("input[0].call_id: no function call", {"input": [call]}),
        ("input[0]: no item i", {"input": [{"type": "item_reference", "id": "i"}]}),
        ("input[0].encrypted_content: was not made",
         {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]}),
        ("tools[0].parameters: is nested deeper", {"tools": [{**TOOL, "parameters": nested(200)}]}),
        ("tools[0].parameters: has half", {"tools": [{**TOOL, "parameters": {"\ud800": 1}}]}),
    ):  # fmt: skip
        refused(says, **members)
    with pytest.raises(FieldError, match="body: expected an object, got null"):
        read_response_request(None)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def events(deltas: list[Delta], **members: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    made = ResponseEvents(read(**members), "resp_1", "m")
    shown = made.begin()
    for delta in deltas:
        shown += made.add(delta)
    json.dumps(shown)
    assert [event["sequence_number"] for event in shown] == list(range(len(shown)))
    return shown, made.response


def kinds(shown: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in shown]


def test_an_answer() -> None:
    logprob = TokenLogprob("He", 5, -0.5, (TokenLogprob("He", 5, -0.5),))
    shown, response = events(
        [
            ReasoningDelta("Hm"), ReasoningDelta("."), ContentDelta("He", (logprob,)),
            ContentDelta("llo"), Finished("stop", Usage(7, 5, 4, 2)),
        ],
        include=["reasoning.encrypted_content"],
    )  # fmt: skip
    assert kinds(shown) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert shown[0]["response"]["status"] == "in_progress" and not shown[0]["response"]["output"]
    assert [event["output_index"] for event in shown[2:-1]] == [0] * 7 + [1] * 7
    assert shown[2]["item"]["content"] == [] and shown[2]["item"]["status"] == "in_progress"
    assert {event["item_id"] for event in shown[10:15]} == {shown[9]["item"]["id"]}
    assert shown[11]["logprobs"] == [
        {"token": "He", "bytes": [72, 101], "logprob": -0.5,
         "top_logprobs": [{"token": "He", "bytes": [72, 101], "logprob": -0.5}]}
    ]  # fmt: skip
    reasoning, message = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["encrypted_content"] == encode_reasoning("Hm.")
    assert message["content"][0]["text"] == "Hello" == shown[13]["text"]
    assert message["content"][0]["logprobs"] == shown[11]["logprobs"]
    assert (message["status"], response["status"]) == ("completed", "completed")
    assert shown[-1]["response"] == response and response["usage"] == {
        "input_tokens": 7, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 12,
    }  # fmt: skip


def test_function_calls() -> None:
    shown, response = events([
        ToolCallDelta(0, "a", "f"), ToolCallDelta(0, arguments='{"x'),
        ToolCallDelta(0, arguments='": 1}'), ToolCallDelta(1, "b", "g", "{}"),
        Finished("tool_calls", Usage(7, 5)),
    ])  # fmt: skip
    assert kinds(shown)[2:] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert shown[2]["item"]["arguments"] == "" and shown[5]["arguments"] == '{"x": 1}'
    assert [(item["call_id"], item["name"], item["arguments"]) for item in response["output"]] == [
        ("a", "f", '{"x": 1}'), ("b", "g", "{}"),
    ]  # fmt: skip


def test_an_answer_that_is_cut() -> None:
    shown, response = events([ContentDelta("a"), Finished("length", Usage(7, 5))])
    assert kinds(shown)[-1] == "incomplete" and response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_an_answer_that_fails() -> None:
    made = ResponseEvents(read(), "resp_1", "m")
    shown = [*made.begin(), *made.add(ContentDelta("a")), *made.fail("server_error", "lost")]
    assert kinds(shown)[-2:] == ["output_item.done", "failed"]
    assert shown[-1]["response"]["error"] == {"code": "server_error", "message": "lost"}


def test_a_store_is_bounded() -> None:
    def response(name: str) -> dict[str, Any]:
        return {"id": name, "output": [{"id": f"item_{name}", "type": "message"}]}

    store = ResponseStore(most=2)
    for name in ("a", "b"):
        store.put(response(name), [])
    assert store.get("a") is not None and store.item("item_b") is not None
    store.put(response("c"), [])
    assert store.get("b") is None and store.item("item_b") is None
    assert store.get("a") is not None and store.item("item_c") == {"id": "item_c",
                                                                   "type": "message"}  # fmt: skip
    assert store.delete("a") and not store.delete("a") and store.item("item_a") is None
    small = ResponseStore(most_bytes=200)
    for name in ("a", "b", "c", "d"):
        small.put(response(name), ["x" * 20])
    assert small.get("a") is None and small.get("d") is not None
    small.put(response("large"), ["x" * 300])
    assert small.get("large") is None and small.get("d") is not None


@pytest.mark.parametrize(
    ("template", "given", "made"),
    [
        ("{% if enable_thinking is defined and enable_thinking is false %}", {"enabled": False},
         {"enable_thinking": False}),
        ("{% if not thinking %}", {"effort": "high"}, {"thinking": True}),
        ("{{ message.thinking }}{{ m['thinking'] }}{{ '<thinking>' }}", {"enabled": True}, {}),
        ("{{ reasoning_effort }}", {"effort": "xhigh"}, {"reasoning_effort": "high"}),
        ("{{ reasoning_effort }}", {"effort": "none"}, {}),
        ("{%- set thinking_budget = thinking_budget | default(0) %}",
         {"enabled": True, "budget": 9}, {"thinking_budget": 9}),
        ("{{ messages }}", {"enabled": True, "effort": "low", "budget": 9}, {}),
    ],
)  # fmt: skip
def test_thinking(template: str, given: dict[str, Any], made: dict[str, Any]) -> None:
    assert thinking_variables(template, **given) == made
