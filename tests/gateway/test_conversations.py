"""Streams are resumed by the id of their conversation, at any gateway, after any frame."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import redis
from scripted_worker import ScriptedWorker, Step, ended, logprob, token
from served_gateway import ServeWith

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim
from ktqueue.core.events import FinishReason, JobState
from ktqueue.core.tenants import TenantConfig, hash_of

CHAT, TEXT, STREAM = "/v1/chat/completions", "/v1/completions", "/v1/stream"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "logprobs": True, "top_logprobs": 1},
    TEXT: {"prompt": "Once", "logprobs": 1},
}
NAMED = {"x-conversation-id": "talk/1::tale"}
WORDS = 12


def body(path: str, **more: Any) -> dict[str, Any]:
    return {"model": "tale", "stream": True, **BODIES[path], **more}


def query(**more: Any) -> dict[str, Any]:
    return {"conv_id": NAMED["x-conversation-id"], **more}


@dataclass
class SlowTale:
    """A worker that stops in the middle of its text until `go` is set."""

    worker: ScriptedWorker
    go: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def slow_tale(worker: ScriptedWorker) -> SlowTale:
    """Yields the words of all choices in turn, some without text. The second half follows once `go` is set."""
    story = SlowTale(worker)

    async def talk(claim: Claim) -> AsyncIterator[Step]:
        n = claim.request.sampling.n
        for word in range(WORDS):
            for index in range(n):
                silent = word % 4 == 3
                text = "" if silent else f"{index}-{word} "
                yield token(text, index=index, logprobs=(logprob(b"w"),))
            if word == WORDS // 2:
                await story.go.wait()
        for index in range(n):
            yield {"index": index, "text": "!", "finish_reason": FinishReason.STOP}
        yield ended(claim)

    worker.script = talk
    return story


async def blocks(response: httpx.Response, at_most: int = 10_000) -> list[str]:
    """The raw events of a stream, without comments."""
    found, text = [], ""
    async for piece in response.aiter_text():
        text += piece
        *whole, text = text.split("\n\n")
        found += [block for block in whole if not block.startswith(":")]
        if len(found) >= at_most:
            return found[:at_most]
    return found


def id_of(block: str) -> str | None:
    head = block.partition("\n")[0]
    return head.removeprefix("id: ") if head.startswith("id: ") else None


async def resume(http: httpx.AsyncClient, last: str | None = None, **more: Any) -> list[str]:
    headers = {} if last is None else {"last-event-id": last}
    async with http.stream("GET", STREAM, params=query(**more), headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return await blocks(response)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stream_can_be_resumed_after_any_frame(
    url: str, serve_with: ServeWith, slow_tale: SlowTale, broker: Broker, path: str
) -> None:
    asked = body(path, stream_options={"include_usage": True})
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        async with http.stream("POST", path, json=asked, headers=NAMED) as response:
            job_id = response.headers["x-job-id"]
            seen = await blocks(response, at_most=5)
        # The client has left, but its job continues. Another gateway resumes the stream while it is running.
        assert all(id_of(block) for block in seen)
        async with serve_with() as (_, other), httpx.AsyncClient(base_url=other, timeout=20) as elsewhere:
            rest = asyncio.create_task(resume(elsewhere, id_of(seen[-1])))
            whole = asyncio.create_task(resume(elsewhere))
            await asyncio.sleep(0.1)
            slow_tale.go.set()
            everything = await whole
            assert seen + await rest == everything
        assert everything[-1] == "data: [DONE]"
        assert '"usage":' in everything[-2]
        assert (await broker.jobs.get(job_id)).state is JobState.DONE
        assert len(slow_tale.worker.claims) == 1
        ids = [id_of(block) for block in everything]
        assert len(set(ids[:-2])) == len(ids) - 2
        for place, last in enumerate(ids[:-2]):
            assert await resume(http, last) == everything[place + 1 :]
        assert await resume(http, starting_after=ids[3]) == everything[4:]
        metrics = (await http.get("/metrics")).text
    assert "ktqueue:open_streams 0.0" in metrics
    assert 'success_total{finished_reason="stop"' not in metrics  # resumed streams are not counted again


async def test_a_numbered_stream_has_the_same_content_as_others(http: httpx.AsyncClient, slow_tale: SlowTale) -> None:
    slow_tale.go.set()
    answers = []
    for headers in (NAMED, {}):
        async with http.stream("POST", CHAT, json=body(CHAT), headers=headers) as response:
            *chunks, end = await blocks(response)
        assert end == "data: [DONE]"
        texts = ["", ""]
        for chunk in chunks:
            for choice in json.loads(chunk.rpartition("data: ")[2])["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
        answers.append(texts)
    assert answers[0] == answers[1]
    assert answers[0][1].startswith("1-0 1-1 ")


async def test_the_next_answer_replaces_the_previous_one(
    http: httpx.AsyncClient, slow_tale: SlowTale, broker: Broker
) -> None:
    ids = []
    for _ in range(2):
        async with http.stream("POST", CHAT, json=body(CHAT), headers=NAMED) as response:
            ids.append(response.headers["x-job-id"])
            await blocks(response, at_most=1)
    async with asyncio.timeout(10):
        async for event in broker.journal.follow(ids[0]):
            last = event
    assert last.state is JobState.CANCELLED
    slow_tale.go.set()
    assert ids[1] in (await resume(http))[0]
    assert (await broker.jobs.get(ids[1])).state is JobState.DONE


async def test_repeating_a_request_cancels_nothing(
    http: httpx.AsyncClient, slow_tale: SlowTale, broker: Broker
) -> None:
    headers = {**NAMED, "idempotency-key": "one"}
    for _ in range(2):
        async with http.stream("POST", CHAT, json=body(CHAT), headers=headers) as response:
            await blocks(response, at_most=1)
    assert not (await broker.jobs.get(slow_tale.worker.claims[0].job_id)).cancel_requested
    slow_tale.go.set()
    assert (await resume(http))[-1] == "data: [DONE]"
    assert len(slow_tale.worker.claims) == 1


async def test_a_stream_can_be_cancelled(http: httpx.AsyncClient, slow_tale: SlowTale, broker: Broker) -> None:
    async with http.stream("POST", CHAT, json=body(CHAT), headers=NAMED) as response:
        job_id = response.headers["x-job-id"]
        seen = await blocks(response, at_most=3)
    for _ in range(2):
        assert (await http.delete(STREAM, params=query())).status_code == 204
    stopped = await resume(http)  # the text before the error, and the error
    assert stopped[:3] == seen
    assert '"code":"cancelled"' in stopped[-1]
    assert (await broker.jobs.get(job_id)).state is JobState.CANCELLED
    assert (await http.delete(STREAM, params={"conv_id": "nobody"})).status_code == 204


async def test_a_stream_that_cannot_be_resumed_is_an_error(
    http: httpx.AsyncClient, worker: ScriptedWorker, broker: Broker, redis_direct: str
) -> None:
    for params, status, param in (
        ({"conv_id": "nobody"}, 404, "conv_id"),
        ({}, 400, "conv_id"),
        ({"conv_id": ""}, 400, "conv_id"),
        ({"conv_id": "x" * 256}, 400, "conv_id"),
        ({"conv_id": "nobody", "from": "17"}, 400, "from"),
        ({"conv_id": "nobody", "starting_after": "1.5.2"}, 400, "starting_after"),
    ):
        answer = await http.get(STREAM, params=params)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), params
    two = await http.post(TEXT, json={"model": "tale", "prompt": ["a", "b"]}, headers=NAMED)
    assert (two.status_code, two.json()["error"]["param"]) == (400, "X-Conversation-Id")
    assert worker.claims == []
    answer = await http.post(CHAT, json={**body(CHAT), "stream": False}, headers=NAMED)
    assert answer.status_code == 200
    assert (await resume(http, **{"from": "0"}))[-1] == "data: [DONE]"
    beyond = await http.get(STREAM, params=query(), headers={"last-event-id": "99"})
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (400, "journal_regressed")
    assert beyond.json()["error"]["value"] == 99
    with redis.Redis.from_url(redis_direct) as client:
        (key,) = client.scan_iter(f"{broker.keys.tag}:conversation:*")
        assert 0 < client.ttl(key) <= broker.config.idempotency_ttl


async def test_a_conversation_belongs_to_its_tenant(serve_with: ServeWith, slow_tale: SlowTale, broker: Broker) -> None:
    tenants = tuple(TenantConfig(name=name, keys=(hash_of(f"key-{name}"),)) for name in ("one", "two"))
    slow_tale.go.set()
    async with serve_with(tenants=tenants) as (_, url), httpx.AsyncClient(base_url=url, timeout=20) as http:
        first, second = ({"authorization": f"Bearer key-{tenant.name}"} for tenant in tenants)
        job_id = (await http.post(CHAT, json=body(CHAT), headers={**NAMED, **first})).headers["x-job-id"]
        assert (await http.get(STREAM, params=query(), headers=second)).status_code == 404
        assert (await http.get(STREAM, params=query())).status_code == 401
        other = (await http.post(CHAT, json=body(CHAT), headers={**NAMED, **second})).headers["x-job-id"]
        for headers, job in ((first, job_id), (second, other)):
            assert job in (await http.get(STREAM, params=query(), headers=headers)).text
    assert (await broker.jobs.get(job_id)).state is JobState.DONE
