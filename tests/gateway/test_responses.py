"""/v1/responses: bodies, events, stored responses, the background, and the openai package."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from scripted_worker import ScriptedWorker, Step, ended, logprob, token
from served_gateway import Conforms, ServeWith

from ktqueue.broker.lease import Claim
from ktqueue.core.events import FinishReason, PromptPart
from ktqueue.core.tenants import TenantConfig, hash_of

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tale", "input": "Tell me"}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}


async def events_of(http: httpx.AsyncClient, method: str, path: str, **options: Any) -> list[dict[str, Any]]:
    """The events of a stream, which are named after their type and numbered without gaps."""
    events = []
    async with http.stream(method, path, **options) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                assert events[-1]["type"] == name
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return events


async def test_a_response_has_the_answer_as_a_message(
    http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms
) -> None:
    body = {**BODY, "instructions": "Be brief", "max_output_tokens": 7, "metadata": {"a": "b"}}
    response = (await http.post(PATH, json=body)).json()
    conforms(response, "Response")
    assert response["status"] == "completed"
    (item,) = response["output"]
    assert (item["type"], item["role"], item["content"][0]["text"]) == ("message", "assistant", "Once upon a time")
    assert (response["instructions"], response["metadata"]) == ("Be brief", {"a": "b"})
    assert response["service_tier"] == "default"
    request = worker.claims[0].request
    assert [message["role"] for message in request.messages or ()] == ["system", "user"]
    assert request.sampling.max_tokens == 7


async def test_events_add_up_to_the_response(
    http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms
) -> None:
    events = await events_of(http, "POST", PATH, json={**BODY, "stream": True})
    for event in events:
        conforms(event, "ResponseStreamEvent")
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "Once upon a time"
    assert (await http.get(f"{PATH}/{events[0]['response']['id']}")).json() == events[-1]["response"]


@pytest.mark.parametrize(
    "asked", [{"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"top_logprobs": 2}]
)
async def test_log_probabilities_come_with_the_text(
    http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms, asked: dict[str, Any]
) -> None:
    events = await events_of(http, "POST", PATH, json={**BODY, **asked, "stream": True})
    for event in events:
        conforms(event, "ResponseStreamEvent")
    deltas = [entry for event in events if "delta" in event for entry in event["logprobs"]]
    (item,) = events[-1]["response"]["output"]
    assert [entry["token"] for entry in deltas] == ["Once", " upon", " a time"]
    assert item["content"][0]["logprobs"] == deltas
    assert [len(entry["top_logprobs"]) for entry in deltas] == [2, 2, 2]
    whole = (await http.post(PATH, json={**BODY, **asked})).json()
    assert whole["output"][0]["content"] == item["content"]
    assert worker.claims[0].request.sampling.logprobs == whole["top_logprobs"] == 2


async def test_log_probabilities_are_of_the_text_alone(http: httpx.AsyncClient, caller: ScriptedWorker) -> None:
    call = ["<tool_call>", '{"name": "weather", "arguments": {}}', "</tool_call>"]

    async def thinks_and_calls(claim: Claim) -> AsyncIterator[Step]:
        for text in ["<think>", "Hm.", "</think>", "I", " ask.", *call, "Bye", "."]:
            yield token(text, logprobs=(logprob(text.encode()),))
        yield {"finish_reason": FinishReason.STOP}
        yield ended(claim)

    caller.script = thinks_and_calls
    body = {**BODY, "tools": [TOOL], "top_logprobs": 2}
    events = await events_of(http, "POST", PATH, json={**body, "stream": True})
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [
        [event["delta"]] for event in deltas
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    messages = [item["content"][0] for item in done if item["type"] == "message"]
    found = [[entry["token"] for entry in content["logprobs"]] for content in messages]
    assert found == [["I", " ask."], ["Bye", "."]]
    whole = (await http.post(PATH, json=body)).json()["output"]
    assert [item["content"][0] for item in whole if item["type"] == "message"] == messages


async def test_reasoning_text_and_a_call_are_items_of_their_own(
    http: httpx.AsyncClient, caller: ScriptedWorker, conforms: Conforms
) -> None:
    events = await events_of(http, "POST", PATH, json={**BODY, "tools": [TOOL], "stream": True})
    for event in events:
        conforms(event, "ResponseStreamEvent")
    reasoning, message, call = events[-1]["response"]["output"]
    assert reasoning["content"][0]["text"] == "Hm."
    assert message["content"][0]["text"] == "I ask."
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Paris"})
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call["arguments"]


async def test_functions_of_a_namespace_are_called(http: httpx.AsyncClient, caller: ScriptedWorker) -> None:
    async def calls(claim: Claim) -> AsyncIterator[Step]:
        for text in ["<tool_call>", '{"name": "crm__weather", "arguments": {}}', "</tool_call>"]:
            yield token(text)
        yield {"finish_reason": FinishReason.STOP}
        yield ended(claim)

    caller.script = calls
    space = {"type": "namespace", "name": "crm", "description": "Ours", "tools": [TOOL]}
    body = {**BODY, "tools": [{**TOOL, "name": "time"}, space, {"type": "web_search", "external_web_access": False}]}
    events = await events_of(http, "POST", PATH, json={**body, "stream": True})
    response = events[-1]["response"]
    (call,) = response["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("crm", "weather", "{}")
    assert [tool["type"] for tool in response["tools"]] == ["function", "namespace"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    await http.post(PATH, json={**body, "input": [{"role": "user", "content": "x"}, call, output]})
    await http.post(PATH, json={**body, "input": [output], "previous_response_id": response["id"]})
    for claim in caller.claims:
        assert [tool["function"]["name"] for tool in claim.request.tools or ()] == ["time", "crm__weather"]
    for claim in caller.claims[1:]:
        _, answer, _ = claim.request.messages or ()
        assert answer["tool_calls"][0]["function"]["name"] == "crm__weather"
    wrong = {**TOOL, "name": "wrong", "parameters": {"type": "object", "not": {}}, "strict": True}
    for tools, param in (
        ([space, wrong], "tools[1]"),
        ([TOOL, {**space, "tools": [TOOL, wrong]}], "tools[1].tools[1]"),
    ):
        refused = await http.post(PATH, json={**BODY, "tools": tools, "tool_choice": "required"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"{param}.parameters")


async def test_a_conversation_goes_on_with_a_call_and_its_output(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    first = (await http.post(PATH, json=BODY)).json()
    items = [
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ]
    await http.post(PATH, json={**BODY, "input": items, "previous_response_id": first["id"]})
    messages = worker.claims[1].request.messages or ()
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "Tell me"), ("assistant", "Once upon a time"), ("tool", "rain"), ("user", "And now?")
    ]  # fmt: skip
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}


async def test_items_are_referenced_instead_of_sent_again(http: httpx.AsyncClient, caller: ScriptedWorker) -> None:
    begun = {**BODY, "tools": [TOOL]}
    made = (await http.post(PATH, json=begun)).json()
    (asked,) = (await http.get(f"{PATH}/{made['id']}/input_items")).json()["data"]
    ids = [asked["id"], *(item["id"] for item in made["output"])]
    output = {"type": "function_call_output", "call_id": made["output"][2]["call_id"], "output": "rain"}
    for kind in ({"type": "item_reference"}, {"type": None}, {}):
        references = [{**kind, "id": item_id} for item_id in ids]
        assert (await http.post(PATH, json={**begun, "input": [*references, output]})).status_code == 200
        _, answer, last = caller.claims[-1].request.messages or ()
        assert (answer["reasoning_content"], answer["content"], last["content"]) == (
            "Hm.", "I ask.", "rain"
        )  # fmt: skip
        assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}


async def test_a_reference_to_an_item_that_is_not_stored_is_refused(
    serve_with: ServeWith, worker: ScriptedWorker
) -> None:
    tenants = tuple(TenantConfig(name=name, keys=(hash_of(name),)) for name in ("one", "two"))
    async with serve_with(tenants=tenants) as (_, url), httpx.AsyncClient(base_url=url) as http:
        mine, theirs = ({"authorization": f"Bearer {name}"} for name in ("one", "two"))
        other = (await http.post(PATH, json=BODY, headers=theirs)).json()["output"][0]["id"]
        forgotten = (await http.post(PATH, json={**BODY, "store": False}, headers=mine)).json()["output"][0]["id"]
        known = (await http.post(PATH, json=BODY, headers=mine)).json()["output"][0]["id"]
        for item_id in (other, forgotten, known[:-1] + "7", "x", "", 5, None):
            item = {"type": "item_reference", "id": item_id}
            refused = await http.post(
                PATH, json={**BODY, "input": [{"role": "user", "content": "x"}, item]}, headers=mine
            )
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input[1].id"), item_id
    assert len(worker.claims) == 3


async def test_references_add_up_to_no_more_than_a_body(serve_with: ServeWith, worker: ScriptedWorker) -> None:
    async with serve_with(max_body_bytes=100_000) as (_, url), httpx.AsyncClient(base_url=url) as http:
        made = (await http.post(PATH, json={**BODY, "input": "x" * 20_000})).json()
        (asked,) = (await http.get(f"{PATH}/{made['id']}/input_items")).json()["data"]
        for count, status in ((4, 200), (5, 413), (1_000, 413)):
            references = [{"type": "item_reference", "id": asked["id"]}] * count
            answer = await http.post(PATH, json={**BODY, "input": references})
            assert answer.status_code == status
            if status == 413:
                error = answer.json()["error"]
                assert (error["param"], error["limit"]) == ("input", 100_000) and error["value"] < 130_000


async def test_the_items_of_a_conversation_are_listed_as_they_came(
    http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms
) -> None:
    first = (await http.post(PATH, json={**BODY, "instructions": "Be brief"})).json()
    asked = [{"type": "input_text", "text": "Is it"}, {"type": "input_text", "text": " wet?"}]
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": asked},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ]
    made = (await http.post(PATH, json={**BODY, "input": items, "previous_response_id": first["id"]})).json()
    path = f"{PATH}/{made['id']}/input_items"
    listed = (await http.get(path, params={"order": "asc"})).json()
    conforms(listed, "ResponseItemList")
    text = {"type": "output_text", "text": "Once upon a time", "annotations": [], "logprobs": []}
    told = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Tell me"}]}
    assert [{name: item[name] for name in item if name not in ("id", "status")} for item in listed["data"]] == [
        told, {"type": "message", "role": "assistant", "content": [text]}, *items
    ]  # fmt: skip
    ids = [item["id"] for item in listed["data"]]
    assert len(set(ids)) == 6
    assert [item["id"] for item in (await http.get(path)).json()["data"]] == ids[::-1]  # OpenAI's default
    page = (await http.get(path, params={"limit": 2, "after": ids[4]})).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[3], ids[2], True)
    last = (await http.get(path, params={"limit": 2, "after": ids[0]})).json()
    assert (last["data"], last["has_more"]) == ([], False)
    for name, value in (("order", "up"), ("limit", "101"), ("after", "msg_none")):
        refused = await http.get(path, params={name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_a_response_in_the_background_can_be_followed_from_any_event(
    http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms
) -> None:
    begun = (await http.post(PATH, json={**BODY, "background": True})).json()
    conforms(begun, "Response")
    assert begun["status"] in ("queued", "in_progress")
    path = f"{PATH}/{begun['id']}"
    every = await events_of(http, "GET", path, params={"stream": "true"})
    assert every[-1]["type"] == "response.completed"
    for after in (0, 3, len(every) - 2):
        params = {"stream": "true", "starting_after": str(after)}
        assert await events_of(http, "GET", path, params=params) == every[after + 1 :]
    assert (await http.get(path)).json() == every[-1]["response"]


async def test_a_response_is_cancelled_and_deleted(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    async def slow(claim: Claim) -> AsyncIterator[Step]:
        yield token("Once")
        yield 60.0

    worker.script = slow
    begun = (await http.post(PATH, json={**BODY, "background": True})).json()
    cancelled = (await http.post(f"{PATH}/{begun['id']}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    allowed = (await http.put(f"{PATH}/{begun['id']}")).headers["allow"]
    assert set(allowed.split(", ")) == {"GET", "HEAD", "DELETE"}
    assert (await http.delete(f"{PATH}/{begun['id']}")).json()["deleted"] is True
    missing = await http.get(f"{PATH}/{begun['id']}")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "response_not_found")


async def test_what_is_not_stored_cannot_be_found(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    response = (await http.post(PATH, json={**BODY, "store": False})).json()
    assert (await http.get(f"{PATH}/{response['id']}")).status_code == 404
    refused = await http.post(PATH, json={**BODY, "previous_response_id": response["id"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")


async def test_tokens_of_the_input_are_counted(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    async def script(claim: Claim) -> AsyncIterator[Step]:
        assert claim.request.prompt_only
        yield {"prompt": PromptPart(token_ids=(1, 2, 3, 4), text="abcd")}
        yield ended(claim)

    worker.script = script
    counted = await http.post(f"{PATH}/input_tokens", json={**BODY, "instructions": "Be brief"})
    assert (counted.status_code, counted.json()) == (200, {"object": "response.input_tokens", "input_tokens": 4})
    for field in ({"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"max_output_tokens": "x"}):
        refused = await http.post(f"{PATH}/input_tokens", json={**BODY, **field})
        assert (refused.status_code, [refused.json()["error"]["param"]]) == (400, list(field))


async def test_a_response_belongs_to_its_tenant(serve_with: ServeWith, worker: ScriptedWorker) -> None:
    tenants = tuple(TenantConfig(name=name, keys=(hash_of(name),)) for name in ("one", "two"))
    async with serve_with(tenants=tenants) as (_, url), httpx.AsyncClient(base_url=url) as http:
        mine, theirs = ({"authorization": f"Bearer {name}"} for name in ("one", "two"))
        response = (await http.post(PATH, json=BODY, headers=mine)).json()
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = await http.request(method, f"{PATH}/{response['id']}{path}", headers=theirs)
            assert answer.status_code == 404
        assert (await http.get(f"{PATH}/{response['id']}", headers=mine)).json() == response


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "file_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [TOOL] * 65}] * 2}, "tools"),
        (
            {"tools": [TOOL, {"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "b"}]}]},
            "tools.1.tools.0.type",
        ),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": 5}]}, "input[0]"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "unknown"}}, "tool_choice"),
        ({"background": True, "store": False}, "background"),
        ({"temperature": 3}, "temperature"),
        ({"include": ["message.output_text.logprobs", "usage"]}, "include.1"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, worker: ScriptedWorker, change: dict[str, Any], param: str
) -> None:
    response = await http.post(PATH, json={**BODY, **change})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_the_openai_package_creates_follows_and_retrieves(url: str, worker: ScriptedWorker) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        response = await client.responses.create(model="tale", input="Tell me")
        assert response.output_text == "Once upon a time"
        assert (await client.responses.retrieve(response.id)).output_text == "Once upon a time"
        async with client.responses.stream(model="tale", input="Tell me") as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output_text == "Once upon a time"
        assert kinds[-1] == "response.completed"
        begun = await client.responses.create(model="tale", input="Tell me", background=True, stream=True)
        assert [event.sequence_number async for event in begun][:2] == [0, 1]
