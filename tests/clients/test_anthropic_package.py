"""The `anthropic` package, unchanged: messages, streams, parsed answers, tools, and its tool runner."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

anthropic: Any = pytest.importorskip("anthropic")
pytestmark = pytest.mark.clients
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
QUESTION = [{"role": "user", "content": "How is the weather in Paris?"}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class ForecastByAnthropic(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "cloudy", "rain"]
    windy: bool


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.root, api_key=server.api_key, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def ask(server: Any) -> dict[str, Any]:
    return {"model": server.model, "max_tokens": 200, "extra_body": {"temperature": 0}}


class TestMessages:
    def test_streams_have_the_text_of_the_answer(self, client: Any, ask: Any) -> None:
        answer = client.messages.create(messages=STORY, system="Be brief.", **ask)
        text = answer.content[0].text
        assert text and answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 200
        with client.messages.stream(messages=STORY, system="Be brief.", **ask) as stream:
            assert "".join(stream.text_stream) == text
            final = stream.get_final_message()
        assert final.content[0].text == text and final.usage.output_tokens == 200
        events = list(client.messages.create(messages=STORY, system="Be brief.", stream=True, **ask))
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
        assert "".join(delta.text for delta in deltas) == text and len(deltas) > 1

    async def test_asynchronous_client(self, server: Any, client: Any, ask: Any) -> None:
        text = client.messages.create(messages=STORY, **ask).content[0].text
        made = anthropic.AsyncAnthropic(base_url=server.root, api_key=server.api_key, max_retries=0)
        async with made, made.messages.stream(messages=STORY, **ask) as stream:
            assert await stream.get_final_text() == text

    def test_answer_is_parsed(self, client: Any, ask: Any) -> None:
        answer = client.messages.parse(messages=QUESTION, output_format=ForecastByAnthropic, **ask)
        assert isinstance(answer.parsed_output, ForecastByAnthropic)
        with client.messages.stream(messages=QUESTION, output_format=ForecastByAnthropic, **ask) as stream:
            assert stream.get_final_message().parsed_output == answer.parsed_output

    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize("kind", ["any", "tool"])
    def test_tool_is_called_and_its_result_read(self, client: Any, ask: Any, kind: str, strict: bool) -> None:
        choice = {"type": kind, "disable_parallel_tool_use": True, **({"name": "weather"} if kind == "tool" else {})}
        tools = {"tools": [{**WEATHER, "strict": strict}], "tool_choice": choice}
        answer = client.messages.create(messages=QUESTION, **tools, **ask)
        (call,) = answer.content
        assert answer.stop_reason == "tool_use" and call.name == "weather" and call.input["city"] in ("Paris", "Rome")
        with client.messages.stream(messages=QUESTION, **tools, **ask) as stream:
            (streamed,) = stream.get_final_message().content
        assert (streamed.name, streamed.input) == (call.name, call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
        conversation = [
            *QUESTION,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        final = client.messages.create(messages=conversation, **{**tools, "tool_choice": {"type": "none"}}, **ask)
        assert [block.type for block in final.content] == ["text"] and final.content[0].text

    def test_tool_runner_calls_the_function(self, client: Any, ask: Any) -> None:
        calls: list[str] = []

        def weather(city: Literal["Paris", "Rome"]) -> str:
            """Return the weather of a city."""
            calls.append(city)
            return f"It rains in {city}."

        choice = {"type": "any", "disable_parallel_tool_use": True}
        runner = client.beta.messages.tool_runner(
            messages=QUESTION, tools=[anthropic.beta_tool(weather)], tool_choice=choice, max_iterations=2, **ask
        )
        answers = list(runner)
        assert len(answers) == 2 and calls[0] in ("Paris", "Rome")
        assert [block.type for block in answers[0].content] == ["tool_use"]

    def test_tokens_are_counted(self, client: Any, server: Any, ask: Any) -> None:
        counted = client.messages.count_tokens(model=server.model, messages=QUESTION, tools=[WEATHER])
        answer = client.messages.create(messages=QUESTION, tools=[WEATHER], **{**ask, "max_tokens": 1})
        assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

    def test_models_are_listed(self, client: Any, server: Any) -> None:
        assert server.model in [model.id for model in client.models.list()]
        assert client.models.retrieve(server.model).id == server.model

    def test_refusal_is_typed(self, client: Any, ask: Any) -> None:
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(messages=STORY, **{**ask, "max_tokens": 0})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(messages=STORY, **{**ask, "model": "claude"})
