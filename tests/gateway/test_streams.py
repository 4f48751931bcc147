"""Streams under stress: clients that leave or do not read, hundreds of clients, a gateway that stops."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from scripted_worker import ScriptedWorker, Step, ended, token
from served_gateway import ServeWith, read_frames

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim
from ktqueue.core.events import JobState

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def endless(worker: ScriptedWorker) -> ScriptedWorker:
    """The worker yields words until the job is cancelled."""

    async def talk(claim: Claim) -> AsyncIterator[Step]:
        while True:
            yield token("word ")
            yield 0.01

    worker.script = talk
    return worker


def question(claim: Claim) -> str:
    """The content of a chat's first message."""
    assert claim.request.messages is not None
    return str(claim.request.messages[0]["content"])


async def state_of(broker: Broker, job_id: str) -> JobState:
    return (await broker.jobs.get(job_id)).state


async def stopped(broker: Broker, job_id: str) -> JobState | None:
    """The state in which a job ends."""
    async with asyncio.timeout(5):
        async for event in broker.journal.follow(job_id):
            last = event
    return last.state


async def test_leaving_a_stream_cancels_its_job(url: str, endless: ScriptedWorker, broker: Broker) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        async with http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
            job_id = response.headers["x-job-id"]
            await read_frames(response, until=lambda frames: len(frames.data) > 3)
        assert await stopped(broker, job_id) is JobState.CANCELLED


async def test_leaving_before_the_first_token_cancels_the_job(
    serve_with: ServeWith, worker: ScriptedWorker, broker: Broker
) -> None:
    async def silent(_: Claim) -> AsyncIterator[Step]:
        while True:
            yield 0.02

    worker.script = silent
    async with serve_with(first_event_wait=30.0, heartbeat_seconds=30.0) as (_, url):
        for stream in (True, False):
            async with httpx.AsyncClient(base_url=url, timeout=0.3) as http:
                with pytest.raises(httpx.ReadTimeout):
                    await http.post(CHAT, json={**BODY, "stream": stream})
            assert await stopped(broker, worker.claims[-1].job_id) is JobState.CANCELLED
    assert len(worker.claims) == 2


async def test_an_idempotency_key_keeps_the_job(url: str, endless: ScriptedWorker, broker: Broker) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        headers = {"idempotency-key": "come-back"}
        ids = []
        for _ in range(2):
            async with http.stream("POST", CHAT, json={**BODY, "stream": True}, headers=headers) as response:
                ids.append(response.headers["x-job-id"])
                frames = await read_frames(response, until=lambda frames: len(frames.data) > 3)
                assert frames.data[0]["choices"][0]["delta"]["role"] == "assistant"
            await asyncio.sleep(0.2)
        assert ids[0] == ids[1]
        assert await state_of(broker, ids[0]) is JobState.RUNNING
        await http.delete(f"/v1/jobs/{ids[0]}")


async def test_a_client_that_does_not_read_is_dropped(
    serve_with: ServeWith, worker: ScriptedWorker, broker: Broker
) -> None:
    async def flood(claim: Claim) -> AsyncIterator[Step]:
        while True:
            for _ in range(20):
                yield token("x" * 5_000)
            yield 0.001

    worker.script = flood
    async with serve_with(stall_seconds=0.5) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps({**BODY, "stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        async with asyncio.timeout(15):
            await worker.claimed(1)
            assert await stopped(broker, worker.claims[0].job_id) is JobState.CANCELLED
        writer.transport.abort()
        del reader


async def post_raw(url: str, path: str, body: Any) -> list[Any]:
    """The chunks of a stream, read without a client library, which would take most of the time."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    lines = (await reader.read()).split(b"\n")
    writer.close()
    await writer.wait_closed()
    assert b"data: [DONE]" in lines
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


async def test_two_hundred_streams_at_once(url: str, worker: ScriptedWorker) -> None:
    async def talk(claim: Claim) -> AsyncIterator[Step]:
        for word in range(10):
            yield token(f"{question(claim)}-{word} ")
            yield 0.02
        yield {"finish_reason": "stop"}
        yield ended(claim)

    worker.script = talk

    async def read_stream(number: int) -> str:
        body = {"model": "tale", "messages": [{"role": "user", "content": str(number)}], "stream": True}
        chunks = await post_raw(url, CHAT, body)
        return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])

    texts = await asyncio.gather(*(read_stream(number) for number in range(200)))
    assert texts == ["".join(f"{number}-{word} " for word in range(10)) for number in range(200)]
    async with httpx.AsyncClient(base_url=url) as http:
        metrics = (await http.get("/metrics")).text
    assert "ktqueue:open_streams 0.0" in metrics
    assert 'ktqueue:request_success_total{finished_reason="stop",model_name="tale"} 200.0' in metrics


async def test_stop_lets_streams_end_and_then_ends_them(
    serve_with: ServeWith, worker: ScriptedWorker, broker: Broker
) -> None:
    async def talk(claim: Claim) -> AsyncIterator[Step]:
        for word in range(30 if question(claim) == "short" else 100_000):
            yield token(f"{word} ")
            yield 0.01
        yield {"finish_reason": "stop"}
        yield ended(claim)

    worker.script = talk
    async with serve_with(drain_seconds=2.0) as (server, url), httpx.AsyncClient(base_url=url, timeout=20) as http:

        async def follow(word: str) -> Any:
            body = {"model": "tale", "messages": [{"role": "user", "content": word}], "stream": True}
            async with http.stream("POST", CHAT, json=body) as response:
                return response.headers["x-job-id"], await read_frames(response)

        short, long = asyncio.create_task(follow("short")), asyncio.create_task(follow("long"))
        job = (await http.post("/v1/jobs", json={"model": "tale", **BODY})).json()
        events = asyncio.create_task(http.get(job["events_url"]))
        await worker.claimed(3)
        await asyncio.sleep(0.1)
        server.handle_exit(15, None)
        await asyncio.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(base_url=url) as other:
                await other.get("/healthz")
        _, short_frames = await short
        long_id, long_frames = await long
        assert short_frames.done
        assert long_frames.data[-1]["error"]["code"] == "shutting_down"
        assert "id: " in (await events).text
        assert "error" not in (await events).text
    assert await stopped(broker, long_id) is JobState.CANCELLED
    assert await state_of(broker, job["id"]) is JobState.RUNNING
    await broker.jobs.cancel(job["id"])
