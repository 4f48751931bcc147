"""An HTTP/1.1 client that costs little CPU for each piece of a streamed answer, so that it measures the server.

httptools parses and asyncio's protocols read, on connections that are kept open. There are no redirects and proxies.
What goes wrong raises RequestFailure, with a kind by which failures are counted. Nothing is retried, except on a
connection of before that the server closed when the request was on its way: llama.cpp's does so.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

MAX_ANSWER_BYTES = 64 << 20
MAX_HEADER_BYTES = 64 << 10
CONNECT_SECONDS = 30.0
IDLE_SECONDS = 2.0  # a connection that was idle for longer may be about to be closed by the server
ENDING_SECONDS = 1.0  # that the rest of a response may take after the answer is complete

Receive = Callable[[int, bytes], bool]
"""Takes the status and a piece of the body. Returns True once the answer is complete, so that nothing more counts."""


class RequestFailure(Exception):
    """A request failed. `kind` is one of few words, by which failures are counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `path` is put before that of each request."""

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Read a URL of http or https, with or without a trailing /v1. Raises ValueError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"must be a URL such as http://127.0.0.1:8000, got {url!r}")
        if parts.username is not None:
            raise ValueError("must not contain a user or password: use --api-key or --header")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), path, tls)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"


class HttpClient:
    """Sends requests to one server. `seconds` is the time limit of a whole request."""

    def __init__(
        self, address: Address, headers: Mapping[str, str], seconds: float, *, check_certificates: bool = True
    ) -> None:
        """Raises ValueError for a header that HTTP does not allow."""
        self._address = address
        self._seconds = seconds
        self._tls = _tls(check_certificates) if address.tls else None
        self._idle: list[_Connection] = []
        host = str(Address(address.host, address.port, "", address.tls)).partition("//")[2]
        self._head = "".join(_header_line(name, value) for name, value in {"Host": host, **headers}.items())

    async def request(self, method: str, path: str, body: bytes, receive: Receive) -> None:
        """Send a request, and pass the pieces of its answer to `receive` as they arrive. Raises RequestFailure."""
        head = f"{method} {self._address.path}{path} HTTP/1.1\r\n{self._head}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        try:
            async with asyncio.timeout(self._seconds):
                await self._exchange(f"{head}\r\n".encode("latin-1") + body, receive)
        except TimeoutError as error:
            raise RequestFailure("timeout", f"no complete answer in {self._seconds:g} s") from error

    async def _exchange(self, request: bytes, receive: Receive) -> None:
        """Send a request on a connection of before that is still open, or on a new one."""
        while self._idle:
            connection = self._idle.pop()  # the last one used is the least likely to be closed
            if connection.is_usable:
                with suppress(_ClosedMeanwhile):
                    await self._exchange_on(connection, request, receive)
                    return
            connection.close()
        try:
            await self._exchange_on(await self._connect(), request, receive)
        except _ClosedMeanwhile as error:
            raise RequestFailure("disconnected", "the server closed the connection before it answered") from error

    async def _exchange_on(self, connection: "_Connection", request: bytes, receive: Receive) -> None:
        try:
            await connection.exchange(request, receive)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    _Connection, self._address.host, self._address.port, ssl=self._tls
                )
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            raise RequestFailure("cannot connect", str(error) or type(error).__name__) from error
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


class _ClosedMeanwhile(Exception):
    """The server closed the connection before it sent a byte of the answer."""


class _Connection(asyncio.Protocol):
    """One connection, with at most one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._receive: Receive | None = None
        self._ended: asyncio.Future[None] | None = None
        self._status = 0
        self._bytes = 0
        self._is_framed = False  # whether headers say where the body ends
        self._idle_since = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._keeps_open = True

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent on it."""
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and self._keeps_open and time.monotonic() - self._idle_since < IDLE_SECONDS

    async def exchange(self, request: bytes, receive: Receive) -> None:
        """Send a request and pass its answer to `receive`. Raises RequestFailure."""
        assert self._transport is not None
        self._receive, self._status, self._bytes = receive, 0, 0
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        finally:
            self._receive = self._parser = self._ended = None
            self._stop_timer()
            self._idle_since = time.monotonic()

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:  # bytes that belong to no request
            self._keeps_open = False
            return
        self._bytes += len(data)
        if self._bytes > MAX_ANSWER_BYTES:
            self._fail("too long", f"the answer has more than {MAX_ANSWER_BYTES:,} bytes")
            return
        try:
            self._parser.feed_data(data)
            if not self._status and self._bytes > MAX_HEADER_BYTES:
                self._fail("too long", f"the headers have more than {MAX_HEADER_BYTES:,} bytes")
        except RequestFailure as failure:
            self._fail(failure.kind, failure.message)
        except httptools.HttpParserUpgrade:
            self._fail("not HTTP", "the server wants to change the protocol")
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, RequestFailure):
                self._fail(cause.kind, cause.message)
            else:
                self._fail("not HTTP", str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._keeps_open = False
        if self._parser is not None and self._status and not self._is_framed:
            self._finish()  # the end of such a body is the end of the connection
        if self._ended is not None and not self._ended.done() and not self._bytes and not self._status:
            self._ended.set_exception(_ClosedMeanwhile())
        self._fail("disconnected", "the server closed the connection in the middle of the answer")

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._is_framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._receive is not None and self._receive(self._status, data):
            self._receive = None
            self._timer = asyncio.get_running_loop().call_later(ENDING_SECONDS, self._leave)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._status >= 200:  # not an interim answer
            self._keeps_open = self._keeps_open and self._parser.should_keep_alive()
            self._receive = None
            self._finish()

    def _finish(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _leave(self) -> None:
        """End the request although the server does not end its response."""
        self._keeps_open = False
        self._finish()
        self.close()

    def _fail(self, kind: str, message: str) -> None:
        if self._ended is not None and not self._ended.done():
            if self._receive is None:  # the answer was complete already
                self._finish()
            else:
                self._ended.set_exception(RequestFailure(kind, message))
        self._keeps_open = False
        self.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _tls(check_certificates: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not check_certificates:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _header_line(name: str, value: str) -> str:
    token = name.replace("-", "").replace("_", "")
    if not (token.isascii() and token.isalnum()) or any(ord(c) < 32 and c != "\t" for c in value):
        raise ValueError(f"not a header: {name!r}")
    try:
        value.encode("latin-1")
    except UnicodeEncodeError as error:
        raise ValueError(f"the value of header {name!r} is not Latin-1") from error
    return f"{name}: {value}\r\n"
