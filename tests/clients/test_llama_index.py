"""llama-index-llms-openai-like, unchanged: text, chats, streams, structured output and function calls."""

from typing import Any, Literal

import pytest

pytest.importorskip("llama_index.llms.openai_like")
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.clients
QUESTION = "Tell me a story about a fox."


class ForecastByLlamaIndex(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "cloudy", "rain"]
    windy: bool


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"It rains in {city}."


def client(server: Any, **options: Any) -> OpenAILike:
    return OpenAILike(
        model=server.model,
        api_base=server.base_url,
        api_key=server.api_key,
        **{
            "is_chat_model": True,
            "is_function_calling_model": True,
            "context_window": 4096,
            "max_tokens": 200,
            "temperature": 0,
            "max_retries": 0,
            **options,
        },
    )


class TestText:
    @pytest.mark.parametrize("is_chat_model", [True, False])
    def test_stream_has_the_text_of_the_completion(self, server: Any, is_chat_model: bool) -> None:
        llm = client(server, max_tokens=48, is_chat_model=is_chat_model)
        text = llm.complete(QUESTION).text
        parts = list(llm.stream_complete(QUESTION))
        assert text and len(parts) > 1 and parts[-1].text == text == "".join(part.delta or "" for part in parts)

    def test_stream_has_the_text_of_the_chat(self, server: Any) -> None:
        llm = client(server, max_tokens=48)
        messages = [ChatMessage(role="system", content="You tell stories."), ChatMessage(role="user", content=QUESTION)]
        answer = llm.chat(messages)
        assert answer.message.content and answer.raw.usage.completion_tokens == 48
        parts = list(llm.stream_chat(messages))
        assert len(parts) > 1 and parts[-1].message.content == answer.message.content

    async def test_asynchronous_calls(self, server: Any) -> None:
        llm = client(server, max_tokens=8)
        text = (await llm.acomplete(QUESTION)).text
        assert text and [part.text async for part in await llm.astream_complete(QUESTION)][-1] == text


class TestStructuredOutput:
    @pytest.mark.parametrize("by_function", [True, False])
    def test_answer_is_an_object(self, server: Any, by_function: bool) -> None:
        llm = client(server, is_function_calling_model=by_function, should_use_structured_outputs=not by_function)
        typed = llm.as_structured_llm(ForecastByLlamaIndex)
        assert isinstance(typed.complete("How is the weather?").raw, ForecastByLlamaIndex)

    def test_streamed_answer_is_an_object(self, server: Any) -> None:
        """By schema only: in a stream with functions the client leaves the choice to the model."""
        llm = client(server, is_function_calling_model=False, should_use_structured_outputs=True)
        typed = llm.as_structured_llm(ForecastByLlamaIndex)
        parts = list(typed.stream_chat([ChatMessage(role="user", content="How is the weather?")]))
        assert isinstance(parts[-1].raw, ForecastByLlamaIndex)


class TestFunctions:
    tool = FunctionTool.from_defaults(fn=weather)

    def test_function_is_called_and_its_result_answered(self, server: Any) -> None:
        llm = client(server)
        answer = llm.predict_and_call([self.tool], "How is the weather in Paris?", tool_required=True, max_tokens=200)
        (output,) = answer.sources
        assert output.content in ("It rains in Paris.", "It rains in Rome.")

    def test_history_with_a_call(self, server: Any) -> None:
        llm = client(server)
        question = ChatMessage(role="user", content="How is the weather in Paris?")
        answer = llm.chat_with_tools([self.tool], chat_history=[question], tool_required=True, strict=True)
        (call,) = llm.get_tool_calls_from_response(answer)
        assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Paris", "Rome")
        result = ChatMessage(role="tool", content="It rains.", additional_kwargs={"tool_call_id": call.tool_id})
        short = client(server, max_tokens=8)
        final, alone = short.chat([question, answer.message, result]), short.chat([question])
        assert final.message.content and final.raw.usage.prompt_tokens > alone.raw.usage.prompt_tokens + 20

    def test_streamed_call(self, server: Any) -> None:
        llm = client(server)
        parts = list(llm.stream_chat_with_tools([self.tool], user_msg="How is the weather?", tool_required=True))
        (call,) = llm.get_tool_calls_from_response(parts[-1])
        assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Paris", "Rome")
