"""The jobs API: submit, look up, list, follow, resume, cancel."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
from scripted_worker import ScriptedWorker, Step, ended, logprob, tale, token
from served_gateway import read_frames, serving

from ktqueue.broker.lease import Claim
from ktqueue.core.config import Config, ControlConfig
from ktqueue.core.errors import EngineFailure
from ktqueue.core.events import FinishReason, JobState
from ktqueue.core.request import JobClass

JOBS = "/v1/jobs"
BODY: dict[str, Any] = {"model": "tale", "prompt": "Once", "sampling": {"max_tokens": 9}}


async def wait_for_end(http: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            body: dict[str, Any] = (await http.get(f"{JOBS}/{job_id}")).json()
            if body["state"] not in ("queued", "running"):
                return body
            await asyncio.sleep(0.02)


async def test_a_submitted_job_can_be_looked_up(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    response = await http.post(JOBS, json={**BODY, "user": "u", "metadata": {"a": "b"}, "priority": 7})
    assert response.status_code == 202
    job = response.json()
    assert response.headers["location"] == f"{JOBS}/{job['id']}"
    assert (job["object"], job["state"], job["position"], job["priority"]) == ("job", "queued", 1, 7)
    done = await wait_for_end(http, job["id"])
    assert (done["state"], done["attempts"], done["user"], done["metadata"]) == ("done", 1, "u", {"a": "b"})
    assert done["result"] == [{"index": 0, "text": "Once upon a time", "finish_reason": "stop"}]
    assert done["usage"]["total_tokens"] == 8
    assert done["created_at"] <= done["started_at"] <= done["finished_at"]


PRIVATE = [
    "https://127.0.0.1/", "https://127.1/x", "https://2130706433/", "https://0x7f000001/", "https://0177.0.0.1/",
    "https://10.0.0.1:8443/", "https://192.168.1.1/", "https://169.254.169.254/latest/meta-data", "https://100.64.0.1/",
    "https://0.0.0.0/", "https://[::1]/", "https://[fe80::1]/", "https://[fd00::1]/", "https://[::ffff:10.0.0.1]/",
    "https://[64:ff9b::a00:1]/", "https://localhost/", "https://LOCALHOST./", "https://a.localhost/",
]  # fmt: skip


async def test_webhooks_are_refused_if_they_could_not_be_called(
    http: httpx.AsyncClient, config: Config, worker: ScriptedWorker
) -> None:
    hook = {"url": "http://example.org/hook", "events": ["failed"]}
    off = await http.post(JOBS, json={**BODY, "webhook": hook})
    assert (off.status_code, off.json()["error"]["param"]) == (400, "webhook")
    control = ControlConfig(webhook_secret="secret", webhook_hosts=("intern",))
    async with serving(replace(config, control=control)) as (_, base), httpx.AsyncClient(base_url=base) as client:
        plain = await client.post(JOBS, json={**BODY, "webhook": hook})
        assert (plain.status_code, plain.json()["error"]["param"]) == (400, "webhook.url")
        for url in PRIVATE:
            private = await client.post(JOBS, json={**BODY, "webhook": {"url": url}})
            assert (private.status_code, private.json()["error"]["param"]) == (400, "webhook.url"), url
        wrong = await client.post(JOBS, json={**BODY, "webhook": {**hook, "events": ["done"]}})
        assert wrong.status_code == 400
        for body in (BODY, {"model": "tale", "messages": [{"role": "user", "content": "Hi"}]}):
            for url in ("https://example.org/hook", "http://intern:8080/hook"):
                taken = await client.post(JOBS, json={**body, "webhook": {"url": url}})
                assert taken.status_code == 202, taken.text


async def test_a_job_may_have_a_prompt_ids_or_messages(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for body in (
        {"model": "tale", "prompt_token_ids": [1, 2], "job_class": "batch", "priority": -100},
        {"model": "tale", "messages": messages, "sampling": {"n": 2, "logit_bias": {"5": 1}, "stop": ["x"]}},
        {"model": "tale", "messages": messages, "max_tokens": 4, "job_class": "batch"},
    ):
        assert (await http.post(JOBS, json=body)).status_code == 202
    await worker.claimed(3)
    requests = {bool(claim.request.messages) + claim.request.sampling.n: claim.request for claim in worker.claims}
    assert requests[1].prompt_token_ids == (1, 2)
    assert (requests[1].job_class, requests[1].priority, requests[3].priority) == (JobClass.BATCH, -100, 0)
    assert (requests[3].sampling.logit_bias, requests[3].sampling.stop) == ({5: 1}, ("x",))
    assert (requests[2].sampling.max_tokens, requests[2].job_class) == (4, JobClass.BATCH)


async def test_a_wrong_body_is_refused_by_field(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    for change, param in (
        ({"max_tokens": 5}, "max_tokens"),
        ({"sampling": {"max_token": 5}}, "sampling.max_token"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": 5}, "sampling"),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"expires_in": -1}, "expires_in"),
        ({"priority": -101}, "priority"),
    ):
        response = await http.post(JOBS, json={**BODY, **change})
        assert response.status_code == 400, change
        assert response.json()["error"]["param"] == param
    hint = (await http.post(JOBS, json={**BODY, "max_tokens": 5})).json()["error"]["message"]
    assert "did you mean sampling.max_tokens?" in hint


async def test_jobs_are_listed_by_state_and_limit(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    ids = [(await http.post(JOBS, json=BODY)).json()["id"] for _ in range(3)]
    for job_id in ids:
        await wait_for_end(http, job_id)
    listed = (await http.get(JOBS)).json()
    assert {job["id"] for job in listed["data"]} == set(ids)
    assert len((await http.get(f"{JOBS}?limit=2&state=done")).json()["data"]) == 2
    assert (await http.get(f"{JOBS}?state=running")).json()["data"] == []
    for query in ("limit=0", "limit=x", "limit=1001", f"limit={'0' * 5000}1", "state=gone"):
        response = await http.get(f"{JOBS}?{query}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == query.split("=")[0]


async def test_every_reader_sees_each_event_once_over_reconnects(url: str, worker: ScriptedWorker) -> None:
    async def long(claim: Claim) -> AsyncIterator[Step]:
        for word in range(60):
            yield token(f"{word} ", logprobs=(logprob(b"x"),))
            yield 0.005
        yield {"finish_reason": FinishReason.STOP}
        yield ended(claim)

    worker.script = long
    async with httpx.AsyncClient(base_url=url, timeout=10) as http:
        job = (await http.post(JOBS, json=BODY)).json()
        seen: list[Any] = []
        for turn in range(40):
            headers = {"last-event-id": str(seen[-1]["seq"])} if seen and turn % 2 else {}
            query = f"?starting_after={seen[-1]['seq']}" if seen and not turn % 2 else ""
            async with http.stream("GET", job["events_url"] + query, headers=headers) as response:
                if response.status_code == 204:
                    break
                frames = await read_frames(response, until=lambda frames: len(frames.data) >= 5)
                assert frames.ids == [entry["seq"] for entry in frames.data][: len(frames.ids)]
                seen += frames.data
        else:
            raise AssertionError("the stream never ended")
        assert [event["seq"] for event in seen] == list(range(1, 63))
        assert "".join(event.get("text", "") for event in seen) == "".join(f"{word} " for word in range(60))
        assert [event["state"] for event in seen if "state" in event] == ["done"]
        assert seen[0]["logprobs"][0]["token"] == "x"
        # A reader that left has cancelled nothing, and another reader gets the whole journal.
        async with http.stream("GET", job["events_url"]) as response:
            assert (await read_frames(response)).ids == list(range(1, 63))
        beyond = await http.get(job["events_url"] + "?starting_after=99")
        wrong = await http.get(job["events_url"] + "?starting_after=-1", headers={"last-event-id": "1"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "starting_after")
        assert (beyond.status_code, beyond.json()["error"]["limit"]) == (400, 62)


async def test_a_wrong_last_event_id_is_an_error(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    job = (await http.post(JOBS, json=BODY)).json()
    await wait_for_end(http, job["id"])
    for given in ("x", "-1", "1.5", "9" * 30, "9" * 18, "99"):
        response = await http.get(job["events_url"], headers={"last-event-id": given})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "Last-Event-ID"


async def test_a_silent_stream_has_heartbeats(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    async def late(claim: Claim) -> AsyncIterator[Step]:
        yield 0.5
        yield ended(claim)

    worker.script = late
    job = (await http.post(JOBS, json=BODY)).json()
    async with http.stream("GET", job["events_url"]) as response:
        frames = await read_frames(response)
    assert frames.pings >= 3
    assert frames.ids == [1]


async def never(claim: Claim) -> AsyncIterator[Step]:
    """Half of an answer, which does not end."""
    yield token("half")
    for _ in range(1000):
        yield 0.01


async def test_a_job_can_be_cancelled(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    worker.script = never
    job = (await http.post(JOBS, json={**BODY, "sampling": {"n": 2}})).json()
    async with http.stream("GET", job["events_url"]) as response:
        await read_frames(response, until=lambda frames: bool(frames.data))
    response = await http.delete(f"{JOBS}/{job['id']}")
    assert response.status_code == 200
    ended = await wait_for_end(http, job["id"])
    assert ended["state"] == "cancelled"
    assert ended["result"] == [  # no choice has ended
        {"index": 0, "text": "half", "finish_reason": None},
        {"index": 1, "text": "", "finish_reason": None},
    ]
    assert (await http.delete(f"{JOBS}/{job['id']}")).status_code == 200
    assert worker.stopped == [job["id"]]

    worker.script = tale
    done = (await http.post(JOBS, json=BODY)).json()
    await wait_for_end(http, done["id"])
    response = await http.delete(f"{JOBS}/{done['id']}")
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "job_conflict"


async def test_a_chat_cancelled_by_another_client_is_an_error(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    """If another client cancels the job, its chat ends with an error, streamed or not."""
    worker.script = never
    chat = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}]}

    async def cancel_soon() -> None:
        await asyncio.sleep(0.2)
        await http.delete(f"{JOBS}/{worker.claims[-1].job_id}")

    task = asyncio.create_task(cancel_soon())
    response = await http.post("/v1/chat/completions", json=chat)
    await task
    assert response.status_code == 499
    assert response.json()["error"]["code"] == "cancelled"
    task = asyncio.create_task(cancel_soon())
    async with http.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as response:
        frames = await read_frames(response)
    await task
    assert frames.data[-1]["error"]["code"] == "cancelled"
    assert not frames.done
    assert JobState.CANCELLED.value == (await http.get(f"{JOBS}/{worker.claims[-1].job_id}")).json()["state"]


async def test_a_failed_job_can_be_retried(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    async def fail(claim: Claim) -> AsyncIterator[Step]:
        yield {"state": JobState.FAILED, "error": EngineFailure("the device broke").info()}

    fine, worker.script = worker.script, fail
    job = (await http.post(JOBS, json=BODY)).json()
    assert (await wait_for_end(http, job["id"]))["state"] == "failed"
    worker.script = fine
    response = await http.post(f"{JOBS}/{job['id']}/retry")
    again = response.json()
    assert (response.status_code, response.headers["location"]) == (202, f"{JOBS}/{again['id']}")
    assert (await wait_for_end(http, again["id"]))["state"] == "done"
    assert (await http.get(f"{JOBS}/{job['id']}")).json()["retried_as"] == again["id"]
    refused = await http.post(f"{JOBS}/{again['id']}/retry")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_conflict")
    assert (await http.post(f"{JOBS}/nobody/retry")).status_code == 404
