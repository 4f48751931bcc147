"""What the gateway relies on in uvicorn: the names of its internals, and what they mean."""

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ktqueue.core.errors import ConfigError
from ktqueue.gateway.http.uvicorn_internals import INTERNALS, check_uvicorn, missing_internals


class RecordingTransport(asyncio.Transport):
    """A transport that records what is written and whether it is read and open."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_read = True
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("10.0.0.1", 4711)}.get(name, default)

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Read the body and repeat it."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def connect(
    app: Any = answer, kind: type[HttpToolsProtocol] = HttpToolsProtocol
) -> tuple[HttpToolsProtocol, RecordingTransport]:
    """A protocol of uvicorn's with an open connection."""
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
    protocol, wire = kind(config=config, server_state=ServerState(), app_state={}), RecordingTransport()
    protocol.connection_made(wire)
    return protocol, wire


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_installed_uvicorn_has_all_internals() -> None:
    assert missing_internals(INTERNALS) == []
    check_uvicorn()


def test_a_uvicorn_without_an_internal_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"lacks FlowControl\.renamed: install"):
        check_uvicorn({FlowControl: ("write_paused", "renamed")})


async def test_a_new_connection_has_no_cycle_and_knows_its_client() -> None:
    protocol, wire = connect()
    assert protocol.transport is wire
    assert protocol.client == ("10.0.0.1", 4711)
    assert protocol.cycle is None
    assert not protocol.pipeline
    assert isinstance(protocol.flow, FlowControl)
    assert protocol.loop is asyncio.get_running_loop()
    assert protocol.server_state.default_headers == []


async def test_a_request_becomes_a_cycle_whose_body_the_protocol_fills() -> None:
    protocol, wire = connect()
    protocol.data_received(b"POST /a?b HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
    cycle = protocol.cycle
    assert isinstance(cycle, RequestResponseCycle)
    assert protocol.url == b"/a?b"
    assert protocol.scope["path"] == "/a"
    assert protocol.scope["state"] == {}
    assert bytes(cycle.body) == b"ab"
    assert cycle.more_body
    assert cycle.keep_alive
    assert not (cycle.response_started or cycle.response_complete or cycle.disconnected)
    await settle()
    protocol.data_received(b"cd")
    await settle()
    assert cycle.response_started
    assert cycle.response_complete
    assert wire.written.startswith(STATUS_LINE[200])
    assert wire.written.endswith(b"abcd")
    assert protocol.timeout_keep_alive_task is not None
    protocol._unset_keepalive_if_required()
    assert protocol.timeout_keep_alive_task is None


async def test_later_requests_wait_in_the_pipeline_for_the_answer() -> None:
    started: list[RequestResponseCycle] = []

    class Recording(HttpToolsProtocol):
        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            started.append(cycle)
            super()._start_asgi_task(cycle, app)

    protocol, _ = connect(kind=Recording)
    protocol.data_received(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n")
    first = protocol.cycle
    protocol.data_received(b"GET /2 HTTP/1.1\r\nhost: x\r\n\r\n")
    assert started == [first]
    assert [cycle.scope["path"] for cycle, _ in protocol.pipeline] == ["/2"]
    await settle()
    await settle()
    assert [cycle.scope["path"] for cycle in started] == ["/1", "/2"]
    protocol._unset_keepalive_if_required()


async def test_a_cycle_learns_that_its_client_left() -> None:
    protocol, _ = connect()
    protocol.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
    cycle = protocol.cycle
    await settle()
    protocol.connection_lost(None)
    assert cycle.disconnected
    assert cycle.message_event.is_set()
    await settle()


async def test_flow_control_pauses_and_resumes_the_transport() -> None:
    protocol, wire = connect()
    protocol.flow.pause_reading()
    assert not wire.is_read
    protocol.flow.resume_reading()
    assert wire.is_read
    protocol.pause_writing()
    assert protocol.flow.write_paused
    protocol.resume_writing()
    assert not protocol.flow.write_paused


async def test_shutdown_closes_an_idle_connection_and_lets_an_answer_finish() -> None:
    idle, wire = connect()
    idle.shutdown()
    assert wire.closed
    busy, wire = connect()
    busy.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
    busy.shutdown()
    assert not wire.closed
    assert not busy.cycle.keep_alive
    busy.connection_lost(None)
    await settle()


async def test_a_cycle_without_chunks_writes_a_body_as_it_is() -> None:
    async def stream(scope: Any, receive: Any, send: Any) -> None:
        cycle: Any = send.__self__
        assert isinstance(cycle, RequestResponseCycle)
        cycle.chunked_encoding = False
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"ab", b"cde"):
            cycle.expected_content_length = len(part)
            await send({"type": "http.response.body", "body": part, "more_body": True})

    protocol, wire = connect(stream)
    protocol.data_received(b"GET / HTTP/1.0\r\n\r\n")
    await settle()
    assert wire.written.endswith(b"\r\n\r\nabcde")
    protocol.connection_lost(None)
