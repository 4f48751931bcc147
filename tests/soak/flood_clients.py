"""Hostile sockets: `python -m tests.soak.flood_clients --kinds silent,idle --port 8000 --sockets 5000`.

Each socket that the gateway closes is opened again, so many a second at most. Says {"open": N} on standard output once
all have been opened for the first time, and {"opened", "closed", "open"} when standard input ends.
"""

import argparse
import errno
import json
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass

_POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
_CHUNKED = _POST + b"transfer-encoding: chunked\r\n\r\n"
PAUSE = 5.0  # seconds
SMALL_BUFFER = 4_096  # that the kernel keeps for a client that does not read


@dataclass(frozen=True, slots=True)
class Kind:
    """What a socket sends first, and then without end: `more` as fast as it can, or `drop` every `PAUSE` seconds."""

    first: bytes = b""
    more: bytes = b""
    drop: bytes = b""
    reads: bool = True


KINDS: dict[str, Kind] = {
    "silent": Kind(),
    "idle": Kind(first=_GET + b"\r\n"),
    "slow headers": Kind(first=_POST, drop=b"a"),
    "endless header": Kind(first=b"GET / HTTP/1.1\r\na: ", more=b"a" * 65_536),
    "endless headers": Kind(first=b"GET / HTTP/1.1\r\n", more=b"a: b\r\n" * 10_000),
    "endless URL": Kind(first=b"GET /", more=b"a" * 65_536),
    "newlines": Kind(more=b"\r\n" * 32_768),
    "no HTTP": Kind(more=bytes(range(1, 256)) * 256),
    "pipelined requests": Kind(more=(_GET + b"\r\n") * 1_000),
    "slow body": Kind(first=_POST + b"content-length: 4000000\r\n\r\n{", drop=b" "),
    "large bodies that never end": Kind(first=_POST + b"content-length: 4000000\r\n\r\n" + b" " * 3_999_000),
    "endless chunk extension": Kind(first=_CHUNKED + b"1;", more=b"a" * 65_536),
    "endless trailers": Kind(first=_CHUNKED + b"1\r\n{\r\n0\r\n", more=b"a: b\r\n" * 10_000),
    "answers that nobody reads": Kind(
        first=(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n") * 8, reads=False
    ),
}


class Flood:
    """`sockets` in all, of each of `kinds` and from each of `addresses` in turn."""

    def __init__(
        self, kinds: list[Kind], port: int, sockets: int, addresses: list[str], reopen_per_second: float
    ) -> None:
        self._kinds = kinds
        self._port = port
        self._wanted = sockets
        self._addresses = addresses
        self._interval = 1 / reopen_per_second
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._kind: dict[int, Kind] = {}
        self._unsent: dict[int, memoryview] = {}
        self._drops: deque[tuple[float, int, socket.socket]] = deque()
        self.opened = self.closed = 0

    def run(self) -> None:
        """Serve all sockets until standard input ends."""
        self._poll.register(sys.stdin.fileno(), select.EPOLLIN)
        complete, next_open = False, 0.0
        while True:
            now = time.monotonic()
            if len(self._sockets) < self._wanted and (now >= next_open or not complete):
                self._open()
                next_open = now + self._interval
            if not complete and self.opened >= self._wanted:
                complete = True
                print(json.dumps({"open": len(self._sockets)}), flush=True)  # noqa: T201
            while self._drops and self._drops[0][0] <= now:
                _, file, connection = self._drops.popleft()
                if self._sockets.get(file) is connection:
                    self._write(file, self._kind[file].drop)
                    self._drops.append((now + PAUSE, file, connection))
            busy = len(self._sockets) < self._wanted
            for file, events in self._poll.poll(0.0 if busy and not complete else 0.005, 256):
                if file == sys.stdin.fileno():
                    self._report()
                    return
                self._serve(file, events)

    def _open(self) -> None:
        kind = self._kinds[self.opened % len(self._kinds)]
        connection = socket.socket()
        connection.setblocking(False)
        if not kind.reads:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        connection.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: ports are by pair of addresses
        connection.bind((self._addresses[self.opened % len(self._addresses)], 0))
        self.opened += 1
        if connection.connect_ex(("127.0.0.1", self._port)) not in (0, errno.EINPROGRESS):
            connection.close()
            return
        file = connection.fileno()
        self._sockets[file] = connection
        self._kind[file] = kind
        self._unsent[file] = memoryview(kind.first or kind.more)
        reads = select.EPOLLIN if kind.reads else 0
        self._poll.register(file, reads | select.EPOLLOUT)

    def _serve(self, file: int, events: int) -> None:
        connection = self._sockets.get(file)
        if connection is None:
            return
        try:
            if events & select.EPOLLIN and not connection.recv(65_536):
                raise ConnectionResetError
            if events & (select.EPOLLHUP | select.EPOLLERR):
                raise ConnectionResetError
            if events & select.EPOLLOUT:
                self._send(file, connection)
        except BlockingIOError:
            pass
        except OSError:
            self._poll.unregister(file)
            del self._sockets[file], self._kind[file], self._unsent[file]
            connection.close()
            self.closed += 1

    def _send(self, file: int, connection: socket.socket) -> None:
        unsent, kind = self._unsent[file], self._kind[file]
        if unsent:
            self._unsent[file] = unsent[connection.send(unsent[:65_536]) :]
        elif kind.more:
            self._unsent[file] = memoryview(kind.more)
        else:
            self._poll.modify(file, select.EPOLLIN if kind.reads else 0)
            if kind.drop:
                self._drops.append((time.monotonic() + PAUSE, file, connection))

    def _write(self, file: int, data: bytes) -> None:
        try:
            self._sockets[file].send(data)
        except OSError:
            return  # the next poll reports it

    def _report(self) -> None:
        report = {"opened": self.opened, "closed": self.closed, "open": len(self._sockets)}
        print(json.dumps(report), flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", required=True, help=f"with commas: {', '.join(KINDS)}")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--sockets", type=int, default=5_000)
    parser.add_argument("--addresses", type=int, default=1, help="how many of 127.0.1.1, 127.0.1.2 ... they come from")
    parser.add_argument("--reopen-per-second", type=float, default=200.0)
    arguments = parser.parse_args()
    addresses = [f"127.0.{1 + place // 250}.{1 + place % 250}" for place in range(arguments.addresses)]
    kinds = [KINDS[kind] for kind in arguments.kinds.split(",")]
    Flood(kinds, arguments.port, arguments.sockets, addresses, arguments.reopen_per_second).run()


if __name__ == "__main__":
    main()
