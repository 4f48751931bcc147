"""The lines of a stored file, cut from the parts in which the store sends it."""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from ktqueue.batches.input import MAX_LINE_BYTES
from ktqueue.storage.store import Store

_BLANK_LINES = re.compile(rb"(?:[ \t\r\v\f]*\n)+")


@dataclass(frozen=True, slots=True)
class StoredLine:
    """One line: its number from 1, where it begins and how long it is, in bytes, and its data with the newline.

    Of a line that is too long, `data` has only the first bytes, more than are allowed.
    """

    number: int
    offset: int
    length: int
    data: bytes


async def stored_lines(store: Store, name: str) -> AsyncGenerator[StoredLine, None]:
    """Every line that is not blank. Raises NotStored."""
    number, offset, length = 1, 0, 0
    pieces: list[bytes] = []  # of the line that is not complete yet, at most MAX_LINE_BYTES and a part

    def line() -> StoredLine | None:
        data = b"".join(pieces)
        return StoredLine(number, offset, length, data) if data.strip() else None

    async with aclosing(store.read(name)) as parts:
        async for part in parts:
            start = 0
            while (end := part.find(b"\n", start)) >= 0:
                if not pieces and (blank := _BLANK_LINES.match(part, start)):  # millions of them take no time
                    number, offset = number + blank[0].count(b"\n"), offset + len(blank[0])
                    start = blank.end()
                    continue
                pieces.append(part[start : end + 1])
                length += end + 1 - start
                if (found := line()) is not None:
                    yield found
                number, offset, length, start = number + 1, offset + length, 0, end + 1
                pieces.clear()
            rest = part[start:]
            if sum(map(len, pieces)) <= MAX_LINE_BYTES:
                pieces.append(rest)
            length += len(rest)
    if (found := line()) is not None:
        yield found
