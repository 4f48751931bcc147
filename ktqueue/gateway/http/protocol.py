"""HTTP/1.1 with limits: uvicorn's protocol, except that a client which sends too much or too slowly is cut off.

The headers of a request have limits of bytes, number and time. The parser is never fed more than a limit without having
anything to show for it, and a client that reads nothing is dropped. How long a body may take is the business of
`uploads`. Nothing here is logged, since a stranger could fill the disk with it; everything is counted.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ktqueue.core.config import GatewayConfig
from ktqueue.core.errors import KtqueueError
from ktqueue.gateway.errors import HeadersTooLarge, MalformedRequest, SlowHeaders, UrlTooLong
from ktqueue.gateway.http.connections import Connections
from ktqueue.gateway.http.headers import new_request_id
from ktqueue.gateway.http.responses import error_response
from ktqueue.gateway.http.uploads import too_large
from ktqueue.gateway.metrics import Metrics

PIECE_BYTES = 4 << 10  # fed to the parser at once: what it may take beyond a limit
MAX_PIPELINED = 2  # requests that wait for the answer to one before them; the connection ends after that many
IGNORED_SECONDS = 0.02  # between two pieces that are read to be thrown away
LINGER_SECONDS = 2.0  # from a refusal to the end of its connection: closed with bytes unread, it would lose the refusal


class _Enough(Exception):
    """Ends the parsing. The error for the client is not raised itself, since it would keep what was sent in memory: it
    refers to this call and the connection to it."""


class _NoReadAhead(FlowControl):
    """Reads on only once the application has taken the piece of a body that is there."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        super().__init__(protocol.transport)
        self._protocol: HttpToolsProtocol | None = protocol

    def resume_reading(self) -> None:
        """Called when the application asks for more, which is before it gets what is there."""
        cycle = self._protocol.cycle if self._protocol is not None else None
        if cycle is None or not cycle.body or cycle.response_complete:
            super().resume_reading()

    def forget(self) -> None:
        """The connection is closed. Two objects that refer to each other would stay in memory for a while."""
        self._protocol = None


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A callback of the parser (`on_...`) that raises ends the parsing."""

    def __init__(
        self,
        *,
        settings: GatewayConfig,
        metrics: Metrics,
        connections: Connections,
        probes_only: bool,
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self._settings = settings
        self._metrics = metrics
        # With its framing a body may take twice what it says: the rest is chunk headers of tiny chunks, or an attack.
        self._longest_body = 2 * self._settings.max_body_bytes + self._settings.max_header_bytes
        self._connections = connections
        self._probes_only = probes_only
        self._refusal: KtqueueError | None = None  # of what this connection asks for, unless it is a probe
        self._fault: KtqueueError | None = None  # what a callback found
        self._reading: _NoReadAhead  # `flow`
        self._answered: RequestResponseCycle | None = None  # `cycle` is the last one, which may have to wait
        self._deaf = False  # nothing that comes is parsed any more
        self._in_headers = False
        self._in_body = False
        self._unparsed_bytes = 0  # fed since the parser called back
        self._header_bytes = 0
        self._header_count = 0
        self._body_wire_bytes = 0  # of a body with its framing
        self._header_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, and wait for headers."""
        super().connection_made(transport)
        self.flow = self._reading = _NoReadAhead(self)
        self._metrics.connections.inc()
        self._refusal = self._connections.enter(self, self.client[0] if self.client else "")
        if self._refusal is not None:
            self._count(self._refusal.code)
        self._header_timer = self.loop.call_later(self._settings.header_timeout, self._on_header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered, and forget all."""
        self._metrics.connections.dec()
        self._connections.leave(self)
        self._stop_header_timer()
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None
        self._unset_keepalive_if_required()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)
        self._reading.forget()
        if self.cycle is not None:
            self.cycle.body = bytearray()

    def evict(self) -> None:
        """Make room for another connection."""
        self._end("evicted")

    def shutdown(self) -> None:
        """The server stops: answer what is being answered, and close."""
        if self._deaf and self._end_timer is not None:
            self.transport.close()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """The client does not read: it gets `stall_seconds`."""
        super().pause_writing()
        self._note_state()
        self._await_reading()

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._note_state()
        if self._end_timer is not None and not self.transport.is_closing():
            self._end_timer.cancel()
            self._end_timer = None

    def data_received(self, data: bytes) -> None:
        """Parse what came, in small pieces."""
        if self._deaf or (self._in_body and self.cycle.response_complete):
            self.flow.pause_reading()
            self.loop.call_later(IGNORED_SECONDS, self._read_on)
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            if self._deaf:
                return
            self._parse(view[start : start + PIECE_BYTES])
        if self._in_body and self.cycle.body and not self.cycle.response_complete:
            self.flow.pause_reading()  # until the application asks for more
        if self._in_headers and self._header_timer is None:
            self._header_timer = self.loop.call_later(self._settings.header_timeout, self._on_header_timeout)

    def _read_on(self) -> None:
        """Read, though nobody asks for it."""
        if not self.transport.is_closing():
            FlowControl.resume_reading(self.flow)

    def _parse(self, piece: memoryview) -> None:
        self._unparsed_bytes += len(piece)
        self._body_wire_bytes += len(piece) if self._in_body else 0
        settings = self._settings
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # what follows is in a language that is not spoken here
        except httptools.HttpParserError:
            if not self._deaf:
                self._refuse(self._fault or MalformedRequest("what was sent is no HTTP/1.1 request"))
        else:
            if self._unparsed_bytes > settings.max_header_bytes:
                self._refuse(self._too_large())
            elif self._body_wire_bytes > self._longest_body and not self.cycle.response_complete:
                self._refuse(too_large(self._body_wire_bytes, settings.max_body_bytes))

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_headers = True
        self._unparsed_bytes = self._header_bytes = self._header_count = self._body_wire_bytes = 0
        self.scope["state"].update(refusal=self._refusal, probes_only=self._probes_only)

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        self._unparsed_bytes = 0
        super().on_url(url)
        self._header_bytes += len(url)
        limit = self._settings.max_url_bytes
        if len(self.url) > limit:
            self._fault = UrlTooLong(
                f"the URL must be at most {limit} bytes (gateway.max_url_bytes)", limit=limit, value=len(self.url)
            )
            raise _Enough

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer: those are counted and dropped, since uvicorn would add them to the headers."""
        self._unparsed_bytes = 0
        self._header_bytes += len(name) + len(value) + 4
        self._header_count += 1
        if self._header_bytes > self._settings.max_header_bytes:
            self._fault = self._too_large()
            raise _Enough
        limit = self._settings.max_headers
        if self._header_count > limit:
            self._fault = HeadersTooLarge(
                f"a request may have at most {limit} headers (gateway.max_headers)",
                limit=limit,
                value=self._header_count,
            )
            raise _Enough
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Let the application have the request, or let it wait for the one before it."""
        self._unparsed_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self._deaf = True
            self.cycle.keep_alive = False
            raise _Enough
        super().on_headers_complete()
        self._in_headers, self._in_body = False, True
        self._stop_header_timer()
        if self._refusal is not None or self.parser.should_upgrade():
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """The size of a chunk, with its extensions."""
        self._unparsed_bytes = 0

    def on_message_complete(self) -> None:
        """The request is there as a whole."""
        self._unparsed_bytes = 0
        self._in_body = False
        self._connections.linger(self, on=False)
        super().on_message_complete()
        self._note_state()

    def on_response_complete(self) -> None:
        """The answer is written; the rest of the body, if any, is skipped for as long as a connection may be idle."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reading()
        elif self._in_body:
            self._connections.linger(self)
        self._note_state()

    def timeout_keep_alive_handler(self) -> None:
        """No other request came."""
        super().timeout_keep_alive_handler()
        self._await_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        seconds = self._settings.header_timeout
        if self._in_headers:
            self._refuse(SlowHeaders(f"the headers did not end within {seconds:g} seconds", limit=seconds))
        else:
            self._end("silent")

    def _too_large(self) -> HeadersTooLarge:
        limit = self._settings.max_header_bytes
        return HeadersTooLarge(
            f"the URL, headers and trailers of a request must be at most {limit} bytes (gateway.max_header_bytes)",
            limit=limit,
        )

    def _refuse(self, error: KtqueueError) -> None:
        """Answer with an error where that is possible, and end the connection."""
        self._deaf = True
        self._stop_header_timer()
        self._count(error.code)
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not self._in_body):
            self._reply(error)
        elif cycle.response_complete:
            self._end(None)
        elif self._in_headers or not self._in_body or self.pipeline or cycle.response_started:
            cycle.keep_alive = False  # what came before is answered
        else:
            cycle.disconnected = True
            cycle.message_event.set()
            self._reply(error)

    def _reply(self, error: KtqueueError) -> None:
        response = error_response(error)
        headers = [
            *self.server_state.default_headers,
            *response.raw_headers,
            (b"x-request-id", new_request_id().encode()),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[response.status_code] + lines + b"\r\n" + bytes(response.body))
        self.transport.write_eof()
        self._read_on()
        self._connections.linger(self)
        self._end_within(LINGER_SECONDS)

    def _note_state(self) -> None:
        """A connection is busy while the answer to a whole request is computed or sent, and taken by the client."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused:
            self._connections.idle(self)
        else:
            self._connections.busy(self)

    def _count(self, reason: str) -> None:
        self._metrics.connections_ended.labels(reason).inc()

    def _end(self, reason: str | None) -> None:
        if reason is not None:
            self._count(reason)
        self._deaf = True
        self.transport.abort()

    def _end_within(self, seconds: float) -> None:
        self._set_end_timer(seconds, self._end, None)

    def _await_reading(self) -> None:
        """End the connection unless the client takes some of what waits for it, each `stall_seconds`.

        This is for a closed connection too: by itself it stays until the client has read everything.
        """
        waiting = self.transport.get_write_buffer_size()
        self._set_end_timer(self._settings.stall_seconds, self._check_reading, waiting)

    def _check_reading(self, waited: int) -> None:
        if self.transport.get_write_buffer_size() < waited:
            self._await_reading()
        else:
            self._end("not_reading")

    def _set_end_timer(self, seconds: float, callback: Callable[..., None], argument: Any) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._end_timer = self.loop.call_later(seconds, callback, argument)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
