"""Start records: a job writes one to a named pipe when it begins. Standard library only: peers' Pythons import it.

A record is three int64: the job's number, nanoseconds of the monotonic clock (one for all processes of a machine), and
the process id. It is shorter than PIPE_BUF, so that records of several workers never mix.
"""

import asyncio
import fcntl
import os
import struct
import time
from dataclasses import dataclass

RECORD = struct.Struct("<qqq")
PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031  # linux/fcntl.h


@dataclass(frozen=True, slots=True)
class Start:
    """Job `number` began in process `process`, at `nanoseconds` of the monotonic clock."""

    number: int
    nanoseconds: int
    process: int


class StartWriter:
    """The worker's end of the pipe."""

    def __init__(self, path: str) -> None:
        self._pipe = os.open(path, os.O_WRONLY)

    def record(self, number: int) -> None:
        """Write that job `number` begins now."""
        os.write(self._pipe, RECORD.pack(number, time.monotonic_ns(), os.getpid()))


class StartReader:
    """The reading end, for an event loop. Create it before the first worker opens its end."""

    def __init__(self, path: str) -> None:
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # RDWR: no end of file when a worker exits
        fcntl.fcntl(self._pipe, F_SETPIPE_SZ, PIPE_BYTES)
        self._half = b""
        self.starts: list[Start] = []
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def forget(self) -> None:
        """Drop the records so far."""
        self.starts.clear()

    async def wait(self, count: int, seconds: float) -> list[Start]:
        """Return the first `count` records since `forget`, or fewer if they have not come after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while len(self.starts) < count:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            pass
        return self.starts[:count]

    def _read(self) -> None:
        data = self._half + os.read(self._pipe, PIPE_BYTES)
        whole = len(data) - len(data) % RECORD.size
        self._half = data[whole:]
        self.starts += [Start(*fields) for fields in RECORD.iter_unpack(data[:whole])]
        self._more.set()
