"""The records of lines that have ended, in objects of the store: segments.

A segment is a line of JSON, {"v": 1, "lines": [[place, answered, length, prompt, cached, completion, reasoning], ...]},
and then the records one after the other. They are in the order of their places. What is done of a batch is what its
segments have, so no counter can differ from them.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ktqueue.batches.concurrency import map_concurrently
from ktqueue.broker.batches import BatchUsage
from ktqueue.core.codec import CodecError, dumps, loads
from ktqueue.storage.store import NotStored, Store, read_whole

MAX_HEADER_BYTES = 16 << 20
FIRST_READ_BYTES = 16 << 10  # of a segment, for its header; then four times as many until it has ended
FIELDS = 7  # numbers of a line in the header
READS_AT_ONCE = 32  # segments that are read at the same time, since a store far away takes its time for each
_OPEN, _ANSWERED, _FAILED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The output record of a line, as bytes that end with a newline. `answered`: else it is for the error file."""

    place: int
    answered: bool
    data: bytes
    usage: BatchUsage


class Segments:
    """All records of one batch, by the places of their lines: 13 bytes a line."""

    def __init__(self, store: Store, folder: str, lines: int) -> None:
        """`folder`: the beginning of the segments' names. `lines`: of the input."""
        self._store = store
        self._folder = folder
        self._names: list[str] = []
        self._state = bytearray(lines)
        self._segment = array("I", bytes(4 * lines))
        self._start = array("I", bytes(4 * lines))
        self._length = array("I", bytes(4 * lines))
        self.answered = self.failed = 0
        self.usage = BatchUsage()

    @property
    def done(self) -> int:
        """Number of lines that have a record."""
        return self.answered + self.failed

    def has(self, place: int) -> bool:
        """Whether the line has a record."""
        return self._state[place] != _OPEN

    def is_answered(self, place: int) -> bool:
        """Whether the line has a record with an answer."""
        return self._state[place] == _ANSWERED

    def length(self, place: int) -> int:
        """Bytes of the line's record."""
        return self._length[place]

    async def load(self, names: Sequence[str]) -> list[str]:
        """Read which records the segments have. Returns a reason for each that is lost or cannot be read."""
        faults: list[str] = []
        headers = await map_concurrently(self._header, names, READS_AT_ONCE)
        for name, header in zip(names, headers, strict=True):  # in order: of two records of a line the first counts
            if isinstance(header, str):
                faults.append(header)
            else:
                self._add(name, *header)
        return faults

    async def _header(self, name: str) -> tuple[int, list[list[int]]] | str:
        """Bytes of a segment's header, and the numbers of its lines; or why they cannot be read."""
        header, size = bytearray(), FIRST_READ_BYTES
        try:
            while size and b"\n" not in header and len(header) < MAX_HEADER_BYTES:
                start = len(header)
                header += await read_whole(self._store, f"{self._folder}{name}", start, size)
                size = 4 * (len(header) - start)  # 0 at the end of the object
            head, _, _ = header.partition(b"\n")
            lines = loads(bytes(head))["lines"]
            if all(0 <= line[0] < len(self._state) and len(line) == FIELDS for line in lines):
                return len(head) + 1, lines
        except NotStored as error:
            return error.message
        except (CodecError, KeyError, TypeError, ValueError, IndexError):
            pass
        return f"segment {name}: not one that this version can read"

    async def write(self, name: str, records: Iterable[StoredRecord]) -> None:
        """Store a segment. What the store raises leaves everything as it was."""
        ordered = sorted(records, key=lambda record: record.place)
        lines = [[each.place, int(each.answered), len(each.data), *_numbers(each.usage)] for each in ordered]
        header = dumps({"v": 1, "lines": lines}) + b"\n"
        async with self._store.create(f"{self._folder}{name}") as writing:
            await writing.write(header)
            for record in ordered:
                await writing.write(record.data)
        self._add(name, len(header), lines)

    async def read(self, places: Iterable[int]) -> dict[int, bytes]:
        """The records of these lines. Records that are neighbours in a segment are read at once."""
        by_segment: dict[int, list[int]] = {}
        for place in places:
            by_segment.setdefault(self._segment[place], []).append(place)
        found: dict[int, bytes] = {}
        for records in await map_concurrently(self._records, list(by_segment.items()), READS_AT_ONCE):
            found |= records
        return found

    async def _records(self, group: tuple[int, list[int]]) -> dict[int, bytes]:
        """The records of lines of one segment. `group`: its number, and the places of the lines."""
        segment, places = group
        places.sort(key=self._start.__getitem__)
        first = self._start[places[0]]
        length = self._start[places[-1]] + self._length[places[-1]] - first
        data = await read_whole(self._store, f"{self._folder}{self._names[segment]}", first, length)
        starts = [self._start[place] - first for place in places]
        return {place: data[start : start + self._length[place]] for place, start in zip(places, starts, strict=True)}

    def _add(self, name: str, start: int, lines: Iterable[list[int]]) -> None:
        """Enter the records of a segment. A line that has a record already keeps that one."""
        self._names.append(name)
        for place, answered, length, *tokens in lines:
            if self._state[place] == _OPEN:
                self._state[place] = _ANSWERED if answered else _FAILED
                self._segment[place] = len(self._names) - 1
                self._start[place], self._length[place] = start, length
                self.answered += bool(answered)
                self.failed += not answered
                prompt, cached, completion, reasoning = tokens
                self.usage = self.usage.plus(
                    BatchUsage(prompt=prompt, cached=cached, completion=completion, reasoning=reasoning)
                )
            start += length


def _numbers(usage: BatchUsage) -> tuple[int, int, int, int]:
    return usage.prompt, usage.cached, usage.completion, usage.reasoning
