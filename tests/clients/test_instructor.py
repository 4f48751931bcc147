"""instructor, unchanged, in all its modes for servers that speak OpenAI."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

instructor: Any = pytest.importorskip("instructor")
pytestmark = pytest.mark.clients
QUESTION = [{"role": "user", "content": "How is the weather in Paris?"}]
TYPED = ["TOOLS", "TOOLS_STRICT", "FUNCTIONS", "JSON_SCHEMA", "RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS"]


class ForecastByInstructor(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "cloudy", "rain"]
    windy: bool


class AnyObject(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="allow")


class WeatherOfCity(BaseModel):
    """One of two tools."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


class TimeOfCity(BaseModel):
    """The other tool."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    summer: bool = Field(description="Whether it is summer.")


def extractor(server: Any, mode: str) -> Any:
    client = openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0, timeout=60)
    return instructor.from_openai(client, mode=instructor.Mode[mode], model=server.model)


ASK: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 200, "max_retries": 1}


@pytest.mark.parametrize("mode", TYPED)
def test_object_is_typed(server: Any, mode: str) -> None:
    client = extractor(server, mode)
    assert isinstance(client.create(response_model=ForecastByInstructor, **ASK), ForecastByInstructor)
    forecast, completion = client.create_with_completion(response_model=ForecastByInstructor, **ASK)
    assert isinstance(forecast, ForecastByInstructor) and completion.usage.total_tokens > 0


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_streamed_object_is_that_of_the_answer(server: Any, mode: str) -> None:
    client = extractor(server, mode)
    whole = client.create(response_model=ForecastByInstructor, **ASK)
    for _ in range(5):  # text that waits for a slow client is joined: on a busy machine this may be the whole answer
        parts = list(client.create_partial(response_model=ForecastByInstructor, **ASK))
        assert parts[-1].model_dump() == whole.model_dump()
        if len(parts) > 1:
            return
    pytest.fail("no stream came in parts")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_objects_of_a_list_arrive_one_by_one(server: Any, mode: str) -> None:
    """The package's schema lets the list be left out, which the built-in model does. This one does not."""
    objects = {"type": "array", "items": ForecastByInstructor.model_json_schema(), "minItems": 2, "maxItems": 2}
    schema = {"type": "object", "properties": {"tasks": objects}, "required": ["tasks"], "additionalProperties": False}
    name = "IterableForecastByInstructor"
    tool = {"type": "function", "function": {"name": name, "parameters": schema}}
    written = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    extra = {"tools": [tool]} if mode == "TOOLS" else {"response_format": written}
    client = extractor(server, mode)
    found = list(client.create_iterable(response_model=ForecastByInstructor, extra_body=extra, **ASK))
    assert len(found) == 2 and all(isinstance(forecast, ForecastByInstructor) for forecast in found)


def test_object_in_markdown(server: Any) -> None:
    """The package only asks for a block of JSON. The built-in model needs the pattern of one."""
    pattern = r'```json\n\{"sky": "(sunny|cloudy|rain)", "windy": (true|false)\}\n```'
    extra = {"guided_regex": pattern}
    forecast = extractor(server, "MD_JSON").create(response_model=ForecastByInstructor, extra_body=extra, **ASK)
    assert isinstance(forecast, ForecastByInstructor)


def test_any_json_object(server: Any) -> None:
    """The built-in model ends an object only now and then: the first seed with which it does counts."""
    client = extractor(server, "JSON")
    for seed in range(12):
        try:
            answer = client.create(response_model=AnyObject, **{**ASK, "temperature": 1}, seed=seed)
            break
        except instructor.core.InstructorRetryException:
            continue
    assert isinstance(answer, AnyObject)


def test_parallel_tools(server: Any) -> None:
    """The package leaves the choice to the model. The built-in model has to be forced, and to one call."""
    client = extractor(server, "PARALLEL_TOOLS")
    extra = {"tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.create(response_model=Iterable[WeatherOfCity | TimeOfCity], extra_body=extra, **ASK)
    assert isinstance(call, (WeatherOfCity, TimeOfCity))


def test_text_without_a_model(server: Any) -> None:
    answer = extractor(server, "TOOLS").create(response_model=None, **ASK)
    assert answer.choices[0].message.content and answer.usage.completion_tokens == 200


def test_wrong_object_is_asked_for_again(server: Any) -> None:
    """A validator that the grammar does not know refuses the first answer. The second request holds the error."""
    refused: list[str] = []

    def refuse_once(value: str) -> str:
        if not refused:
            refused.append(value)
            raise ValueError("say it again")
        return value

    class PickyForecast(BaseModel):
        model_config = ConfigDict(extra="forbid")
        sky: Annotated[Literal["sunny", "cloudy", "rain"], AfterValidator(refuse_once)]

    for mode in ("TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"):
        refused.clear()
        answer = extractor(server, mode).create(response_model=PickyForecast, **{**ASK, "max_retries": 2})
        assert len(refused) == 1 and answer.sky in ("sunny", "cloudy", "rain")


async def test_asynchronous_client(server: Any) -> None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0) as made:
        client = instructor.from_openai(made, mode=instructor.Mode.TOOLS, model=server.model)
        assert isinstance(await client.create(response_model=ForecastByInstructor, **ASK), ForecastByInstructor)


@pytest.mark.parametrize("provider", ["openai", "ollama"])
def test_provider_by_name(server: Any, provider: str) -> None:
    address = {"base_url": server.base_url, "api_key": server.api_key, "mode": instructor.Mode.TOOLS}
    client = instructor.from_provider(f"{provider}/{server.model}", **address)
    assert isinstance(client.create(response_model=ForecastByInstructor, **ASK), ForecastByInstructor)
