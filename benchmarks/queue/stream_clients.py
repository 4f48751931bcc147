"""HTTP clients that follow jobs by SSE: bare sockets and a C parser, so that a thousand of them fit beside what they
measure.

Answers on standard output, a JSON line each: {"follow": {"job_ids", "stalled"}} once every stream is open; {"report":
{}} once every stream has ended. A stalled client reads nothing until it is asked for the report.
"""

import argparse
import asyncio
import json
import socket
import sys
import time
from typing import Any, cast

import httptools
import orjson
import uvloop

END_SECONDS = 60.0  # how long the streams may take to end once the last event was committed
STALLED_BUFFER = 4_096  # bytes that the kernel keeps for a client that does not read


class Frames:
    """Server-sent events out of pieces of a body: (seq, data) of those that have an id."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[tuple[int, Any]]:
        """The events that are whole now."""
        *whole, self._rest = (self._rest + piece).split(b"\n\n")
        return [_parse(frame) for frame in whole if frame.startswith(b"id: ")]


def _parse(frame: bytes) -> tuple[int, Any]:
    head, _, data = frame.partition(b"\ndata: ")
    return int(head[4:]), orjson.loads(data)


class Reader:
    """What one client has seen: its seqs must be 1, 2, 3 ... up to the event that ends the job."""

    def __init__(self) -> None:
        self.last = 0
        self.wrong = 0  # events out of order: lost, or seen twice
        self.ended = False
        self.delays: list[int] = []  # microseconds from the commit to the client

    def take(self, events: list[tuple[int, Any]], now: int) -> None:
        """Note events that were received at `now` nanoseconds of the monotonic clock."""
        for seq, data in events:
            self.wrong += seq != self.last + 1
            self.last = seq
            self.delays.append((now - int(data["text"])) // 1_000)
            self.ended = self.ended or "state" in data


class Stream(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, path: str, reader: Reader) -> None:
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()
        self._path = path
        self._reader = reader
        self._frames = Frames()
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(request(self._path, 0))  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic_ns()
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() == 200:
            self.opened.set()

    def on_body(self, body: bytes) -> None:
        self._reader.take(self._frames.feed(body), self._now)

    def on_message_complete(self) -> None:
        self.closed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()


def request(path: str, after: int) -> bytes:
    """A GET of a job's events after a seq."""
    resumed = b"Last-Event-ID: %d\r\n" % after if after else b""
    return b"GET %b HTTP/1.1\r\nHost: gateway\r\nAccept: text/event-stream\r\n%b\r\n" % (path.encode(), resumed)


class Stalled:
    """A client that asks and then does not read. `finish` reads what there is, and comes back if it was cut off."""

    def __init__(self, host: str, port: int, path: str) -> None:
        self.reader = Reader()
        self.connections = 0
        self._address = (host, port)
        self._path = path
        self._socket = self._ask()

    def finish(self) -> None:
        """Read until the job has ended. Blocking."""
        end = time.monotonic() + END_SECONDS
        while not self.reader.ended and time.monotonic() < end:
            self._read()
            if not self.reader.ended:
                self._socket.close()
                self._socket = self._ask()
        self._socket.close()

    def _ask(self) -> socket.socket:
        self.connections += 1
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STALLED_BUFFER)
        connection.connect(self._address)
        connection.sendall(request(self._path, self.reader.last))
        return connection

    def _read(self) -> None:
        frames, seen = Frames(), self.reader
        over = False

        class Parsed:
            def on_body(self, body: bytes) -> None:
                seen.take(frames.feed(body), time.monotonic_ns())

            def on_message_complete(self) -> None:
                nonlocal over
                over = True

        parser = httptools.HttpResponseParser(Parsed())
        self._socket.settimeout(5.0)
        while not over:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            parser.feed_data(data)


class Clients:
    """All clients of this process."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._readers: list[Reader] = []
        self._streams: list[Stream] = []
        self._stalled: Stalled | None = None

    async def follow(self, job_ids: list[str], stalled: str | None) -> dict[str, Any]:
        """Open a stream for each job, and one that nobody reads."""
        loop = asyncio.get_running_loop()
        for job_id in job_ids:
            reader = Reader()
            self._readers.append(reader)
            _, stream = await loop.create_connection(
                lambda job_id=job_id, reader=reader: Stream(f"/v1/jobs/{job_id}/events", reader),  # type: ignore[misc]
                self._host,
                self._port,
            )
            self._streams.append(stream)
            await stream.opened.wait()
        if stalled is not None:
            self._stalled = Stalled(self._host, self._port, f"/v1/jobs/{stalled}/events")
        return {"open": len(self._streams)}

    async def report(self) -> dict[str, Any]:
        """What was received, and by how many completely."""
        await asyncio.wait(
            [asyncio.ensure_future(stream.closed.wait()) for stream in self._streams], timeout=END_SECONDS
        )
        report: dict[str, Any] = {
            "complete": sum(reader.ended and not reader.wrong for reader in self._readers),
            "events": sum(len(reader.delays) for reader in self._readers),
            "delays_us": [delay for reader in self._readers for delay in reader.delays],
        }
        if self._stalled is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._stalled.finish)
            seen = self._stalled.reader
            report["stalled"] = {"complete": seen.ended and not seen.wrong, "events": len(seen.delays),
                                 "connections": self._stalled.connections}  # fmt: skip
        return report


async def serve(host: str, port: int) -> None:
    """Answer until standard input ends."""
    loop = asyncio.get_running_loop()
    clients = Clients(host, port)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        [(what, arguments)] = json.loads(line).items()
        answer = await getattr(clients, what)(**arguments)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(arguments.host, arguments.port))
