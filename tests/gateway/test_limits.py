"""Limits for one client: bytes, number and time of headers, time and rate of bodies, connections by address."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from processes import until
from scripted_worker import ScriptedWorker, Step, token
from served_gateway import ServeWith

from ktqueue.broker.lease import Claim
from ktqueue.core.config import GatewayConfig
from ktqueue.core.errors import ConfigError
from ktqueue.core.tenants import hash_of
from ktqueue.gateway.http.connections import Connections, client_address

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}]}
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


class RawClient:
    """A connection that sends any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError:
            pass  # refused before everything was sent

    def leave(self) -> None:
        self.writer.transport.abort()

    async def ended(self, within: float = 10) -> bytes:
        """All bytes from the gateway until it closes the connection."""
        said = b""
        try:
            async with asyncio.timeout(within):
                while piece := await self.reader.read(65_536):
                    said += piece
        except ConnectionError:
            pass
        return said

    async def refused(self) -> tuple[int, dict[str, Any]]:
        """Status and error of the answer that ends the connection."""
        head, _, body = (await self.ended()).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"x-request-id: req-" in head
        return int(head.split()[1]), json.loads(body)["error"]


Connect = Callable[..., Awaitable[RawClient]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """`await connect(url, source="127.0.0.2")`: a connection from that address."""
    clients: list[RawClient] = []

    async def open_client(url: str, source: str = "127.0.0.1") -> RawClient:
        host, port = url.removeprefix("http://").split(":")
        clients.append(RawClient(*await asyncio.open_connection(host, int(port), local_addr=(source, 0))))
        return clients[-1]

    yield open_client
    for client in clients:
        client.leave()
    await asyncio.sleep(0)


TOO_MUCH: list[tuple[bytes, int, str, float | None]] = [
    (b"GET /" + b"a" * 3_000 + b" HTTP/1.1\r\n\r\n", 414, "url_too_long", 2_000),
    (b"GET /" + b"a" * 30_000, 414, "url_too_long", 2_000),
    (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a:\r\n" * 21 + b"\r\n", 431, "headers_too_large", 20),
    (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 100_000, 431, "headers_too_large", 20),
    (b"GET / HTTP/1.1\r\nhost: " + b"x" * 5_000 + b"\r\n\r\n", 431, "headers_too_large", 4_000),
    (b"GET / HTTP/1.1\r\nhost: " + b"x" * 1_000_000, 431, "headers_too_large", 4_000),
    (b"GET / HTTP/1.1\r\n" + b"x" * 1_000_000, 431, "headers_too_large", 4_000),
    (CHUNKED + b"1;" + b"x" * 1_000_000, 431, "headers_too_large", 4_000),
    (CHUNKED + b"1\r\n{\r\n0\r\na: " + b"x" * 1_000_000, 431, "headers_too_large", 4_000),
    (CHUNKED + b"1\r\n{\r\n0\r\n" + b"a: b\r\n" * 100_000, 431, "headers_too_large", 20),
    (CHUNKED + (b"1;" + b"x" * 3_000 + b"\r\n{\r\n") * 1_000, 413, "request_too_large", 100_000),
    (b"\r\n" * 1_000_000, 431, "headers_too_large", 4_000),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_request", None),
    (b"GET / HTTP/1.1\r\na: b\r\n\r\n", 400, "malformed_request", None),
    (b"GET / HTTP/1.1\r\nhost: localhost\r\nHost: y\r\n\r\n", 400, "malformed_request", None),
    (b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 400, "malformed_request", None),
    (b"GET / HTTP/1.1\r\nhost: localhost\r\n", 408, "request_timeout", 0.3),
    (b"G", 408, "request_timeout", 0.3),
]


BROKEN_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"NONSENSE\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-type: \xff\r\n\r\n{",
    b"GET /v1/models/%ff%fe%00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /v1/jobs/" + b"a" * 5_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"DELETE /v1/jobs/..%2f..%2f HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 5_000 + b"\r\n",
    b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\nidempotency-key: \xff\xfe\r\ncontent-length: 2\r\n\r\n{}",
]


async def test_broken_http_does_not_harm_other_clients(url: str, connect: Connect, worker: ScriptedWorker) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        for data in BROKEN_HTTP:
            client = await connect(url)
            await client.send(data)
            try:
                async with asyncio.timeout(0.3):
                    answer = await client.reader.read(12)
                assert answer == b"" or 400 <= int(answer.split()[1]) < 500 or data.startswith(b"GET / ")
            except TimeoutError:
                pass  # waits for the rest of the body
            client.leave()
            assert (await http.post(CHAT, json=BODY)).status_code == 200


async def test_an_announced_size_is_refused_before_the_body(url: str, connect: Connect) -> None:
    client = await connect(url)
    await client.send(POST + b"expect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n")
    async with asyncio.timeout(5):
        assert (await client.reader.read(12)).endswith(b"413")


async def test_input_beyond_a_limit_gets_an_error_and_ends_the_connection(
    serve_with: ServeWith, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"max_url_bytes": 2_000, "max_header_bytes": 4_000, "max_headers": 20}
    async with serve_with(**settings, header_timeout=0.3, max_body_bytes=100_000) as (_, url):

        async def refusal(data: bytes) -> tuple[int, str, float | None]:
            client = await connect(url)
            await client.send(data)
            status, error = await client.refused()
            return status, error["code"], error.get("limit")

        for data, *expected in TOO_MUCH:
            assert await refusal(data) == tuple(expected), data[:80]
        assert "Traceback" not in caplog.text  # of a second refusal after header_timeout


async def test_headers_have_a_time_limit_and_silent_connections_end(serve_with: ServeWith, connect: Connect) -> None:
    async with serve_with(header_timeout=0.4, keep_alive_timeout=0.3) as (_, url):
        silent, slow, idle = [await connect(url) for _ in range(3)]

        async def drip() -> None:
            for byte in POST * 100:
                await slow.send(bytes([byte]))
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        await idle.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await silent.ended() == b""
        assert (await slow.refused())[0] == 408
        assert (await idle.ended()).startswith(b"HTTP/1.1 200")
        dripping.cancel()


async def test_pipelined_requests_are_answered_up_to_a_limit(serve_with: ServeWith, connect: Connect) -> None:
    async with serve_with() as (_, url):
        client = await connect(url)
        await client.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10_000)
        assert 1 <= (await client.ended()).count(b"HTTP/1.1 200") <= 4


