"""HTTP in general: probes, other origins, names of hosts, HTTP/1.0 clients, missing models."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from scripted_worker import CARD, ScriptedWorker
from served_gateway import ServeWith

from ktqueue import Client, SyncClient, __version__
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig, GatewayConfig
from ktqueue.core.errors import InvalidRequest, ModelNotFound, Unavailable
from ktqueue.core.tenants import hash_of
from ktqueue.gateway.serve import warn_without_keys

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
BODY: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}]}
ORIGIN = "https://page.example"


async def test_probes_and_the_version(serve_with: ServeWith) -> None:
    async with serve_with(api_keys=(hash_of("key"),)) as (_, url), httpx.AsyncClient(base_url=url) as http:
        for path in ("/healthz", "/health", "/ping"):
            assert (await http.get(path)).json() == {"status": "ok"}
            assert (await http.head(path)).status_code == 200
        assert (await http.get("/version")).status_code == 401
        assert (await http.get("/version", headers={"x-api-key": "key"})).json() == {"version": __version__}


async def test_pages_of_allowed_origins_can_call_the_api(serve_with: ServeWith, worker: ScriptedWorker) -> None:
    preflight = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-os",
    }
    async with (
        serve_with(api_keys=(hash_of("key"),), cors_origins=(ORIGIN,)) as (_, url),
        httpx.AsyncClient(base_url=url) as http,
    ):
        allowed = await http.options(CHAT, headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
        assert {"GET", "POST", "DELETE"} <= set(allowed.headers["access-control-allow-methods"].split(", "))
        assert (await http.options(CHAT, headers={**preflight, "origin": "https://evil.example"})).status_code == 400
        for key, status in (("key", 200), ("wrong", 401)):
            answer = await http.post(CHAT, json=BODY, headers={"origin": ORIGIN, "x-api-key": key})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "x-job-id", "retry-after"} <= set(exposed)
        other = await http.get("/healthz", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_without_settings_no_other_origin_is_allowed(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
    assert (await http.options(CHAT, headers=headers)).status_code == 405
    answer = await http.post(CHAT, json=BODY, headers={"origin": ORIGIN})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def status_under(url: str, host: str, **headers: str) -> int:
    """The status of a list of jobs that is asked for under the name `host`."""
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.get("/v1/jobs", headers={"host": host, **headers})
    if answer.status_code == 403:
        assert answer.json()["error"]["code"] == "host_not_allowed" and "gateway.allowed_hosts" in answer.text
    return answer.status_code


async def test_a_local_gateway_answers_under_local_names_only(serve_with: ServeWith) -> None:
    """A page whose name resolves to 127.0.0.1 has the gateway's origin."""
    async with serve_with() as (_, url):
        for host in ("localhost", "LOCALHOST:80", "localhost.", "chat.localhost:1", "10.1.2.3:80", "[::1]:80", "[::1]"):
            assert await status_under(url, host) == 200, host
        for host in ("evil.example", "evil.example:80", "localhost.evil.example", "evillocalhost", "127.0.0.1.nip.io"):
            assert await status_under(url, host) == 403, host
    async with serve_with(allowed_hosts=("Chat.example", "*.chat.example")) as (_, url):
        for host in ("chat.example", "a.chat.example:443", "localhost", "127.0.0.1"):
            assert await status_under(url, host) == 200, host
        assert await status_under(url, "evilchat.example") == 403


