"""The window: how many lines, and how many bytes of them, an owner keeps in the queue for all its batches."""

import asyncio
from collections import deque

MAX_BYTES = 64 << 20  # of the input of the lines that run at once


class Window:
    """A limit of lines and of bytes that tasks take in the order in which they asked. A single line always fits."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lines = self._bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def lines(self) -> int:
        """Number of lines that run now."""
        return self._lines

    def resize(self, size: int) -> None:
        """Change the number of lines."""
        self._size = size
        self._admit()

    async def acquire(self, size: int) -> None:
        """Take a place for a line of `size` bytes, and wait until there is one."""
        if not self._waiting and self._fits(size):
            self._take(size)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, size))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(size)
            raise

    def release(self, size: int) -> None:
        """Return the place of a line of `size` bytes."""
        self._lines -= 1
        self._bytes -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        return not self._lines or (self._lines < self._size and self._bytes + size <= MAX_BYTES)

    def _take(self, size: int) -> None:
        self._lines += 1
        self._bytes += size

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][0].done() or self._fits(self._waiting[0][1])):
            place, size = self._waiting.popleft()
            if not place.done():
                self._take(size)
                place.set_result(None)