async def test_a_client_that_reads_no_answer_is_dropped(serve_with: ServeWith) -> None:
    ask = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n"
    async with serve_with(stall_seconds=0.4, keep_alive_timeout=0.2) as (server, url):
        for listener in server.servers[0].sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the connections inherit it
        clients = []
        for data in ((ask + b"\r\n") * 8, ask + b"\r\n", ask + b"connection: close\r\n\r\n"):
            clients.append(socket.socket())
            clients[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            clients[-1].setblocking(False)
            host, port = url.removeprefix("http://").split(":")
            await asyncio.get_running_loop().sock_connect(clients[-1], (host, int(port)))
            await asyncio.get_running_loop().sock_sendall(clients[-1], data)
        await asyncio.sleep(0.2)
        connections = server.connections
        assert len(connections) == 3
        await until(lambda: len(connections) == 0, 10)
        for client in clients:
            client.close()


async def test_the_key_is_checked_before_the_body_is_read(
    serve_with: ServeWith, connect: Connect, worker: ScriptedWorker
) -> None:
    async with serve_with(api_keys=(hash_of("key"),), keep_alive_timeout=0.3) as (server, url):
        client = await connect(url)
        await client.send(POST + b"content-length: 8000000\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401")
        for _ in range(100):  # later input is thrown away, for as long as a connection may be idle
            await client.send(b"x" * 10_000)
        assert len(server.gateway.bodies.uploads) == 0
        await client.ended(5)


async def test_a_body_has_a_time_limit_and_a_minimum_rate(serve_with: ServeWith, connect: Connect) -> None:
    async def answer(url: str, bytes_a_turn: int) -> bytes:
        client = await connect(url)
        await client.send(POST + b"content-length: 1000000\r\n\r\n")

        async def drip() -> None:
            while True:
                await client.send(b" " * bytes_a_turn)
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        said = await client.ended(5)
        dripping.cancel()
        return said

    cases = ({"body_timeout": 0.5}, 5.0, 1_000), ({"min_body_rate": 100}, 0.3, 1), ({"stall_seconds": 0.3}, 5.0, 0)
    for settings, grace_seconds, bytes_a_turn in cases:
        async with serve_with(**settings) as (server, url):
            server.gateway.bodies.uploads.grace_seconds = grace_seconds
            said = await answer(url, bytes_a_turn)
            assert said.startswith(b"HTTP/1.1 408")
            assert b"connection: close" in said


async def test_slow_senders_do_not_keep_others_out(
    serve_with: ServeWith, connect: Connect, worker: ScriptedWorker
) -> None:
    async with serve_with(max_connections=2) as (_, url), httpx.AsyncClient(base_url=url, timeout=10) as http:
        slow = [await connect(url) for _ in range(5)]
        for client in slow:
            await client.send(POST + b"content-length: 100\r\n\r\n{")
        await asyncio.sleep(0.1)
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        for client in slow:
            client.leave()


async def test_all_bodies_share_a_limit_and_the_largest_is_dropped(
    serve_with: ServeWith, connect: Connect, worker: ScriptedWorker
) -> None:
    async with (
        serve_with(max_body_bytes=100_000, max_bodies_bytes=150_000) as (server, url),
        httpx.AsyncClient(base_url=url, timeout=10) as http,
    ):
        uploads = server.gateway.bodies.uploads
        large = [await connect(url) for _ in range(2)]
        for client, size in zip(large, (90_000, 50_000), strict=True):
            await client.send(POST + b"content-length: 99000\r\n\r\n" + b" " * size)
        await until(lambda: uploads.held_bytes >= 140_000)
        body = json.dumps({**BODY, "user": "x" * 20_000})
        assert (await http.post(CHAT, content=body)).status_code == 200
        async with asyncio.timeout(5):
            assert (await large[0].reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 503")
            assert b"too_many_body_bytes" in await large[0].reader.readuntil(b"}}")
        await until(lambda: uploads.held_bytes == 50_000)
        large[1].leave()


async def long(claim: Claim) -> AsyncIterator[Step]:
    """A token, and a long silence."""
    yield token("Once")
    yield 30.0


async def test_connections_of_an_address_are_limited(
    serve_with: ServeWith, connect: Connect, worker: ScriptedWorker
) -> None:
    worker.script = long
    async with serve_with(max_sockets_per_address=3) as (_, url), httpx.AsyncClient(base_url=url, timeout=10) as http:
        silent = [await connect(url, "127.0.0.2") for _ in range(4)]
        assert await silent[0].ended() == b""  # it was idle longest
        body = json.dumps({**BODY, "stream": True}).encode()
        ask = POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        streams = [await connect(url, "127.0.0.2") for _ in range(3)]
        for client in streams:
            await client.send(ask)
            async with asyncio.timeout(10):
                assert (await client.reader.readuntil(b"data:")).startswith(b"HTTP/1.1 200")
        one_more, probe = await connect(url, "127.0.0.2"), await connect(url, "127.0.0.2")
        await one_more.send(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"429" in (said := await one_more.ended())[:12]
        assert b'"too_many_connections_from_address"' in said
        await probe.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200" in (await probe.ended())[:12]
        assert (await http.get("/v1/models")).status_code == 200  # the address is trusted, but has no room left
        text = (await http.get("/metrics")).text
        assert 'ktqueue:connections_ended_total{reason="evicted"} 4.0' in text
        assert 'ktqueue:connections_ended_total{reason="too_many_connections_from_address"} 2.0' in text
        for client in streams:
            client.leave()


async def test_probes_are_answered_when_all_connections_are_busy(
    serve_with: ServeWith, connect: Connect, worker: ScriptedWorker
) -> None:
    worker.script = long
    async with serve_with(max_sockets=3, probe_port=0) as (server, url):
        body = json.dumps({**BODY, "stream": True}).encode()
        streams = [await connect(url) for _ in range(3)]
        for client in streams:
            await client.send(POST + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            async with asyncio.timeout(10):
                await client.reader.readuntil(b"data:")
        for _ in range(100):
            await connect(url)
        probe_port = server.servers[1].sockets[0].getsockname()[1]
        for base, path, status in (
            (url, "/healthz", 200),
            (url, "/readyz", 200),
            (url, "/metrics", 200),
            (url, "/v1/models", 503),
            (f"http://127.0.0.1:{probe_port}", "/healthz", 200),
            (f"http://127.0.0.1:{probe_port}", "/readyz", 200),
            (f"http://127.0.0.1:{probe_port}", "/metrics", 200),
            (f"http://127.0.0.1:{probe_port}", "/v1/models", 404),
        ):
            async with httpx.AsyncClient(base_url=base, timeout=10) as http:
                assert (await http.get(path)).status_code == status
        for client in streams:
            client.leave()


async def test_idle_connections_are_closed_for_new_ones(
    serve_with: ServeWith, connect: Connect, worker: ScriptedWorker
) -> None:
    async with serve_with(max_sockets=5) as (_, url), httpx.AsyncClient(base_url=url, timeout=10) as http:
        silent = [await connect(url, f"127.0.0.{2 + number % 3}") for number in range(20)]
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        assert await silent[0].ended() == b""


def test_addresses_of_the_same_client_count_as_one_address() -> None:
    class Connection:
        evicted = False

        def evict(self) -> None:
            self.evicted = True

    connections = Connections(100, per_address=1, trusted=("10.0.0.0/8",))
    hosts = ["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::ffff:192.0.2.1", "192.0.2.1", "10.0.0.1", "10.0.0.1"]
    entered = [Connection() for _ in hosts]
    for connection, host in zip(entered, hosts, strict=True):
        assert connections.enter(connection, host) is None
    assert [connection.evicted for connection in entered] == [True, False, False, True, False, False, False]
    assert len(connections) == 5
    for connection in entered:
        connections.leave(connection)
        connections.leave(connection)
    assert len(connections) == 0
    clients = ["2001:db8::/64", "2001:db8::/64", "2001:db8:0:1::/64", "192.0.2.1", "192.0.2.1", "10.0.0.1", "10.0.0.1"]
    assert [client_address(host) for host in hosts] == clients


@pytest.mark.parametrize(
    ("key", "value"),
    [("header_timeout", 0), ("max_headers", 0), ("max_bodies_bytes", 1), ("trusted_addresses", ("here",))],
)
def test_limits_that_cannot_work_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"gateway.{key}"):
        GatewayConfig(**{key: value})
