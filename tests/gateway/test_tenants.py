"""Tenants over HTTP: each sees only its own jobs, and no key is logged."""

import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from scripted_worker import CARD, ScriptedWorker, Step
from served_gateway import Conforms, ServeWith

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim, Lease
from ktqueue.core.request import GenerationRequest
from ktqueue.core.tenants import TenantConfig, hash_of

CHAT, JOBS = "/v1/chat/completions", "/v1/jobs"
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT_BODY: dict[str, Any] = {"model": "tale", "messages": MESSAGES}
JOB: dict[str, Any] = {"model": "tale", "prompt": "Once", "sampling": {"max_tokens": 9}}
TENANTS = tuple(TenantConfig(name=name, keys=(hash_of(f"key-{name}"),)) for name in ("acme", "zeta"))

LIMITED = TenantConfig(
    name="acme",
    keys=(hash_of("key-acme"),),
    requests_per_minute=60,
    requests_burst=3,
    tokens_per_minute=600,
    tokens_burst=1_000,
    max_live_jobs=2,
)


@pytest.fixture
async def limited(serve_with: ServeWith) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a tenant with limits."""
    async with serve_with(tenants=(LIMITED,), api_keys=(hash_of("key-operator"),)) as (_, url):
        headers = {"x-api-key": "key-acme"}
        async with httpx.AsyncClient(base_url=url, timeout=20, headers=headers) as client:
            yield client


@pytest.fixture
async def doors(serve_with: ServeWith) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    """An HTTP client for each tenant, one with the operator's key, and one without a known key."""
    async with serve_with(tenants=TENANTS, api_keys=(hash_of("key-operator"),)) as (_, url):
        clients = {
            name: httpx.AsyncClient(base_url=url, timeout=20, headers={"authorization": f"Bearer key-{name}"})
            for name in ("acme", "zeta", "operator", "nobody")
        }
        yield clients
        for client in clients.values():
            await client.aclose()


async def test_a_job_of_another_tenant_is_not_found(
    doors: dict[str, httpx.AsyncClient], worker: ScriptedWorker, conforms: Conforms
) -> None:
    mine = (await doors["acme"].post(JOBS, json=JOB)).json()["id"]
    path = f"{JOBS}/{mine}"
    unknown = (await doors["zeta"].get(f"{JOBS}/job-none")).json()["error"]
    for name in ("zeta", "operator"):
        for method, tried in (("GET", path), ("DELETE", path), ("GET", f"{path}/events")):
            response = await doors[name].request(method, tried)
            assert response.status_code == 404, (name, method, tried)
            conforms(response.json(), "ErrorResponse")
            assert response.json()["error"] == {**unknown, "message": unknown["message"].replace("job-none", mine)}
        assert (await doors[name].get(JOBS)).json()["data"] == []
    assert [job["id"] for job in (await doors["acme"].get(JOBS)).json()["data"]] == [mine]
    assert (await doors["acme"].get(path)).status_code == 200
    events = await doors["acme"].get(f"{path}/events")
    assert '"state":"done"' in events.text
    assert worker.stopped == []


async def test_chats_belong_to_their_tenant_and_share_no_idempotency_key(
    doors: dict[str, httpx.AsyncClient], worker: ScriptedWorker, broker: Broker
) -> None:
    ids = []
    for name in ("acme", "zeta"):
        response = await doors[name].post(CHAT, json=CHAT_BODY, headers={"idempotency-key": "same"})
        assert response.status_code == 200
        ids.append(response.headers["x-job-id"])
        assert (await broker.jobs.get(ids[-1])).tenant == name
    assert ids[0] != ids[1]
    assert (await doors["acme"].get(f"{JOBS}/{ids[0]}")).status_code == 200
    assert (await doors["acme"].get(f"{JOBS}/{ids[1]}")).status_code == 404
    assert {job.id for job in await broker.jobs.list()} == set(ids)  # Redis has the jobs of all tenants


async def test_only_the_operator_can_read_metrics(
    doors: dict[str, httpx.AsyncClient], worker: ScriptedWorker, conforms: Conforms
) -> None:
    assert (await doors["operator"].get("/metrics")).status_code == 200
    refused = await doors["acme"].get("/metrics")
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    conforms(refused.json(), "ErrorResponse")


async def test_without_keys_every_client_sees_all_jobs(
    http: httpx.AsyncClient, worker: ScriptedWorker, broker: Broker
) -> None:
    record = await broker.jobs.submit(GenerationRequest(model="tale", prompt="Once"), tenant="acme")
    assert (await http.get(f"{JOBS}/{record.id}")).status_code == 200
    assert record.id in {job["id"] for job in (await http.get(JOBS)).json()["data"]}


async def test_without_keys_each_client_address_takes_turns(http: httpx.AsyncClient, broker: Broker) -> None:
    lease = await Lease.register(broker, CARD)
    posted = [(await http.post(JOBS, json=JOB)).json() for _ in range(3)]
    direct = await broker.jobs.submit(GenerationRequest(model="tale", prompt="Once"))  # is another caller
    assert (posted[2]["position"], direct.position) == (3, 2)
    await lease.close()


async def test_a_tenants_weight_reaches_the_queue(serve_with: ServeWith, broker: Broker) -> None:
    heavy = TenantConfig(name="acme", keys=(hash_of("key-acme"),), weight=3)
    lease = await Lease.register(broker, CARD)
    async with serve_with(tenants=(heavy, TENANTS[1])) as (_, url), httpx.AsyncClient(base_url=url, timeout=20) as http:
        for _ in range(8):
            for name in ("acme", "zeta"):
                assert (await http.post(JOBS, json=JOB, headers={"x-api-key": f"key-{name}"})).status_code == 202
    claims = await lease.claim(8)
    tenants = [(await broker.jobs.get(claim.job_id)).tenant for claim in claims]
    assert tenants.count("acme") == 6
    await lease.close()


