"""langchain-openai, unchanged: text, streams, structured output by all its methods, tools and an agent."""

import json
from typing import Any, Literal

import pytest

pytest.importorskip("langchain_openai")
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.clients
QUESTION = "Tell me a story about a fox."


class ForecastByLangchain(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "cloudy", "rain"]
    windy: bool


ONE_CALL = {"parallel_tool_calls": False}
calls: list[str] = []


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    calls.append(city)
    return f"It rains in {city}."


TOOL = tool(weather)


def allow_one_call(request: ModelRequest, handler: Any) -> Any:
    """The built-in model would call again and again, until it has no tokens left."""
    return handler(request.override(model_settings=ONE_CALL if request.tools or request.response_format else {}))


def chat(server: Any, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=server.model,
        base_url=server.base_url,
        api_key=server.api_key,
        **{"temperature": 0, "max_tokens": 200, "max_retries": 0, **options},
    )


@pytest.mark.parametrize("use_responses_api", [False, True])
class TestChat:
    def test_stream_has_the_text_of_the_answer(self, server: Any, use_responses_api: bool) -> None:
        model = chat(server, max_tokens=48, stream_usage=True, use_responses_api=use_responses_api)
        answer = model.invoke(QUESTION)
        assert answer.text and answer.usage_metadata["output_tokens"] == 48
        chunks = list(model.stream(QUESTION))
        assert len([chunk for chunk in chunks if chunk.text]) > 1
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole = whole + chunk
        assert whole.text == answer.text
        assert whole.usage_metadata["output_tokens"] == 48

    def test_conversation_with_roles(self, server: Any, use_responses_api: bool) -> None:
        model = chat(server, max_tokens=8, use_responses_api=use_responses_api)
        first = model.invoke([("system", "You tell stories."), ("human", QUESTION)])
        second = model.invoke([("system", "You tell stories."), ("human", QUESTION), first, ("human", "Go on.")])
        assert second.text and second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_output(self, server: Any, use_responses_api: bool, method: Any) -> None:
        model = chat(server, use_responses_api=use_responses_api)
        typed = model.with_structured_output(ForecastByLangchain, method=method)
        assert isinstance(typed.invoke("How is the weather?"), ForecastByLangchain)
        assert isinstance(list(typed.stream("How is the weather?"))[-1], ForecastByLangchain)

    def test_json_mode(self, server: Any, use_responses_api: bool) -> None:
        """The built-in model ends an object only now and then: the first seed with which it does counts."""
        for seed in range(12):
            model = chat(
                server, temperature=1, max_tokens=100, use_responses_api=use_responses_api, extra_body={"seed": seed}
            )
            answer = model.with_structured_output(None, method="json_mode", include_raw=True).invoke("JSON, please.")
            if answer["parsing_error"] is None:
                break
        assert answer["parsed"] == json.loads(answer["raw"].text) and isinstance(answer["parsed"], dict)

    @pytest.mark.parametrize("strict", [None, True])
    def test_bound_tool_is_called(self, server: Any, use_responses_api: bool, strict: bool | None) -> None:
        model = chat(server, use_responses_api=use_responses_api)
        bound = model.bind_tools([TOOL], tool_choice="weather", strict=strict, parallel_tool_calls=False)
        messages: list[Any] = [HumanMessage("How is the weather in Paris?")]
        answer = bound.invoke(messages)
        (call,) = answer.tool_calls
        assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome")
        result = TOOL.invoke(call)
        assert isinstance(result, ToolMessage) and result.content == f"It rains in {call['args']['city']}."
        final = model.bind_tools([TOOL], tool_choice="none").invoke([*messages, answer, result])
        assert isinstance(final, AIMessage) and final.text and not final.tool_calls

    def test_streamed_tool_call(self, server: Any, use_responses_api: bool) -> None:
        model = chat(server, use_responses_api=use_responses_api)
        bound = model.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
        chunks = list(bound.stream("How is the weather in Paris?"))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole = whole + chunk
        (call,) = whole.tool_calls
        assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome")

    def test_agent_calls_its_tool(self, server: Any, use_responses_api: bool) -> None:
        def force_the_first_call(request: ModelRequest, handler: Any) -> Any:
            called = any(isinstance(message, ToolMessage) for message in request.messages)
            return handler(request.override(tool_choice="none" if called else "required", model_settings=ONE_CALL))

        calls.clear()
        model = chat(server, max_tokens=100, use_responses_api=use_responses_api)
        agent = create_agent(model, [TOOL], middleware=[wrap_model_call(force_the_first_call)])
        messages = agent.invoke({"messages": [HumanMessage("How is the weather in Paris?")]})["messages"]
        assert [type(message).__name__ for message in messages] == [
            "HumanMessage", "AIMessage", "ToolMessage", "AIMessage",
        ]  # fmt: skip
        assert len(calls) == 1 and messages[2].content == f"It rains in {calls[0]}."

    @pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy])
    def test_agent_with_structured_answer(self, server: Any, use_responses_api: bool, strategy: Any) -> None:
        model = chat(server, use_responses_api=use_responses_api)
        agent = create_agent(
            model, response_format=strategy(ForecastByLangchain), middleware=[wrap_model_call(allow_one_call)]
        )
        answer = agent.invoke({"messages": [HumanMessage("How is the weather?")]})
        assert isinstance(answer["structured_response"], ForecastByLangchain)


async def test_asynchronous_calls(server: Any) -> None:
    """One test, since langchain-openai keeps its asynchronous client, and with it the event loop."""
    for use_responses_api in (False, True):
        model = chat(server, max_tokens=8, use_responses_api=use_responses_api)
        text = (await model.ainvoke(QUESTION)).text
        assert text and "".join([chunk.text async for chunk in model.astream(QUESTION)]) == text
        assert [answer.text for answer in await model.abatch([QUESTION, QUESTION])] == [text, text]


class TestCompletions:
    def test_stream_has_the_text_of_the_answer(self, server: Any) -> None:
        model = OpenAI(
            model=server.model, base_url=server.base_url, api_key=server.api_key, temperature=0, max_tokens=16
        )
        text = model.invoke("Once upon a time")
        assert text and "".join(model.stream("Once upon a time")) == text
