"""The window: how many lines, and how many bytes of them, an owner keeps in the queue for all its batches.

Lines that cannot run now keep their places: those of a model without workers, or of a tenant that has used its rate. So
each group of batches has an even share that others cannot take. If they have taken it, the group gets it beside them.
"""

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass

MAX_BYTES = 64 << 20  # of the input of the lines that run at once


@dataclass(slots=True)
class _Group:
    lines: int = 0
    bytes: int = 0
    waiting: int = 0


class Window:
    """A limit of lines and of bytes that tasks take in the order in which they asked, those of small groups first.

    There are never more than twice as many lines, and a line for each group. A single line always fits.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.lines = self._bytes = 0  # that run now
        self._groups: dict[Hashable, _Group] = {}  # that have or want lines
        self._waiting: list[tuple[asyncio.Future[None], int, Hashable]] = []

    def resize(self, size: int) -> None:
        """Change the number of lines."""
        self._size = size
        self._admit()

    async def acquire(self, size: int, group: Hashable) -> None:
        """Take a place for a line of `size` bytes, and wait until there is one."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._groups.setdefault(group, _Group()).waiting += 1
        self._waiting.append((place, size, group))
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(size, group)
            else:
                self._waiting.remove((place, size, group))
                self._groups[group].waiting -= 1
                self._forget(group)
                self._admit()  # the shares of the others may have grown
            raise

    def release(self, size: int, group: Hashable) -> None:
        """Return the place of a line of `size` bytes."""
        self._count(-1, -size, self._groups[group])
        self._forget(group)
        self._admit()

    def _fits(self, size: int, group: _Group) -> bool:
        """Whether there is room in all, or in the share of the group."""
        share = 1 / len(self._groups)
        has_line = self.lines < self._size or group.lines < max(1, share * self._size)
        has_bytes = self._bytes + size <= MAX_BYTES or group.bytes + size <= share * MAX_BYTES
        return has_line and (has_bytes or not self.lines)

    def _count(self, lines: int, size: int, group: _Group) -> None:
        self.lines += lines
        self._bytes += size
        group.lines += lines
        group.bytes += size

    def _forget(self, group: Hashable) -> None:
        if not self._groups[group].lines and not self._groups[group].waiting:
            del self._groups[group]

    def _admit(self) -> None:
        while fitting := [
            (self._groups[group].lines, index)
            for index, (place, size, group) in enumerate(self._waiting)
            if not place.done() and self._fits(size, self._groups[group])
        ]:
            place, size, group = self._waiting.pop(min(fitting)[1])
            self._groups[group].waiting -= 1
            self._count(1, size, self._groups[group])
            place.set_result(None)
