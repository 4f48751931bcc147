"""pydantic-ai, unchanged, by chats and by Responses: text, streams, all kinds of typed output, and function tools."""

from functools import partial
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

pytest.importorskip("pydantic_ai")
import pydantic_ai
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider
from pydantic_ai.providers.vllm import VLLMProvider

pytestmark = pytest.mark.clients
STORY = "Tell me a story about a fox."
QUESTION = "How is the weather in Paris?"
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 200}


class ForecastByPydantic(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "cloudy", "rain"]
    windy: bool


@pytest.fixture(params=["chat", "responses"])
def model(server: Any, request: pytest.FixtureRequest) -> Any:
    provider = OpenAIProvider(base_url=server.base_url, api_key=server.api_key)
    return {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[request.param](server.model, provider=provider)


async def test_stream_has_the_text_of_the_answer(model: Any) -> None:
    agent = pydantic_ai.Agent(model, instructions="Tell stories.", model_settings=SETTINGS)
    answer = await agent.run(STORY)
    assert answer.output and answer.usage.output_tokens == 200
    async with agent.run_stream(STORY) as stream:
        deltas = [delta async for delta in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(deltas) == answer.output and len(deltas) > 1


async def test_conversation(model: Any) -> None:
    agent = pydantic_ai.Agent(model, instructions="Tell stories.", model_settings=SETTINGS)
    first = await agent.run(STORY)
    second = await agent.run("Go on.", message_history=first.all_messages())
    assert second.output and second.usage.input_tokens > first.usage.input_tokens + 100


@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
async def test_typed_output(model: Any, kind: str) -> None:
    """An output tool is required by the package itself."""
    output = getattr(pydantic_ai, kind)(ForecastByPydantic)
    settings = {**SETTINGS, **({"parallel_tool_calls": False} if kind == "ToolOutput" else {})}
    agent = pydantic_ai.Agent(model, output_type=output, model_settings=settings)
    answer = await agent.run(QUESTION)
    assert isinstance(answer.output, ForecastByPydantic)
    async with agent.run_stream(QUESTION) as stream:
        assert await stream.get_output() == answer.output


async def test_prompted_output(model: Any) -> None:
    """The package only asks for JSON. The built-in model needs the schema beside it."""
    output = pydantic_ai.PromptedOutput(ForecastByPydantic)
    schema = {"type": "json_schema", "name": "forecast", "schema": ForecastByPydantic.model_json_schema()}
    if isinstance(model, OpenAIChatModel):
        extra: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": schema}}
    else:
        extra = {"text": {"format": schema}}
    agent = pydantic_ai.Agent(model, output_type=output, model_settings={**SETTINGS, "extra_body": extra})
    assert isinstance((await agent.run(QUESTION)).output, ForecastByPydantic)


class FirstStepCalls(AbstractCapability[Any]):  # type: ignore[misc]
    """Requires a tool in the first step of a run and none in later ones."""

    def get_model_settings(self) -> Any:
        return lambda context: {
            "tool_choice": "required" if context.run_step == 1 else "none",
            "parallel_tool_calls": False,
        }


@pytest.mark.parametrize("stream", [False, True])
async def test_function_is_called(model: Any, stream: bool) -> None:
    calls: list[str] = []

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city.

        Args:
            city: The name of the city.
        """
        calls.append(city)
        return f"It rains in {city}."

    agent = pydantic_ai.Agent(model, tools=[weather], model_settings=SETTINGS, capabilities=[FirstStepCalls()])
    if stream:
        async with agent.run_stream(QUESTION) as run:
            text = await run.get_output()
            messages = run.all_messages()
    else:
        run = await agent.run(QUESTION)
        text, messages = run.output, run.all_messages()
    kinds = [part.part_kind for message in messages for part in message.parts]
    assert kinds == ["user-prompt", "tool-call", "tool-return", "text"] and text
    assert len(calls) == 1 and messages[2].parts[0].content == f"It rains in {calls[0]}."


async def test_refused_output_is_asked_for_again(model: Any) -> None:
    agent = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(ForecastByPydantic), model_settings=SETTINGS)
    refused: list[Any] = []

    def refuse_once(output: Any) -> Any:
        if not refused:
            refused.append(output)
            raise pydantic_ai.ModelRetry("say it again")
        return output

    agent.output_validator(refuse_once)
    assert isinstance((await agent.run(QUESTION)).output, ForecastByPydantic) and len(refused) == 1


@pytest.mark.parametrize("provider", [VLLMProvider, OllamaProvider, partial(OpenAICompatibleProvider, "ktqueue")])
async def test_other_providers(server: Any, provider: Any) -> None:
    made = OpenAIChatModel(server.model, provider=provider(base_url=server.base_url, api_key=server.api_key))
    agent = pydantic_ai.Agent(made, output_type=pydantic_ai.NativeOutput(ForecastByPydantic), model_settings=SETTINGS)
    assert isinstance((await agent.run(QUESTION)).output, ForecastByPydantic)
