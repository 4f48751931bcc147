"""LiteLLM, unchanged, by the providers that reach this server: OpenAI's, vLLM's, Anthropic's and Ollama's forms."""

import json
from typing import Any, Literal

import pytest

pytest.importorskip("litellm")
import litellm
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.clients
QUESTION = [{"role": "user", "content": "Tell me a story about a fox."}]


class ForecastByLitellm(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "cloudy", "rain"]
    windy: bool


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def options(server: Any, provider: str, **more: Any) -> dict[str, Any]:
    base = server.root if provider in ("anthropic", "ollama_chat", "ollama") else server.base_url
    return {
        "model": f"{provider}/{server.model}",
        "api_base": base,
        "api_key": server.api_key,
        "temperature": 0,
        "max_tokens": 200,
        "num_retries": 0,
        **more,
    }


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic", "ollama_chat"])
class TestChat:
    def test_stream_has_the_text_of_the_answer(self, server: Any, provider: str) -> None:
        answer = litellm.completion(messages=QUESTION, **options(server, provider, max_tokens=48))
        text = answer.choices[0].message.content
        assert text and answer.usage.completion_tokens == 48 and answer.choices[0].finish_reason == "length"
        chunks = list(litellm.completion(messages=QUESTION, stream=True, **options(server, provider, max_tokens=48)))
        assert len(chunks) > 1
        whole = litellm.stream_chunk_builder(chunks)
        assert whole.choices[0].message.content == text

    async def test_asynchronous_calls(self, server: Any, provider: str) -> None:
        answer = await litellm.acompletion(messages=QUESTION, **options(server, provider, max_tokens=8))
        text = answer.choices[0].message.content
        stream = await litellm.acompletion(messages=QUESTION, stream=True, **options(server, provider, max_tokens=8))
        assert text and "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text

    def test_structured_output(self, server: Any, provider: str) -> None:
        answer = litellm.completion(messages=QUESTION, response_format=ForecastByLitellm, **options(server, provider))
        ForecastByLitellm.model_validate_json(answer.choices[0].message.content)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    def test_tool_is_called(self, server: Any, provider: str, choice: Any, stream: bool) -> None:
        if provider == "ollama_chat":
            pytest.skip("LiteLLM leaves tool_choice out of Ollama's form, which has no such field")
        tools = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
        answer = litellm.completion(messages=QUESTION, stream=stream, **tools, **options(server, provider))
        if stream:
            answer = litellm.stream_chunk_builder(list(answer))
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

    def test_tool_result_is_answered(self, server: Any, provider: str) -> None:
        function = {"name": "weather", "arguments": '{"city": "Rome"}'}
        history = [
            *QUESTION,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "It rains."},
        ]
        answer = litellm.completion(messages=history, tools=[WEATHER], **options(server, provider, max_tokens=8))
        plain = litellm.completion(messages=QUESTION, **options(server, provider, max_tokens=8))
        assert answer.choices[0].message.content
        assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 20
