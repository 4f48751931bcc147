"""HTTP/1.1 with limits: uvicorn's protocol, except that a client that sends too much or too slowly is disconnected.

The headers of a request have limits of bytes, number and time. The parser gets a limited number of bytes without a
callback, and a client that reads nothing is disconnected. `uploads` limits the time of a body. Nothing here is logged,
since anybody could fill the disk with it; everything is counted.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ktqueue.core.config import Config
from ktqueue.core.errors import KtqueueError
from ktqueue.gateway.errors import HeadersTooLarge, MalformedRequest, RequestTimeout, UrlTooLong
from ktqueue.gateway.http.connections import Connections
from ktqueue.gateway.http.headers import new_request_id
from ktqueue.gateway.http.responses import error_response
from ktqueue.gateway.http.uploads import too_large
from ktqueue.gateway.metrics import Metrics

UPLOAD_PATH = "/v1/files"  # where a body may have the size of a file
PIECE_BYTES = 4 << 10  # fed to the parser in one call, so it may exceed a limit by this much
MAX_PIPELINED = 2  # requests that wait for an earlier answer; with more, the connection is closed
IGNORED_SECONDS = 0.02  # pause between two reads of input that is thrown away
LINGER_SECONDS = 2.0  # between a refusal and the close; closing with unread input would lose the refusal


class _StopParsing(Exception):
    """Ends the parsing. The error for the client is stored instead of raised: its traceback would keep the input in
    memory, as long as the connection refers to the error."""


class _NoReadAhead(FlowControl):
    """Resumes reading only when the application has taken the part of the body that has arrived."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        super().__init__(protocol.transport)
        self._protocol: HttpToolsProtocol | None = protocol

    def resume_reading(self) -> None:
        """Called when the application asks for more of the body, before it gets the part that has arrived."""
        cycle = self._protocol.cycle if self._protocol is not None else None
        if cycle is None or not cycle.body or cycle.response_complete:
            super().resume_reading()

    def forget(self) -> None:
        """Drop the reference to the closed connection, since a reference cycle would stay in memory for a while."""
        self._protocol = None


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A parser callback (`on_...`) that raises ends the parsing."""

    def __init__(
        self, settings: Config, metrics: Metrics, connections: Connections, *, probes_only: bool, **uvicorn: Any
    ) -> None:
        super().__init__(**uvicorn)
        self._settings = settings.gateway
        self._metrics = metrics
        self._max_file_bytes = settings.gateway.max_body_bytes if probes_only else settings.storage.max_file_bytes
        self._max_body_bytes = settings.gateway.max_body_bytes  # of the request that is being read
        self._connections = connections
        self._probes_only = probes_only
        self._refusal: KtqueueError | None = None  # of every request of this connection that is not a probe
        self._fault: KtqueueError | None = None  # found by a parser callback
        self._reading: _NoReadAhead  # `flow`
        self._answered: RequestResponseCycle | None = None  # `cycle` is the newest one, which may be waiting
        self._ignores_input = False  # from now on input is thrown away
        self._in_headers = False
        self._in_body = False
        self._unparsed_bytes = 0  # fed since the last parser callback
        self._header_bytes = 0
        self._header_count = 0
        self._body_wire_bytes = 0  # of the body, with chunk headers
        self._header_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection and wait for headers."""
        super().connection_made(transport)
        self.flow = self._reading = _NoReadAhead(self)
        self._metrics.connections.inc()
        self._refusal = self._connections.enter(self, self.client[0] if self.client else "")
        if self._refusal is not None:
            self._count(self._refusal.code)
        self._header_timer = self.loop.call_later(self._settings.header_timeout, self._on_header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered, and release everything."""
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
        """Close at once, to make room for another connection."""
        self._end("evicted")

    def shutdown(self) -> None:
        """The server stops: finish the current answer, then close."""
        if self._ignores_input and self._end_timer is not None:
            self.transport.close()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """The client does not read: from now on it must read something in each `stall_seconds`."""
        super().pause_writing()
        self._note_state()
        self._await_reading()

    def resume_writing(self) -> None:
        """The client has read enough for writing to continue."""
        super().resume_writing()
        self._note_state()
        if self._end_timer is not None and not self.transport.is_closing():
            self._end_timer.cancel()
            self._end_timer = None

    def data_received(self, data: bytes) -> None:
        """Parse the input in small pieces."""
        if self._ignores_input or (self._in_body and self.cycle.response_complete):
            self.flow.pause_reading()
            self.loop.call_later(IGNORED_SECONDS, self._force_reading)
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            if self._ignores_input:
                return
            self._parse(view[start : start + PIECE_BYTES])
        if self._in_body and self.cycle.body and not self.cycle.response_complete:
            self.flow.pause_reading()  # until the application asks for more
        if self._in_headers and self._header_timer is None and not self._ignores_input:
            self._header_timer = self.loop.call_later(self._settings.header_timeout, self._on_header_timeout)

    def _force_reading(self) -> None:
        """Read although the application does not ask for it."""
        if not self.transport.is_closing():
            FlowControl.resume_reading(self.flow)

    def _parse(self, piece: memoryview) -> None:
        self._unparsed_bytes += len(piece)
        self._body_wire_bytes += len(piece) if self._in_body else 0
        settings = self._settings
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_body_without_upgrade()
            self._parse(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._ignores_input:
                self._refuse(self._fault or MalformedRequest("the input is not an HTTP/1.1 request"))
        else:
            if self._unparsed_bytes > settings.max_header_bytes:
                self._refuse(self._too_large())
            # With chunk headers a body may take twice its size. More is an attack with tiny chunks.
            elif (
                self._body_wire_bytes > 2 * self._max_body_bytes + settings.max_header_bytes
                and not self.cycle.response_complete
            ):
                self._refuse(too_large(self._body_wire_bytes, self._max_body_bytes))

    def _read_body_without_upgrade(self) -> None:
        """Go on with HTTP/1.1 where a client offers another protocol, as Java's does in the first request.

        The parser would take its body for the other protocol. Another one reads it, and this is the last request.
        """
        body = SimpleNamespace(
            on_header=self.on_header,
            on_body=self.on_body,
            on_chunk_header=self.on_chunk_header,
            on_message_complete=self._on_last_message_complete,
        )
        self.parser = httptools.HttpRequestParser(body)
        framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        self._parse(memoryview(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % header for header in framing)))

    def _on_last_message_complete(self) -> None:
        self.on_message_complete()
        self._ignores_input = True
        raise _StopParsing

    def on_message_begin(self) -> None:
        """The first byte of a request has arrived."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_headers = True
        self._unparsed_bytes = self._header_bytes = self._header_count = self._body_wire_bytes = 0
        self.scope["state"].update(refusal=self._refusal, probes_only=self._probes_only)

    def on_url(self, url: bytes) -> None:
        """A part of the URL has arrived."""
        self._unparsed_bytes = 0
        super().on_url(url)
        self._header_bytes += len(url)
        limit = self._settings.max_url_bytes
        if len(self.url) > limit:
            self._fault = UrlTooLong(
                f"the URL must be at most {limit} bytes (gateway.max_url_bytes)", limit=limit, value=len(self.url)
            )
            raise _StopParsing

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header or trailer has arrived. Trailers are counted and dropped: uvicorn would add them to the headers."""
        self._unparsed_bytes = 0
        self._header_bytes += len(name) + len(value) + 4
        self._header_count += 1
        if self._header_bytes > self._settings.max_header_bytes:
            self._fault = self._too_large()
            raise _StopParsing
        limit = self._settings.max_headers
        if self._header_count > limit:
            self._fault = HeadersTooLarge(
                f"a request may have at most {limit} headers (gateway.max_headers)",
                limit=limit,
                value=self._header_count,
            )
            raise _StopParsing
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Give the request to the application, or let it wait for the previous one."""
        self._unparsed_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self._ignores_input = True
            self.cycle.keep_alive = False
            raise _StopParsing
        if fault := self._smuggling_risk():
            self._fault = MalformedRequest(fault)
            raise _StopParsing
        super().on_headers_complete()
        self._in_headers, self._in_body = False, True
        is_upload = self.scope["method"] == "POST" and self.scope["path"] == UPLOAD_PATH
        self._max_body_bytes = self._max_file_bytes if is_upload else self._settings.max_body_bytes
        self._stop_header_timer()
        if self._refusal is not None or self.parser.should_upgrade():
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of the body has arrived."""
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """The size of a chunk has arrived, with its extensions."""
        self._unparsed_bytes = 0

    def on_message_complete(self) -> None:
        """The whole request has arrived, unless the parser takes its body for another protocol."""
        self._unparsed_bytes = 0
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._connections.linger(self, on=False)
        super().on_message_complete()
        self._note_state()

    def on_response_complete(self) -> None:
        """The answer is written. The rest of the body is skipped for as long as a connection may be idle."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reading()
        elif self._in_body:
            self._connections.linger(self)
        self._note_state()

    def timeout_keep_alive_handler(self) -> None:
        """No further request arrived in time."""
        super().timeout_keep_alive_handler()
        self._await_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        seconds = self._settings.header_timeout
        if self._in_headers:
            message = f"the headers must end within {seconds:g} seconds (gateway.header_timeout)"
            self._refuse(RequestTimeout(message, limit=seconds))
        else:
            self._end("silent")

    def _smuggling_risk(self) -> str:
        """Why a proxy might read these headers in another way, or "". RFC 9112, 3.2 and 6.1, asks for a refusal."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            return f"the request must have one Host header, not {hosts}"
        codings = b", ".join(value for name, value in self.headers if name == b"transfer-encoding")
        if codings and codings.strip().lower() != b"chunked":
            return "the only Transfer-Encoding that is understood is chunked"
        return ""

    def _too_large(self) -> HeadersTooLarge:
        limit = self._settings.max_header_bytes
        return HeadersTooLarge(
            f"the URL, headers and trailers of a request must be at most {limit} bytes (gateway.max_header_bytes)",
            limit=limit,
        )

    def _refuse(self, error: KtqueueError) -> None:
        """End the connection, with an error as the answer if that is still possible."""
        self._ignores_input = True
        self._stop_header_timer()
        self._count(error.code)
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not self._in_body):
            self._reply(error)
        elif cycle.response_complete:
            self._end(None)
        elif self._in_headers or not self._in_body or self.pipeline or cycle.response_started:
            cycle.keep_alive = False  # earlier requests are still answered
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
        self._force_reading()
        self._connections.linger(self)
        self._set_end_timer(LINGER_SECONDS, self._end, None)

    def _note_state(self) -> None:
        """A connection is busy while the answer to a complete request is computed or sent, and the client reads it."""
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
        self._ignores_input = True
        self.transport.abort()

    def _await_reading(self) -> None:
        """End the connection unless the client reads something in each `stall_seconds`.

        Closed connections need this too: they stay until the client has read everything.
        """
        unread_bytes = self.transport.get_write_buffer_size()
        self._set_end_timer(self._settings.stall_seconds, self._check_reading, unread_bytes)

    def _check_reading(self, unread_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < unread_bytes:
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