async def test_nothing_logs_a_key(
    doors: dict[str, httpx.AsyncClient],
    worker: ScriptedWorker,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    spoil_idempotency_keys: Callable[[], None],
) -> None:
    caplog.set_level(logging.DEBUG)
    assert (await doors["acme"].post(CHAT, json=CHAT_BODY)).status_code == 200
    for headers in ({"authorization": "Bearer key-wrong"}, {"authorization": "key-wrong"}, {"x-api-key": "key-wrong"}):
        refused = await doors["nobody"].get("/v1/models", headers=headers)
        assert refused.status_code == 401
        assert "key-" not in refused.text

    headers = {"idempotency-key": "mine"}
    assert (await doors["acme"].post(JOBS, json=JOB, headers=headers)).status_code == 202
    spoil_idempotency_keys()
    assert (await doors["acme"].post(JOBS, json=JOB, headers=headers)).status_code == 500
    said = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert any("POST" in line for line in said)  # the error is logged with its request
    assert "key-" not in "\n".join(said)
    captured = capfd.readouterr()
    assert "key-" not in captured.out + captured.err


async def test_headers_say_what_remains_of_the_rates(limited: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    chat = await limited.post(CHAT, json={**CHAT_BODY, "max_tokens": 200})
    job = await limited.post(JOBS, json={**JOB, "sampling": {"max_tokens": 99}})
    streamed = await limited.post(CHAT, json={**CHAT_BODY, "max_tokens": 9, "stream": True})
    assert (chat.status_code, job.status_code, streamed.status_code) == (200, 202, 200)
    lefts = []
    for response in (chat, job, streamed):
        headers = {key: value for key, value in response.headers.items() if key.startswith("x-ratelimit-")}
        assert len(headers) == 6
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-limit-tokens"]) == ("3", "1000")
        assert re.fullmatch(r"[0-9.]+m?s", headers["x-ratelimit-reset-requests"])
        lefts.append((int(headers["x-ratelimit-remaining-requests"]), int(headers["x-ratelimit-remaining-tokens"])))
    assert lefts[0][0] == 2
    assert 700 < lefts[0][1] < 800
    assert lefts[2][1] > 850  # the chat used 8 of its 200 tokens


async def test_a_refusal_by_a_rate_says_when_to_retry(
    limited: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms, broker: Broker
) -> None:
    body = {**JOB, "sampling": {"max_tokens": 800}}
    worker.script = endless
    assert (await limited.post(JOBS, json=body)).status_code == 202
    for path, again in ((JOBS, body), (CHAT, {**CHAT_BODY, "max_tokens": 800})):
        refused = await limited.post(path, json=again)
        assert refused.status_code == 429
        conforms(refused.json(), "ErrorResponse")
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert (error["param"], error["limit"]) == ("tokens_per_minute", 1_000)
        assert 700 < error["value"] <= 801
        # Tokens are refilled at 10 each second. One prompt has a token, the other some tens.
        missing = error["value"] + 801 - 1_000
        assert missing / 10 <= int(refused.headers["retry-after"]) <= (missing + 100) / 10 + 1
    assert (await limited.post(JOBS, json=JOB)).status_code == 202
    refused = await limited.post(JOBS, json=JOB)
    assert refused.json()["error"]["code"] == "tenant_limit_reached"
    assert (refused.status_code, refused.json()["error"]["param"]) == (429, "max_live_jobs")
    large = await limited.post(CHAT, json={**CHAT_BODY, "max_tokens": 2_000})
    assert (large.status_code, large.json()["error"]["param"]) == (413, "max_tokens")
    metrics = (await limited.get("/metrics", headers={"x-api-key": "key-operator"})).text.splitlines()
    for line in (
        'ktqueue:tenant_jobs_total{tenant="acme"} 2.0',
        'ktqueue:tenant_refusals_total{code="rate_limit_exceeded",tenant="acme"} 2.0',
        'ktqueue:tenant_refusals_total{code="tenant_limit_reached",tenant="acme"} 1.0',
        'ktqueue:tenant_jobs_live{tenant="acme"} 2.0',
        'ktqueue:tenant_jobs_queued{tenant="acme"} 0.0',
        'ktqueue:tenant_queued_bytes{tenant="acme"} 0.0',
    ):
        assert line in metrics, line
    others = await limited.post(JOBS, json=body, headers={"x-api-key": "key-operator"})
    assert others.status_code == 202
    assert not [key for key in others.headers if key.startswith("x-ratelimit-")]


async def endless(claim: Claim) -> AsyncIterator[Step]:
    for _ in range(1_000):
        yield 0.01


async def test_the_openai_package_sees_a_rate_limit_error(limited: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    settings: dict[str, Any] = {"base_url": f"{limited.base_url}/v1", "api_key": "key-acme", "max_retries": 0}
    ask: Any = {"model": "tale", "messages": MESSAGES, "max_tokens": 5}
    async with openai.AsyncOpenAI(**settings) as client:
        answers = [await client.chat.completions.with_raw_response.create(**ask) for _ in range(3)]
        assert answers[0].headers["x-ratelimit-remaining-requests"] == "2"
        with pytest.raises(openai.RateLimitError) as refused:
            for _ in range(10):  # more than are refilled meanwhile
                await client.chat.completions.create(**ask)
        error = refused.value
        assert (error.status_code, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert isinstance(error.body, dict)
        assert (error.param, error.body["limit"]) == ("requests_per_minute", 3)
        assert error.response.headers["retry-after"] == "1"
        patient = client.with_options(max_retries=5)
        assert (await patient.chat.completions.create(**ask)).choices[0].message.content  # it waits for Retry-After
