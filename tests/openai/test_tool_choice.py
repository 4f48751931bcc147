"""Fields of tools, templates and reasoning, from a chat body to a request and its parsed answer."""

from dataclasses import replace
from typing import Any

import pytest
from scripted_worker import CARD

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.events import FinishReason, TokenEvent
from ktqueue.core.request import GenerationRequest
from ktqueue.openai.chat import parse_chat
from ktqueue.openai.choices import Choices, Delta

MODEL = replace(CARD, tool_parser="tool_call", reasoning_parser="think")
BODY: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}]}
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
UNIQUE = {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}}


def tool(name: str, parameters: Any = NUMBER, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def request(**fields: Any) -> GenerationRequest:
    return parse_chat({**BODY, **fields}).request(MODEL)


def answer(made: GenerationRequest, text: str, opening: str = "") -> Delta:
    event = TokenEvent(seq=1, token_ids=(1,), text=text, opening=opening, finish_reason=FinishReason.STOP)
    return Choices(1, made).whole([(0, event)])[0]


def test_free_tools_need_no_grammar() -> None:
    made = request(tools=[tool("f")])
    assert made.grammar is None and made.tool_parser == "tool_call" and len(made.tools) == 1


@pytest.mark.parametrize("fields", [{"parallel_tool_calls": False}, {"tools": [tool("f", strict=True)]}])
def test_one_call_and_strict_functions_have_a_grammar(fields: dict[str, Any]) -> None:
    assert "OTHER" in (request(**{"tools": [tool("f")], **fields}).grammar or "")


def test_a_named_function_is_the_only_one_in_the_grammar_and_is_called_once() -> None:
    fields = {"tools": [tool("f"), tool("g")], "tool_choice": {"type": "function", "name": "g"}}
    grammar = request(**fields).grammar or ""
    assert '"g"' in grammar and '"f"' not in grammar
    assert request(**fields, parallel_tool_calls=False).grammar == request(**fields, parallel_tool_calls=True).grammar
    of_huggingface_hub = {**fields, "tool_choice": {"function": {"name": "g"}}}
    assert request(**of_huggingface_hub).grammar == grammar
    every = {**fields, "tool_choice": "required"}
    assert request(**every, parallel_tool_calls=False).grammar != request(**every).grammar
    assert request(**{**every, "tool_choice": "any"}).grammar == request(**every).grammar


def test_only_allowed_functions_are_offered() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "g"}]}}
    made = request(tools=[tool("f"), tool("g")], tool_choice=choice)
    assert [entry["function"]["name"] for entry in made.tools] == ["g"]


def test_a_function_that_is_not_offered_cannot_be_chosen() -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(tools=[tool("f")], tool_choice={"type": "function", "function": {"name": "g"}})
    assert (caught.value.param, caught.value.value) == ("tool_choice", "g")


@pytest.mark.parametrize("parser", ["olmo3", "functiongemma", "gemma4"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_in_a_format_without_a_grammar_cannot_be_forced(parser: str, choice: Any) -> None:
    body = {**BODY, "tools": [tool("f")], "tool_choice": choice}
    with pytest.raises(InvalidRequest, match=f"calls in the format {parser} cannot be forced"):
        parse_chat(body).request(replace(MODEL, tool_parser=parser))


@pytest.mark.parametrize(
    "properties", [1, "x", [{}], {"n": 1, "m": {"type": [[]], "enum": 1, "anyOf": {}}}, {"n": {"enum": 1}}]
)
def test_properties_of_any_form_do_no_harm_to_free_tools(properties: Any) -> None:
    parameters = {"type": "object", "properties": properties}
    made = request(tools=[tool("f", parameters)])
    assert made.tools[0]["function"]["parameters"] == parameters


def test_a_strict_schema_is_honoured_or_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(tools=[tool("f"), tool("g", UNIQUE, strict=True)])
    assert caught.value.param == "tools.1.function.parameters"
    assert request(tools=[tool("g", UNIQUE)], tool_choice="required").grammar


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"think": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"chat_template_kwargs": {"thinking": 1}, "think": False}, {"thinking": 1, "enable_thinking": False}),
    ],
)
def test_values_for_the_template(fields: dict[str, Any], values: dict[str, Any]) -> None:
    assert request(**fields).chat_template_kwargs == values


def test_a_continued_message_begins_no_other() -> None:
    made = request(continue_final_message=True)
    assert made.continue_final_message and not made.add_generation_prompt
    with pytest.raises(InvalidRequest):
        request(continue_final_message=True, add_generation_prompt=True)


def test_reasoning_is_separate_hidden_or_raw() -> None:
    text = "Hm</think>Yes"
    whole = answer(request(), text, "<think>")
    assert (whole.reasoning, whole.text) == ("Hm", "Yes")
    for fields in ({"include_reasoning": False}, {"reasoning_format": "hidden"}, {"reasoning": {"exclude": True}}):
        hidden = answer(request(**fields), text, "<think>")
        assert (hidden.reasoning, hidden.text) == ("", "Yes")
    for fields in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        assert answer(request(**fields), text, "<think>").text == text


def test_thinking_is_forced_by_the_request_or_the_model() -> None:
    assert request(force_think=True).force_thinking
    forcing = replace(MODEL, force_thinking=True, reasoning_parser="")
    made = parse_chat(BODY).request(forcing)
    assert made.force_thinking and made.reasoning_parser == "think"
    assert not parse_chat({**BODY, "force_think": False}).request(forcing).force_thinking


@pytest.mark.parametrize(
    ("text", "arguments"),
    [('{"n": 1, "s": "ab', {"n": 1, "s": "ab"}), ('{"n": ', {}), ("{n: 1}", "{n: 1}"), ("no object", "no object")],
)
def test_arguments_that_were_cut_off_are_read_as_far_as_they_go(text: str, arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    assert (request(messages=talk).messages or ())[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_old_messages_about_functions_become_calls_and_results() -> None:
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"n": 1}'}},
        {"role": "function", "name": "f", "content": "2"},
    ]
    _, called, result = request(messages=talk).messages or ()
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": {"n": 1}}
    assert result["role"] == "tool" and result["tool_call_id"] == called["tool_calls"][0]["id"]