async def test_behind_a_proxy_the_host_is_any_that_has_a_key_or_is_allowed(serve_with: ServeWith) -> None:
    key = hash_of("key")
    for settings in ({"api_keys": (key,)}, {"allowed_hosts": ("*",)}, {"host": "0.0.0.0"}):
        async with serve_with(**settings) as (_, url):
            assert await status_under(url, "llm.example.com", authorization="Bearer key") == 200, settings
    async with serve_with(api_keys=(key,), allowed_hosts=("llm.example.com",)) as (_, url):
        assert await status_under(url, "evil.example", authorization="Bearer key") == 403


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "llm.example"}, True),
        ({"host": "0.0.0.0", "api_keys": (hash_of("key"),)}, False),
        ({"host": "::1"}, False),
        ({}, False),
    ],
)
def test_a_gateway_that_others_reach_without_a_key_says_so(
    settings: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_without_keys(GatewayConfig(**settings))
    assert (f"everybody who reaches {settings.get('host')}:8000 may use this gateway" in caplog.text) is warns


async def test_foreign_pages_cannot_send_a_body_without_a_type(serve_with: ServeWith, worker: ScriptedWorker) -> None:
    """A browser asks nobody before it sends `new Blob([text])`, which has no type."""
    data = json.dumps(BODY).encode()
    async with serve_with(cors_origins=(ORIGIN,)) as (_, url), httpx.AsyncClient(base_url=url) as http:
        for path in (CHAT, "/v1/messages", "/api/chat", "/v1/jobs", "/v1/responses", "/v1/tokenize"):
            answer = await http.post(path, content=data, headers={"origin": "https://evil.example"})
            assert answer.status_code == 403 and "gateway.cors_origins" in answer.text
        for headers in ({}, {"origin": ORIGIN}, {"origin": url}):
            assert (await http.post(CHAT, content=data, headers=headers)).status_code == 200


async def raw(url: str, version: str, path: str, body: dict[str, Any]) -> tuple[dict[str, str], bytes]:
    """Send a request of HTTP/1.0. Returns the answer's headers, and its bytes up to the end of the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    lines, _, rest = answer.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines.decode().split("\r\n")[1:])
    return headers, rest


async def test_http_1_0_clients_get_no_chunks(url: str, worker: ScriptedWorker) -> None:
    headers, answer = await raw(url, "1.0", CHAT, {**BODY, "stream": True})
    assert "transfer-encoding" not in headers
    assert headers["connection"] == "close"
    lines = [line for line in answer.split(b"\n") if line and not line.startswith(b":")]
    assert all(line.startswith(b"data: ") for line in lines)
    assert lines[-1] == b"data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines[:-1])
    assert text == "Once upon a time"
    headers, answer = await raw(url, "1.0", CHAT, BODY)
    assert int(headers["content-length"]) == len(answer)


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("framing", ["content-length", "chunked"])
@pytest.mark.parametrize("size", [7, 10_000])
async def test_an_offer_of_another_protocol_is_declined(
    url: str, worker: ScriptedWorker, framing: str, size: int
) -> None:
    """Java's client offers HTTP/2 in its first request. What follows the request is not a part of its body."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(BODY).encode()
    lines = b"content-length: %d" % len(data)
    if framing == "chunked":
        lines, data = b"transfer-encoding: chunked", b"9\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (
            data[:9], len(data) - 9, data[9:],
        )  # fmt: skip
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % CHAT.encode()
    sent = head + OFFER + lines + b"\r\n\r\n" + data
    if size > len(sent):
        sent += head + b"content-length: 2\r\n\r\n{}"
    reader, writer = await asyncio.open_connection(host, int(port))
    for start in range(0, len(sent), size):
        writer.write(sent[start : start + size])
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer and b"Once upon a time" in answer


async def test_a_websocket_is_declined(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    offer = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    answer = await http.get("/v1/models", headers=offer)
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")


async def test_a_missing_model_means_the_only_one(
    http: httpx.AsyncClient, worker: ScriptedWorker, broker: Broker
) -> None:
    for path, body in ((CHAT, {"messages": BODY["messages"]}), (COMPLETE, {"prompt": "Once", "model": None})):
        assert (await http.post(path, json=body)).json()["model"] == "tale"
    assert (await http.post("/v1/jobs", json={"prompt": "Once", "sampling": {}})).json()["model"] == "tale"
    unknown = await http.post(CHAT, json={**BODY, "model": "story"})
    assert (unknown.status_code, unknown.json()["error"]["limit"]) == (404, "tale")
    assert "served: tale" in unknown.json()["error"]["message"]
    other = await Lease.register(broker, replace(CARD, name="other"))
    two = await http.post(CHAT, json={"messages": BODY["messages"]})
    assert (two.status_code, two.json()["error"]["param"], two.json()["error"]["limit"]) == (
        400,
        "model",
        "other, tale",
    )
    await other.close()
    one = await http.post(CHAT, json={"messages": BODY["messages"]})  # the other is still known, but has no worker
    assert one.json()["model"] == "tale"


async def test_a_missing_model_is_an_error_without_models(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json={"messages": BODY["messages"]})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")


async def test_the_python_client_needs_no_model_name(
    worker: ScriptedWorker, broker: Broker, broker_config: BrokerConfig
) -> None:
    async with Client(config=broker_config) as client:
        assert (await client.generate(prompt="Once")).text == "Once upon a time"
        with pytest.raises(ModelNotFound, match="served: tale"):
            await client.submit(model="story", prompt="Once")
        other = await Lease.register(broker, replace(CARD, name="other"))
        with pytest.raises(InvalidRequest, match="one of those served: other, tale"):
            await client.submit(prompt="Once")
        await other.close()

    def blocking() -> str:
        with SyncClient(config=replace(broker_config, prefix="empty")) as client, pytest.raises(Unavailable):
            client.submit(prompt="Once")
        with SyncClient(config=broker_config) as client:
            return client.submit(model="tale", prompt="Once").model

    assert await asyncio.to_thread(blocking) == "tale"
