"""openai-agents, unchanged, by Responses (its default) and by chats: text, streams, typed output, tools, handoffs."""

import os
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # it is read at the import
agents: Any = pytest.importorskip("agents")
pytestmark = pytest.mark.clients
STORY = "Tell me a story about a fox."
QUESTION = "How is the weather in Paris?"


class ForecastByAgent(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "cloudy", "rain"]
    windy: bool


@pytest.fixture(params=["responses", "chat"])
async def model(server: Any, request: pytest.FixtureRequest) -> Any:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0) as client:
        kind = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}[request.param]
        yield kind(model=server.model, openai_client=client)


def settings(**options: Any) -> Any:
    """A story ends at its first period: the package takes no Responses that `max_tokens` cut."""
    return agents.ModelSettings(temperature=0, max_tokens=200, extra_body={"stop": ["."]}, **options)


async def test_stream_has_the_text_of_the_answer(model: Any) -> None:
    agent = agents.Agent(name="teller", instructions="Tell stories.", model=model, model_settings=settings())
    answer = await agents.Runner.run(agent, STORY)
    assert answer.final_output and answer.context_wrapper.usage.output_tokens > 8
    streamed = agents.Runner.run_streamed(agent, STORY)
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == answer.final_output == streamed.final_output and len(deltas) > 1


async def test_typed_output(model: Any) -> None:
    agent = agents.Agent(name="seer", model=model, model_settings=settings(), output_type=ForecastByAgent)
    answer = await agents.Runner.run(agent, QUESTION)
    assert isinstance(answer.final_output, ForecastByAgent)
    streamed = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == answer.final_output


@pytest.mark.parametrize("tool_choice", ["required", "weather"])
@pytest.mark.parametrize("stream", [False, True])
async def test_function_is_called(model: Any, tool_choice: str, stream: bool) -> None:
    calls: list[str] = []

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city.

        Args:
            city: The name of the city.
        """
        calls.append(city)
        return f"It rains in {city}."

    agent = agents.Agent(
        name="seer",
        model=model,
        tools=[agents.function_tool(weather)],
        model_settings=settings(tool_choice=tool_choice, parallel_tool_calls=False),
    )
    if stream:
        run = agents.Runner.run_streamed(agent, QUESTION, max_turns=3)
        async for _ in run.stream_events():
            pass
    else:
        run = await agents.Runner.run(agent, QUESTION, max_turns=3)
    kinds = [item.type for item in run.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert len(calls) == 1 and run.new_items[1].output == f"It rains in {calls[0]}." and run.final_output


async def test_handoff(model: Any) -> None:
    teller = agents.Agent(name="teller", instructions="Tell stories.", model=model, model_settings=settings())
    desk = agents.Agent(
        name="desk",
        model=model,
        handoffs=[teller],
        model_settings=settings(tool_choice="required", parallel_tool_calls=False),
    )
    answer = await agents.Runner.run(desk, STORY, max_turns=3)
    assert answer.last_agent.name == "teller" and answer.final_output


async def test_session_keeps_the_conversation(model: Any) -> None:
    agent = agents.Agent(name="teller", model=model, model_settings=settings())
    session = agents.SQLiteSession("one")
    first = await agents.Runner.run(agent, STORY, session=session)
    second = await agents.Runner.run(agent, "Go on.", session=session)
    assert second.final_output and len(await session.get_items()) == 4
    usages = [run.context_wrapper.usage.input_tokens for run in (first, second)]
    assert usages[1] > usages[0] + 8


async def test_previous_response_is_continued(server: Any) -> None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0) as client:
        model = agents.OpenAIResponsesModel(model=server.model, openai_client=client)
        agent = agents.Agent(name="teller", model=model, model_settings=settings())
        first = await agents.Runner.run(agent, STORY)
        second = await agents.Runner.run(agent, "Go on.", previous_response_id=first.last_response_id)
    assert second.context_wrapper.usage.input_tokens > first.context_wrapper.usage.input_tokens + 8


async def test_default_client_uses_responses(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the environment names the server, as for a program that was written for OpenAI's."""
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", server.api_key)
    agent = agents.Agent(name="teller", model=server.model, model_settings=settings())
    answer = await agents.Runner.run(agent, STORY)
    assert answer.final_output and answer.last_response_id.startswith("resp_")
