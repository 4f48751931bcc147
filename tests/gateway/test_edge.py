"""Keys, request ids, the limit of requests at once, probes, metrics, the OpenAPI document, broken HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from scripted_worker import ScriptedWorker, Step, ended, tale
from served_gateway import Conforms, ServeWith, serving

from ktqueue import __version__
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim
from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.core.config import BrokerConfig, Config, GatewayConfig
from ktqueue.core.tenants import hash_of

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}]}


async def test_a_request_needs_one_of_the_keys(
    serve_with: ServeWith, worker: ScriptedWorker, conforms: Conforms
) -> None:
    async with (
        serve_with(api_keys=(hash_of("first"), hash_of("other"))) as (_, url),
        httpx.AsyncClient(base_url=url) as http,
    ):
        for headers in ({"authorization": "Bearer other"}, {"authorization": "bearer  other"}, {"x-api-key": "other"}):
            assert (await http.post(CHAT, json=BODY, headers=headers)).status_code == 200
        unknown: list[dict[str, Any]] = [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic other"},
            {"authorization": "other"},
            {"authorization": "Bearer"},
            {"x-api-key": ""},
            {"x-api-key": "othe"},
            {"authorization": b"Bearer \xff\xfe"},
        ]
        for fields in unknown:
            response = await http.post(CHAT, json=BODY, headers=fields)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            conforms(response.json(), "ErrorResponse")
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/healthz")).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}):
            assert (await http.get("/readyz", headers=headers)).json() == {"status": "ok"}
        ready = (await http.get("/readyz", headers={"x-api-key": "other"})).json()
        assert ready == {"status": "ok", "workers": 1, "models": ["tale"]}


async def test_a_request_id_is_returned_or_made_up(http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz", headers={"x-request-id": "mine-1"})).headers["x-request-id"] == "mine-1"
    made = [(await http.get("/healthz")).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    for odd in ("a b", "x" * 200, ""):
        assert (await http.get("/healthz", headers={"x-request-id": odd})).headers["x-request-id"].startswith("req-")


async def test_requests_at_once_are_limited(serve_with: ServeWith, worker: ScriptedWorker) -> None:
    async def slow(claim: Claim) -> AsyncIterator[Step]:
        yield 0.5
        yield ended(claim)

    worker.script = slow
    async with serve_with(max_connections=2) as (_, url), httpx.AsyncClient(base_url=url, timeout=10) as http:
        busy = [asyncio.create_task(http.post(CHAT, json=BODY)) for _ in range(2)]
        await worker.claimed(2)
        response = await http.post(CHAT, json=BODY)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "too_many_connections"
        assert response.json()["error"]["limit"] == 2
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
        await asyncio.gather(*busy)
        worker.script = tale
        assert (await http.post(CHAT, json=BODY)).status_code == 200


async def test_the_gateway_is_ready_only_with_a_worker(http: httpx.AsyncClient, broker: Broker) -> None:
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    response = await http.get("/readyz")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    async with ScriptedWorker(broker):
        assert (await http.get("/readyz")).json() == {"status": "ok", "workers": 1, "models": ["tale"]}
    assert (await http.get("/readyz")).status_code == 503


async def test_a_model_is_the_same_alone_and_in_the_list(
    http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms
) -> None:
    body = (await http.get("/v1/models")).json()
    conforms(body, "ListModelsResponse")
    assert [entry["id"] for entry in body["data"]] == ["tale"]
    model = (await http.get("/v1/models/tale")).json()
    conforms(model, "Model")
    assert model == body["data"][0]
    assert (model["created"], model["max_model_len"]) == (1_700_000_000, 512)


async def test_metrics_count_requests_and_show_the_queue(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    assert (await http.post(CHAT, json=BODY)).status_code == 200
    assert (await http.get("/nowhere")).status_code == 404
    await asyncio.sleep(0.3)
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = response.text
    for line in (
        'ktqueue:request_success_total{finished_reason="stop",model_name="tale"} 1.0',
        'ktqueue:time_to_first_token_seconds_count{model_name="tale"} 1.0',
        'ktqueue:e2e_request_latency_seconds_count{model_name="tale"} 1.0',
        'ktqueue:request_generation_tokens_sum{model_name="tale"} 3.0',
        'ktqueue:http_requests_total{handler="/v1/chat/completions",method="POST",status="200"} 1.0',
        'ktqueue:http_requests_total{handler="other",method="other",status="404"} 1.0',
        "ktqueue:broker_up 1.0",
        'ktqueue:queue_depth{job_class="interactive",model_name="tale"} 0.0',
        'ktqueue:workers{model_name="tale"} 1.0',
    ):
        assert line in text.splitlines(), line
    assert "ktqueue:kv_cache_usage_perc{" in text
    assert "ktqueue:generation_tokens_total{" in text
    assert "_created" not in text


async def test_model_names_made_up_by_clients_share_one_series(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    assert (await http.post(CHAT, json=BODY)).status_code == 200
    for model in ("made-up", "up-made"):
        assert (await http.post(CHAT, json={**BODY, "model": model})).status_code == 404
    assert (await http.post(CHAT, json={**BODY, "user": "x" * 5_000_000})).status_code == 413
    text = (await http.get("/metrics")).text
    assert 'ktqueue:request_failure_total{code="model_not_found",model_name="other"} 2.0' in text
    assert 'ktqueue:request_failure_total{code="request_too_large",model_name="tale"} 1.0' in text
    assert "made-up" not in text


async def test_an_unexpected_error_is_a_500_without_details(
    http: httpx.AsyncClient, worker: ScriptedWorker, spoil_idempotency_keys: Callable[[], None]
) -> None:
    """Redis answers WRONGTYPE, which no client may see."""
    job = {"model": "tale", "prompt": "Once"}
    headers = {"idempotency-key": "mine"}
    assert (await http.post("/v1/jobs", json=job, headers=headers)).status_code == 202
    spoil_idempotency_keys()
    response = await http.post("/v1/jobs", json=job, headers=headers)
    assert response.status_code == 500
    assert "WRONGTYPE" not in response.text
    assert response.headers["x-request-id"] in response.json()["error"]["message"]


@pytest.fixture
async def mortal_redis(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    """A server of this test only, on a TCP port."""
    server = PrivateServer()
    await asyncio.to_thread(server.start, tmp_path / "redis", port=0)
    yield server
    await asyncio.to_thread(server.stop)


def config_of(server: PrivateServer, **gateway: Any) -> Config:
    """Settings of a gateway that soon gives up if the server is away."""
    broker = BrokerConfig(url=server.url, connect_timeout=0.2, operation_timeout=0.5)
    return Config(broker=broker, gateway=GatewayConfig(port=0, **gateway))


async def test_without_redis_the_gateway_answers_503(mortal_redis: PrivateServer) -> None:
    async with serving(config_of(mortal_redis)) as (_, url), httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/v1/jobs")).status_code == 200
        await asyncio.to_thread(mortal_redis.stop)
        for method, path in (("GET", "/readyz"), ("GET", "/v1/models"), ("GET", "/v1/jobs"), ("POST", CHAT)):
            response = await http.request(method, path, json=BODY if method == "POST" else None)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
        assert (await http.get("/healthz")).status_code == 200
        assert "ktqueue:broker_up 0.0" in (await http.get("/metrics")).text


async def test_clients_without_a_key_do_not_learn_where_redis_is(mortal_redis: PrivateServer) -> None:
    port = str(urlsplit(mortal_redis.url or "").port)
    config = config_of(mortal_redis, api_keys=(hash_of("key"),))
    async with serving(config) as (_, url), httpx.AsyncClient(base_url=url) as http:
        await asyncio.to_thread(mortal_redis.stop)
        stranger, operator = await http.get("/readyz"), await http.get("/readyz", headers={"x-api-key": "key"})
    assert (stranger.status_code, operator.status_code) == (503, 503)
    assert port not in stranger.text
    assert port in operator.text


async def test_the_openapi_document_is_valid_and_fits_answers(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    document = (await http.get("/openapi.json")).json()
    OpenAPIV31SpecValidator(document).validate()
    assert document["info"]["version"] == __version__
    assert (await http.get("/")).text.startswith(f"ktqueue {__version__}")

    def check(value: Any, name: str) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    check((await http.post(CHAT, json={**BODY, "logprobs": True})).json(), "ChatCompletion")
    check((await http.post("/v1/completions", json={"model": "tale", "prompt": "x"})).json(), "TextCompletion")
    job = (await http.post("/v1/jobs", json={"model": "tale", "prompt": "x"})).json()
    check(job, "Job")
    check((await http.get("/v1/jobs")).json(), "JobList")
    check((await http.get("/v1/models")).json(), "ModelList")
    check((await http.get("/nowhere")).json(), "ErrorResponse")
    check(BODY, "ChatBody")
    check({"messages": BODY["messages"]}, "ChatBody")  # the model can be left out
    for content in ("Hello.", [{"type": "text", "text": "Hello."}]):
        check({"messages": [{"role": "user", "content": content}], "system": content, "max_tokens": 5}, "MessagesBody")
    with pytest.raises(jsonschema.ValidationError):
        check({**BODY, "n": 0}, "ChatBody")


async def test_the_openapi_document_has_the_failures_of_every_object(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    for path, operations in paths.items():
        if path.startswith("/v1/") and "{" in path:
            unknown = await http.get(path.replace("{", "no-").replace("}", ""))
            if "get" in operations and unknown.status_code != 405:
                assert str(unknown.status_code) in operations["get"]["responses"], path


async def test_every_route_is_described(http: httpx.AsyncClient) -> None:
    from ktqueue.gateway.app import routes

    paths = set((await http.get("/openapi.json")).json()["paths"])
    assert {route.path.replace(":path", "") for route in routes()} == paths
