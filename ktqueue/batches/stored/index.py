"""The index of a batch's input: where its lines are, and in which order they run.

Lines whose prompts begin alike run one after the other, so that the beginning is computed once. Beginnings of 256, of
1,024 and of 4,096 bytes are compared by their hashes. A wrong match only costs time.
"""

import sys
from array import array
from hashlib import blake2b
from typing import Any

from ktqueue.batches.errors import BatchFault
from ktqueue.core.codec import dumps

LEVELS = ((256, 24), (1024, 20), (4096, 20))  # bytes of a beginning, and the bits of the key that its hash takes
_MARK = b"ktqueue-index-1\n"


class LineIndex:
    """Offset, length, number and beginning of each line: 24 bytes a line. A line's place counts from 0."""

    def __init__(self) -> None:
        self._offsets = array("Q")
        self._lengths = array("I")
        self._numbers = array("I")
        self._beginnings = array("Q")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, offset: int, length: int, number: int, beginning: int) -> None:
        """Add a line. `beginning` is a result of `beginning_key`."""
        self._offsets.append(offset)
        self._lengths.append(length)
        self._numbers.append(number)
        self._beginnings.append(beginning)

    def span(self, place: int) -> tuple[int, int]:
        """Where the line begins in the input, and its length, in bytes."""
        return self._offsets[place], self._lengths[place]

    def number(self, place: int) -> int:
        """The number of the line in the input, from 1, in which blank lines count."""
        return self._numbers[place]

    def order(self) -> "array[int]":
        """The places of all lines, in the order in which they run.

        Lines of one beginning follow the first of them, and those with more in common are closer together.
        """
        first: dict[tuple[int, int], int] = {}
        keys: list[tuple[int, ...]] = []
        for place, key in enumerate(self._beginnings):
            bits, ranks = 64, []
            for level, (_, width) in enumerate(LEVELS):
                bits -= width
                ranks.append(first.setdefault((level, key >> bits), place))
            keys.append((*ranks, place))
        return array("I", sorted(range(len(self)), key=keys.__getitem__))

    def encode(self) -> bytes:
        """The index as bytes."""
        return _MARK + b"".join(_little(column).tobytes() for column in self._columns())

    @classmethod
    def decode(cls, data: bytes) -> "LineIndex":
        """Inverse of `encode`. Raises BatchFault."""
        index = cls()
        columns = index._columns()
        count, rest = divmod(len(data) - len(_MARK), sum(column.itemsize for column in columns))
        if not data.startswith(_MARK) or rest:
            raise BatchFault("not the index of a batch that this version can read")
        start = len(_MARK)
        for column in columns:
            end = start + count * column.itemsize
            column.frombytes(data[start:end])
            _little(column, in_place=True)
            start = end
        return index

    def _columns(self) -> tuple["array[int]", ...]:
        return self._offsets, self._lengths, self._numbers, self._beginnings


def beginning_key(body: dict[str, Any]) -> int:
    """A key of 64 bits that is alike, in its first bits, for bodies whose prompts begin alike."""
    parts = [body.get(name) for name in ("tools", "instructions", "system", "messages", "prompt", "input")]
    text = dumps([part for part in parts if part is not None])
    key = 0
    for size, width in LEVELS:
        digest = int.from_bytes(blake2b(text[:size], digest_size=4).digest(), "little")
        key = (key << width) | (digest & ((1 << width) - 1))
    return key


def _little(column: "array[int]", *, in_place: bool = False) -> "array[int]":
    """The column in little-endian order, which files have."""
    if sys.byteorder == "little":
        return column
    column = column if in_place else array(column.typecode, column)
    column.byteswap()
    return column
