"""Tenants over HTTP: each sees its own jobs alone, and nothing logs a key."""

import logging
from typing import Any

import httpx
import pytest

from ktqueue.core.tenants import TenantConfig, hash_of

CHAT, JOBS = "/v1/chat/completions", "/v1/jobs"
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT_BODY: dict[str, Any] = {"model": "tale", "messages": MESSAGES}
JOB: dict[str, Any] = {"model": "tale", "prompt": "Once", "sampling": {"max_tokens": 9}}
TENANTS = tuple(TenantConfig(name=name, keys=(hash_of(f"key-{name}"),)) for name in ("acme", "zeta"))


@pytest.fixture
async def doors(serve_with):
    """An HTTP client for each tenant, one for the operator's key, one for nobody."""
    async with serve_with(tenants=TENANTS, api_keys=(hash_of("key-operator"),)) as (_, url):
        clients = {
            name: httpx.AsyncClient(base_url=url, timeout=20, headers={"authorization": f"Bearer key-{name}"})
            for name in ("acme", "zeta", "operator", "nobody")
        }
        yield clients
        for client in clients.values():
            await client.aclose()


async def test_a_job_of_another_is_not_there(doors, worker, conforms):
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


async def test_chats_belong_to_their_tenant_and_share_no_idempotency_key(doors, worker, broker):
    ids = []
    for name in ("acme", "zeta"):
        response = await doors[name].post(CHAT, json=CHAT_BODY, headers={"idempotency-key": "same"})
        assert response.status_code == 200
        ids.append(response.headers["x-job-id"])
        assert (await broker.jobs.get(ids[-1])).tenant == name
    assert ids[0] != ids[1]
    assert (await doors["acme"].get(f"{JOBS}/{ids[0]}")).status_code == 200
    assert (await doors["acme"].get(f"{JOBS}/{ids[1]}")).status_code == 404
    assert {job.id for job in await broker.jobs.list()} == set(ids)  # who reads Redis sees all


async def test_metrics_are_the_operator_s(doors, worker, conforms):
    assert (await doors["operator"].get("/metrics")).status_code == 200
    refused = await doors["acme"].get("/metrics")
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    conforms(refused.json(), "ErrorResponse")


async def test_without_keys_everybody_sees_everything(http, worker, broker):
    record = await broker.jobs.submit((await a_request(http, worker)), tenant="acme")
    assert (await http.get(f"{JOBS}/{record.id}")).status_code == 200
    assert record.id in {job["id"] for job in (await http.get(JOBS)).json()["data"]}


async def a_request(http, worker):
    await http.post(JOBS, json=JOB)
    await worker.claimed(1)
    return worker.claims[0].request


async def test_nothing_logs_a_key(doors, worker, caplog, capfd, monkeypatch):
    caplog.set_level(logging.DEBUG)
    assert (await doors["acme"].post(CHAT, json=CHAT_BODY)).status_code == 200
    for headers in ({"authorization": "Bearer key-wrong"}, {"authorization": "key-wrong"}, {"x-api-key": "key-wrong"}):
        refused = await doors["nobody"].get("/v1/models", headers=headers)
        assert refused.status_code == 401
        assert "key-" not in refused.text

    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("ktqueue.broker.jobs.Jobs.submit", broken)
    assert (await doors["acme"].post(CHAT, json=CHAT_BODY)).status_code == 500
    said = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert any("POST" in line for line in said)  # the mistake is logged, with its request
    assert "key-" not in "\n".join(said)
    captured = capfd.readouterr()
    assert "key-" not in captured.out + captured.err
