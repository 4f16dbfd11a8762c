"""Requests of Anthropic's Messages API, and its events, on deltas made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from metal_marlin.serve.deltas import (
    ContentDelta,
    Delta,
    Finished,
    ReasoningDelta,
    ToolCallDelta,
    Usage,
)
from metal_marlin.serve.errors import ApiError, anthropic_document
from metal_marlin.serve.fields import FieldError
from metal_marlin.serve.message_events import MessageEvents
from metal_marlin.serve.message_input import MessageRequest, read_message_request

USER = {"role": "user", "content": "Hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Now.", "input_schema": SCHEMA}
CACHED = {"type": "ephemeral", "ttl": "1h"}


def body(**members: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": [USER], **members}


def read(**members: Any) -> MessageRequest:
    return read_message_request(body(**members))


def refused(says: str, **members: Any) -> None:
    with pytest.raises(FieldError) as error:
        read(**members)
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


def test_sampling() -> None:
    made = read(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["a", "b"], stream=True)
    assert made.stream and made.chat == {
        "model": "m", "max_completion_tokens": 100, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
        "stop": ["a", "b"], "messages": [USER],
    }  # fmt: skip


def test_what_a_coding_agent_sends() -> None:
    """Blocks, marks of caches, metadata, and fields of betas that ask for nothing else."""
    made = read(
        system=[{"type": "text", "text": "A", "cache_control": CACHED},
                {"type": "text", "text": "B"}],
        messages=[
            {"role": "user", "content": [
                {"type": "text", "text": "C"},
                {"type": "text", "text": "D", "cache_control": CACHED}]},
        ],
        tools=[{**TOOL, "type": "custom", "cache_control": CACHED, "eager_input_streaming": True}],
        metadata={"user_id": "u"}, thinking={"type": "enabled", "budget_tokens": 99},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"}, service_tier="auto", cache_control=CACHED,
        mcp_servers=[], container=None, stream=False,
    )  # fmt: skip
    assert made.chat["messages"] == [
        {"role": "system", "content": "A\nB"}, {"role": "user", "content": "C\nD"},
    ]  # fmt: skip
    function = {"name": "weather", "description": "Now.", "parameters": SCHEMA}
    assert made.chat["tools"] == [{"type": "function", "function": function}]
    assert (made.thinking, made.budget, made.effort) == (True, 99, "high")
    assert made.edits and made.show_thinking and not made.stream and not made.continues


def test_tool_use_and_results() -> None:
    made = read(messages=[
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Åbo"}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True,
             "content": [{"type": "text", "text": "no city"}]},
            {"type": "text", "text": "And now?"}]},
    ])  # fmt: skip
    calls = [
        {"id": "t1", "type": "function",
         "function": {"name": "weather", "arguments": '{"city": "Åbo"}'}},
        {"id": "t2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ]  # fmt: skip
    assert made.chat["messages"][1:] == [
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.",
         "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "t2", "name": "weather", "content": "Error: no city"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True},
         {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "weather"},
         {"tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    ],
)  # fmt: skip
def test_tool_choice(given: dict[str, Any], made: dict[str, Any]) -> None:
    chat = read(tools=[TOOL], tool_choice=given).chat
    assert {name: chat[name] for name in made} == made
    assert ("parallel_tool_calls" in chat) == ("parallel_tool_calls" in made)


def test_the_answer_continues_a_last_message_of_the_assistant() -> None:
    prefill = {"role": "assistant", "content": "I"}
    assert read(messages=[USER, prefill]).continues
    assert not read(messages=[USER, prefill, USER]).continues


def test_a_json_schema() -> None:
    made = read(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert made.chat["response_format"]["json_schema"]["schema"] == SCHEMA
    assert made.chat == read(output_format={"type": "json_schema", "schema": SCHEMA}).chat


def test_count_tokens() -> None:
    made = read_message_request({"model": "m", "messages": [USER], "system": "S"}, count=True)
    assert made.chat == {"model": "m", "messages": [{"role": "system", "content": "S"}, USER]}
    with pytest.raises(FieldError, match="max_tokens: is not a known field"):
        read_message_request(body(), count=True)


def test_refusals() -> None:
    image = {"type": "image", "source": {}}
    result = {"type": "tool_result", "tool_use_id": "none", "content": "a"}
    for says, members in (
        ("container: is not supported", {"container": "c"}),
        ("mcp_servers: is not supported", {"mcp_servers": [{}]}),
        ("fallbacks: is not supported", {"fallbacks": ["m"]}),
        ("unknown: is not a known field", {"unknown": 1}),
        ("max_tokens: is required", {"max_tokens": None}),
        ("max_tokens: expected 1..", {"max_tokens": 0}),
        ("max_tokens: expected an integer, got a string", {"max_tokens": "1"}),
        ("max_tokens: expected an integer, got a boolean", {"max_tokens": True}),
        ("temperature: expected 0..2, got nan", {"temperature": float("nan")}),
        ("messages: expected at least one", {"messages": []}),
        ("messages[0].role: expected", {"messages": [{"role": "tool", "content": "a"}]}),
        ("messages[0].content: has half", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("messages[0].content[0]: 'image' blocks are not supported",
         {"messages": [{"role": "user", "content": [image]}]}),
        ("messages[0].content[0].tool_use_id: no tool_use block",
         {"messages": [{"role": "user", "content": [result]}]}),
        ("messages[0].name: is not a known field", {"messages": [{**USER, "name": "n"}]}),
        ("system[0]: 'image' blocks", {"system": [image]}),
        ("tools[0].type: 'web_search_20250305' is not supported",
         {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tools[0].input_schema: is required", {"tools": [{"name": "n"}]}),
        ("tools[0].input_examples: is not", {"tools": [{**TOOL, "input_examples": [{}]}]}),
        ("tool_choice: there are no tools", {"tool_choice": {"type": "any"}}),
        ("tool_choice.name: 'x' is not one", {"tools": [TOOL],
                                              "tool_choice": {"type": "tool", "name": "x"}}),
        ("thinking.budget_tokens: is required", {"thinking": {"type": "enabled"}}),
        ("thinking.type: 'between_tools'", {"thinking": {"type": "between_tools"}}),
        ("speed: 'fast' is not supported", {"speed": "fast"}),
        ("output_config.task_budget: is not", {"output_config": {"task_budget": {"a": 1}}}),
        ("context_management.edits[0].type: 'compact_20260112' is not supported",
         {"context_management": {"edits": [{"type": "compact_20260112"}]}}),
        ("cache_control.ttl: expected", {"cache_control": {"type": "ephemeral", "ttl": "9h"}}),
    ):  # fmt: skip
        refused(says, **members)
    with pytest.raises(FieldError, match="body: expected an object, got an array"):
        read_message_request([])


def events(deltas: list[Delta], **members: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    made = MessageEvents(read(**members), "msg_1", "m", 7)
    shown = made.begin()
    for delta in deltas:
        shown += made.add(delta)
    json.dumps([shown, made.message])
    return shown, made.message


def kinds(shown: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("content_block_") for event in shown]


def test_an_answer() -> None:
    shown, message = events([
        ReasoningDelta("Hm"), ReasoningDelta("."), ContentDelta("He"), ContentDelta("llo"),
        Finished("stop", Usage(7, 5, 4)),
    ])  # fmt: skip
    assert kinds(shown) == [
        "message_start", "ping", "start", "delta", "delta", "delta", "stop", "start", "delta",
        "delta", "stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert shown[0]["message"]["usage"]["input_tokens"] == 7
    assert shown[0]["message"]["content"] == [] and shown[0]["message"]["stop_reason"] is None
    assert shown[2]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    signature = shown[5]["delta"]["signature"]
    assert signature and [event.get("index") for event in shown[2:7]] == [0] * 5
    assert [event.get("index") for event in shown[7:11]] == [1] * 4
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": signature},
        {"type": "text", "text": "Hello"},
    ]  # fmt: skip
    assert shown[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert shown[-2]["usage"] == {
        "input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
        "output_tokens": 5,
    }  # fmt: skip
    assert message["usage"] == {**shown[-2]["usage"], "service_tier": "standard"}


def test_tool_calls() -> None:
    shown, message = events([
        ContentDelta("See."), ToolCallDelta(0, "a", "f"), ToolCallDelta(0, arguments='{"x'),
        ToolCallDelta(0, arguments='": 1}'), ToolCallDelta(1, "b", "g", "{}"),
        Finished("tool_calls", Usage(7, 5)),
    ])  # fmt: skip
    assert kinds(shown)[2:] == [
        "start", "delta", "stop", "start", "delta", "delta", "stop", "start", "delta", "stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert shown[5]["content_block"] == {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    assert message["content"][1:] == [
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}},
    ]  # fmt: skip
    assert message["stop_reason"] == "tool_use"


def test_stop_reasons() -> None:
    for end, reason, stop in (
        (Finished("length", Usage(7, 100)), "max_tokens", None),
        (Finished("length", Usage(7, 99)), "model_context_window_exceeded", None),
        (Finished("stop", Usage(7, 2), "END"), "stop_sequence", "END"),
        (Finished("content_filter", Usage(7, 2)), "refusal", None),
    ):
        shown, message = events([ContentDelta("a"), end])
        assert shown[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop}
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    assert events([Finished("stop", Usage(7, 1))])[1]["content"] == []


def test_a_call_that_was_cut() -> None:
    _, message = events([ToolCallDelta(0, "a", "f", '{"x'), Finished("length", Usage(7, 100))])
    assert message["content"][0]["input"] == {} and message["stop_reason"] == "max_tokens"


def test_thinking_that_is_not_shown() -> None:
    shown, message = events(
        [ReasoningDelta("secret"), ContentDelta("a"), Finished("stop", Usage(7, 2))],
        thinking={"type": "adaptive", "display": "omitted"},
    )
    assert "secret" not in json.dumps(shown)
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]


def test_what_an_answer_says_of_betas() -> None:
    shown, message = events(
        [Finished("stop", Usage(7, 1))], diagnostics={"previous_message_id": None},
        context_management={"edits": []},
    )  # fmt: skip
    assert message["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}
    assert shown[-2]["context_management"] == {"applied_edits": []}


def test_errors() -> None:
    for status, kind in (
        (400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"),
        (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"),
        (503, "overloaded_error"),
    ):  # fmt: skip
        document = anthropic_document(ApiError(status, "no"))
        assert document == {"type": "error", "error": {"type": kind, "message": "no"}}
