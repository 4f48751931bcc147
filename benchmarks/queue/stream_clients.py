"""HTTP clients that follow jobs by SSE, by bare sockets and a C parser: a thousand need little of the machine.

It answers questions (see `json_lines`): "follow" once every stream is open, "report" once every stream has ended. A
stalled client reads nothing until the report.
"""

import argparse
import asyncio
import contextlib
import socket
import time
from typing import Any, cast

import httptools
import orjson
import uvloop

from benchmarks.json_lines import answer_questions_async

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

    @property
    def complete(self) -> bool:
        """Whether every event was seen once."""
        return self.ended and not self.wrong

    def take(self, events: list[tuple[int, Any]], now: int) -> None:
        """Note events that were received at `now` nanoseconds of the monotonic clock."""
        for seq, data in events:
            self.wrong += seq != self.last + 1
            self.last = seq
            self.delays.append((now - int(data["text"])) // 1_000)
            self.ended = self.ended or "state" in data


class Stream(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, path: str, reader: Reader) -> None:
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()
        self.transport: asyncio.Transport
        self._path = path
        self._reader = reader
        self._frames = Frames()
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class
        self.transport.write(request(self._path, self._reader.last))

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
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n%b\r\n" % (path.encode(), resumed)


class Clients:
    """All clients of this process. Each public method answers one question."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._readers: list[Reader] = []
        self._streams: list[Stream] = []
        self._stalled: tuple[str, Reader, Stream] | None = None

    async def follow(self, job_ids: list[str], stalled: str | None) -> dict[str, Any]:
        """Open a stream for each job, and one that nobody reads."""
        for job_id in job_ids:
            self._readers.append(Reader())
            self._streams.append(await self._open(job_id, self._readers[-1]))
            await self._streams[-1].opened.wait()
        if stalled is not None:
            reader = Reader()
            stream = await self._open(stalled, reader, buffer_bytes=STALLED_BUFFER)
            stream.transport.pause_reading()
            self._stalled = (stalled, reader, stream)
        return {"open": len(self._streams)}

    async def report(self) -> dict[str, Any]:
        """What was received, and by how many completely."""
        async with asyncio.TaskGroup() as group:
            for stream in self._streams:
                group.create_task(_closed(stream))
        report: dict[str, Any] = {
            "complete": sum(reader.complete for reader in self._readers),
            "events": sum(len(reader.delays) for reader in self._readers),
            "delays_us": [delay for reader in self._readers for delay in reader.delays],
        }
        if self._stalled is not None:
            report["stalled"] = await self._read_stalled(*self._stalled)
        return report

    async def _read_stalled(self, job_id: str, reader: Reader, stream: Stream) -> dict[str, Any]:
        """Read what there is, and connect again if the gateway cut the client off, until the job has ended."""
        end = time.monotonic() + END_SECONDS
        connections = 1
        stream.transport.resume_reading()
        await _closed(stream)
        while not reader.ended and time.monotonic() < end:
            stream = await self._open(job_id, reader, buffer_bytes=STALLED_BUFFER)
            connections += 1
            await _closed(stream)
        return {"complete": reader.complete, "events": len(reader.delays), "connections": connections}

    async def _open(self, job_id: str, reader: Reader, buffer_bytes: int = 0) -> Stream:
        loop = asyncio.get_running_loop()
        connection = socket.socket()
        connection.setblocking(False)
        if buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        await loop.sock_connect(connection, self._address)
        path = f"/v1/jobs/{job_id}/events"
        _, stream = await loop.create_connection(lambda: Stream(path, reader), sock=connection)
        return stream


async def _closed(stream: Stream) -> None:
    """Wait until the stream has ended or END_SECONDS are over, and close the connection."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stream.closed.wait(), END_SECONDS)
    stream.transport.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(answer_questions_async(Clients(arguments.host, arguments.port)))
