"""Tool calls of a whole installation through the openai package: whole, streamed, and while workers are killed."""

import json
import signal
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from processes import until
from pydantic import BaseModel

pytestmark = pytest.mark.asyncio(loop_scope="session")

MESSAGES: list[Any] = [{"role": "user", "content": "How warm is it in Köln?"}]
SEEDED: dict[str, Any] = {"model": "demo", "seed": 3, "max_tokens": 300, "messages": MESSAGES}
LETTERS = {"type": "string", "maxLength": 60, "pattern": "^[a-z ]{30,60}$"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Paris"]}, "days": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}}
STORY: Any = {
    "type": "function",
    "function": {
        "name": "story",
        "parameters": {
            "type": "object",
            "properties": {"title": LETTERS, "begin": LETTERS, "end": LETTERS},
            "required": ["title", "begin", "end"],
        },
    },
}


class Temperature(BaseModel):
    """The temperature of a city."""

    city: Literal["Köln", "Paris"]
    unit: Literal["C", "F"]


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Any) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.http.base_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def check(call: Any) -> None:
    """Check a call of WEATHER."""
    arguments = json.loads(call.function.arguments)
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name == "weather"
    assert set(arguments) == {"city", "days"} and arguments["city"] in ("Köln", "Paris")
    assert 0 <= arguments["days"] <= 99


async def test_a_required_call_whole_and_streamed(client: AsyncOpenAI) -> None:
    wanted = {**SEEDED, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    whole = await client.chat.completions.create(**wanted)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or []
    check(call)
    pieces: list[Any] = []
    reasons = []
    async for chunk in await client.chat.completions.create(**wanted, stream=True):
        pieces += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
        assert not chunk.choices[0].delta.content
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}
    assert [piece.index for piece in pieces] == [0] * len(pieces)
    assert [piece.function.name for piece in pieces if piece.function.name] == ["weather"]
    assert pieces[0].id and not any(piece.id for piece in pieces[1:])
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments


async def test_a_named_function_and_allowed_functions(client: AsyncOpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in (named, allowed):
        wanted = {**SEEDED, "tools": [STORY, WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
        answer = await client.chat.completions.create(**wanted)
        (call,) = answer.choices[0].message.tool_calls or []
        check(call)


async def test_the_old_form_of_functions(client: AsyncOpenAI) -> None:
    wanted = {**SEEDED, "functions": [WEATHER["function"]], "function_call": {"name": "weather"}}
    message = (await client.chat.completions.create(**wanted)).choices[0]
    assert message.finish_reason == "function_call"
    assert message.message.function_call is not None and not message.message.tool_calls
    assert json.loads(message.message.function_call.arguments)["city"] in ("Köln", "Paris")
    text = ""
    async for chunk in await client.chat.completions.create(**wanted, stream=True):
        call = chunk.choices[0].delta.function_call
        text += (call.arguments or "") if call else ""
    assert text == message.message.function_call.arguments


async def test_the_helpers_of_the_package(client: AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Temperature)
    wanted: dict[str, Any] = {**SEEDED, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    parsed = await client.chat.completions.parse(**wanted)
    (call,) = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Temperature)
    async with client.chat.completions.stream(**wanted) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


async def test_results_of_calls_go_into_the_prompt(client: AsyncOpenAI, stack: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    talk = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "31 degrees"},
    ]
    answer = await client.chat.completions.create(**{**SEEDED, "messages": talk, "max_tokens": 5}, tools=[WEATHER])
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    prompt = (await stack.http.post("/apply-template", json={"messages": talk, "tools": [WEATHER]})).json()["prompt"]
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\n31 degrees<|im_end|>" in prompt


async def test_the_answer_continues_a_message(stack: Any) -> None:
    talk = [*MESSAGES, {"role": "assistant", "content": "Once upon a time"}]
    for template, mark in (
        (None, "<|im_start|>assistant\n"),
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "["),
    ):
        body = {"messages": talk, "continue_final_message": True, **({"chat_template": template} if template else {})}
        prompt = (await stack.http.post("/apply-template", json=body)).json()["prompt"]
        assert prompt.endswith(f"{mark}Once upon a time")
    prompt = (
        await stack.http.post("/apply-template", json={"messages": MESSAGES, "add_generation_prompt": False})
    ).json()
    assert prompt["prompt"].endswith("<|im_end|>\n")


async def test_forced_thinking_is_reasoning(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        **{**SEEDED, "max_tokens": 20, "stop": ["</think>"]}, extra_body={"force_think": True, "ignore_eos": True}
    )
    message = answer.choices[0].message
    assert message.content == "" and message.reasoning_content
    details = answer.usage.completion_tokens_details if answer.usage else None
    assert details is not None and details.reasoning_tokens == 20


async def test_a_killed_worker_leaves_no_trace_in_a_call(client: AsyncOpenAI, stack: Any) -> None:
    wanted = {**SEEDED, "tools": [STORY], "tool_choice": "required", "parallel_tool_calls": False}

    async def calls(kill_at: int | None) -> tuple[list[str], str]:
        names, arguments, count = [], "", 0
        async for chunk in await client.chat.completions.create(**wanted, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or []:
                names += [piece.function.name] if piece.function and piece.function.name else []
                arguments += (piece.function.arguments or "") if piece.function else ""
                count += 1
                if count == kill_at:
                    stack.up.workers[0].signal(signal.SIGKILL)
        return names, arguments

    undisturbed = await calls(None)
    deaths = stack.up.workers[0].deaths
    assert await calls(2) == undisturbed
    await until(lambda: stack.up.workers[0].deaths > deaths)  # it is counted when the process has ended
    assert undisturbed[0] == ["story"]  # its arguments came in pieces
    assert set(json.loads(undisturbed[1])) == {"title", "begin", "end"}
