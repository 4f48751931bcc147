"""The `ollama` package, unchanged: chats, prompts, streams, structured output and tools."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

ollama: Any = pytest.importorskip("ollama")
pytestmark = pytest.mark.clients
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
QUESTION = [{"role": "user", "content": "How is the weather in Paris?"}]
OPTIONS = {"temperature": 0, "num_predict": 100}


class ForecastByOllama(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "cloudy", "rain"]
    windy: bool


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: Paris or Rome
    """
    return f"It rains in {city}."


@pytest.fixture
def client(server: Any) -> Any:
    return ollama.Client(host=server.root, headers={"authorization": f"Bearer {server.api_key}"}, timeout=60)


class TestPackageChat:
    def test_stream_has_the_text_of_the_answer(self, client: Any, server: Any) -> None:
        answer = client.chat(server.model, STORY, options=OPTIONS)
        text = answer.message.content
        assert text and answer.done and answer.done_reason == "length" and answer.eval_count == 100
        chunks = list(client.chat(server.model, STORY, options=OPTIONS, stream=True))
        assert "".join(chunk.message.content or "" for chunk in chunks) == text and len(chunks) > 2
        assert chunks[-1].done and chunks[-1].eval_count == 100

    async def test_asynchronous_client(self, client: Any, server: Any) -> None:
        made = ollama.AsyncClient(host=server.root, timeout=60)
        chunks = await made.chat(server.model, STORY, options=OPTIONS, stream=True)
        text = "".join([chunk.message.content or "" async for chunk in chunks])
        assert text == client.chat(server.model, STORY, options=OPTIONS).message.content

    def test_structured_output(self, client: Any, server: Any) -> None:
        schema = ForecastByOllama.model_json_schema()
        answer = client.chat(server.model, QUESTION, options=OPTIONS, format=schema)
        forecast = ForecastByOllama.model_validate_json(answer.message.content or "")
        chunks = client.chat(server.model, QUESTION, options=OPTIONS, format=schema, stream=True)
        streamed = "".join(chunk.message.content or "" for chunk in chunks)
        assert ForecastByOllama.model_validate_json(streamed) == forecast

    def test_conversation_with_a_tool(self, client: Any, server: Any) -> None:
        """Ollama's API cannot force a call, and the built-in model calls nothing unasked."""
        answer = client.chat(server.model, QUESTION, tools=[weather], options=OPTIONS)
        assert answer.message.content and not answer.message.tool_calls
        call = ollama.Message.ToolCall(
            function=ollama.Message.ToolCall.Function(name="weather", arguments={"city": "Rome"})
        )
        conversation: list[Any] = [
            *QUESTION,
            ollama.Message(role="assistant", tool_calls=[call]),
            ollama.Message(role="tool", tool_name="weather", content=weather("Rome")),
        ]
        final = client.chat(server.model, conversation, tools=[weather], options=OPTIONS)
        assert final.message.content and (final.prompt_eval_count or 0) > (answer.prompt_eval_count or 0)


class TestPackagePrompt:
    def test_stream_has_the_text_of_the_answer(self, client: Any, server: Any) -> None:
        answer = client.generate(server.model, "Once upon a time", options=OPTIONS)
        assert answer.response and answer.eval_count == 100
        chunks = client.generate(server.model, "Once upon a time", options=OPTIONS, stream=True)
        assert "".join(chunk.response for chunk in chunks) == answer.response

    def test_structured_output(self, client: Any, server: Any) -> None:
        answer = client.generate(server.model, "JSON:", options=OPTIONS, format=ForecastByOllama.model_json_schema())
        assert ForecastByOllama.model_validate(json.loads(answer.response))


class TestPackageModels:
    def test_models_are_listed_and_shown(self, client: Any, server: Any) -> None:
        names = [model.model for model in client.list().models]
        assert names and client.show(server.model).capabilities
        assert [model.model for model in client.ps().models] == names

    def test_refusal_is_typed(self, client: Any) -> None:
        with pytest.raises(ollama.ResponseError) as refused:
            client.chat("llama3", STORY)
        assert refused.value.status_code == 404
