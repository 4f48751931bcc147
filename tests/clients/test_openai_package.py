"""The `openai` package, unchanged, newest and a year old: chat, parsed answers, tools and responses."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.clients
STORY: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
QUESTION: Any = [{"role": "user", "content": "How is the weather in Paris?"}]


class ForecastByPackage(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "cloudy", "rain"]
    windy: bool


class WeatherQuestion(BaseModel):
    """Arguments of a function."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


CHAT_TOOL = openai.pydantic_function_tool(WeatherQuestion, name="weather", description="The weather of a city.")
RESPONSES_TOOL: Any = {"type": "function", **CHAT_TOOL["function"]}


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0, timeout=60) as made:
        yield made


class TestChat:
    @pytest.fixture
    def ask(self, server: Any) -> dict[str, Any]:
        return {"model": server.model, "temperature": 0, "max_completion_tokens": 200}

    def test_streams_have_the_text_of_the_answer(self, client: openai.OpenAI, ask: Any) -> None:
        answer = client.chat.completions.create(messages=STORY, **ask)
        text = answer.choices[0].message.content
        assert text and answer.choices[0].finish_reason == "length"
        assert answer.usage is not None and answer.usage.completion_tokens == 200
        chunks = list(client.chat.completions.create(messages=STORY, stream=True, **ask))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text and len(chunks) > 2
        with client.chat.completions.stream(messages=STORY, **ask) as stream:
            assert "".join(event.delta for event in stream if event.type == "content.delta") == text
            assert stream.current_completion_snapshot.choices[0].message.content == text

    def test_answer_is_parsed(self, client: openai.OpenAI, ask: Any) -> None:
        answer = client.chat.completions.parse(messages=QUESTION, response_format=ForecastByPackage, **ask)
        assert isinstance(answer.choices[0].message.parsed, ForecastByPackage)
        with client.chat.completions.stream(messages=QUESTION, response_format=ForecastByPackage, **ask) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == answer.choices[0].message.parsed

    @pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    def test_tool_is_called_and_its_result_read(self, client: openai.OpenAI, ask: Any, tool_choice: Any) -> None:
        tools: Any = {"tools": [CHAT_TOOL], "tool_choice": tool_choice, "parallel_tool_calls": False}
        answer = client.chat.completions.parse(messages=QUESTION, **tools, **ask)
        message = answer.choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.function.name == "weather" and isinstance(call.function.parsed_arguments, WeatherQuestion)
        with client.chat.completions.stream(messages=QUESTION, **tools, **ask) as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed is not None and streamed[0].function.arguments == call.function.arguments
        conversation = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
        final = client.chat.completions.create(messages=conversation, **{**tools, "tool_choice": "none"}, **ask)
        assert final.choices[0].message.content and not final.choices[0].message.tool_calls

    async def test_asynchronous_client(self, server: Any, client: openai.OpenAI, ask: Any) -> None:
        text = client.chat.completions.create(messages=STORY, **ask).choices[0].message.content
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0) as made:
            stream = await made.chat.completions.create(messages=STORY, stream=True, **ask)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


class TestResponses:
    @pytest.fixture
    def ask(self, server: Any) -> dict[str, Any]:
        return {"model": server.model, "temperature": 0, "max_output_tokens": 200}

    def test_streams_have_the_text_of_the_answer(self, client: openai.OpenAI, ask: Any) -> None:
        answer = client.responses.create(input="Tell me a story about a fox.", instructions="Be brief.", **ask)
        assert answer.output_text and answer.status == "incomplete"
        assert answer.usage is not None and answer.usage.output_tokens == 200
        with client.responses.stream(input=STORY, instructions="Be brief.", **ask) as stream:
            events = list(stream)
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == answer.output_text
        assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]

    def test_answer_is_parsed(self, client: openai.OpenAI, ask: Any) -> None:
        answer = client.responses.parse(input=QUESTION, text_format=ForecastByPackage, **ask)
        assert isinstance(answer.output_parsed, ForecastByPackage)
        with client.responses.stream(input=QUESTION, text_format=ForecastByPackage, **ask) as stream:
            assert stream.get_final_response().output_parsed == answer.output_parsed

    def test_tool_is_called_and_its_result_read(self, client: openai.OpenAI, ask: Any) -> None:
        tools: Any = {"tools": [RESPONSES_TOOL], "parallel_tool_calls": False}
        answer = client.responses.create(input=QUESTION, tool_choice="required", **tools, **ask)
        (call,) = answer.output
        assert call.type == "function_call" and WeatherQuestion.model_validate_json(call.arguments)
        with client.responses.stream(input=QUESTION, tool_choice="required", **tools, **ask) as stream:
            (streamed,) = stream.get_final_response().output
        assert streamed.type == "function_call" and json.loads(streamed.arguments) == json.loads(call.arguments)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        final = client.responses.create(
            input=[result], previous_response_id=answer.id, tool_choice="none", **tools, **ask
        )
        assert final.output_text and final.previous_response_id == answer.id

    def test_stored_response_is_read_again(self, client: openai.OpenAI, ask: Any) -> None:
        answer = client.responses.create(input=STORY, **ask)
        assert client.responses.retrieve(answer.id).output_text == answer.output_text
        (item,) = client.responses.input_items.list(answer.id)
        assert item.type == "message" and item.role == "user"
        client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)

    def test_response_in_the_background_is_streamed_from_the_middle(self, client: openai.OpenAI, ask: Any) -> None:
        started = client.responses.create(input=STORY, background=True, store=True, stream=True, **ask)
        head: list[Any] = []
        for event in started:
            head.append(event)
            if len(head) == 6:
                break
        started.close()
        rest: list[Any] = list(
            client.responses.retrieve(
                head[0].response.id, stream=True, starting_after=head[-1].sequence_number, timeout=60
            )
        )
        numbers = [event.sequence_number for event in head + rest]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        text = "".join(event.delta for event in head + rest if event.type == "response.output_text.delta")
        assert text and text == client.responses.retrieve(head[0].response.id).output_text

    def test_response_in_the_background_is_cancelled(self, client: openai.OpenAI, ask: Any) -> None:
        long_answer = {**ask, "max_output_tokens": 1000}
        answer = client.responses.create(input=STORY, background=True, **long_answer)
        assert answer.status in ("queued", "in_progress")
        assert client.responses.cancel(answer.id).status == "cancelled"
        assert client.responses.retrieve(answer.id).status == "cancelled"
