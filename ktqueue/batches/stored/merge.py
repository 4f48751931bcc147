"""Puts the records of a batch into its output file and its error file, in the order of the input."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from ktqueue.batches.input import LineFault, parse_line
from ktqueue.batches.line_jobs import unfinished_record
from ktqueue.batches.stored.index import LineIndex
from ktqueue.batches.stored.lines import stored_lines
from ktqueue.batches.stored.segments import Segments
from ktqueue.core.codec import dumps_line
from ktqueue.storage.store import NotStored, Store, Writing

MAX_RECORDS_BYTES = 16 << 20  # records that are in memory at once, unless a single one is larger


@dataclass(frozen=True, slots=True)
class Merged:
    """Sizes of the files in bytes, 0 for a file that would be empty and is not made, and their numbers of lines."""

    output_bytes: int
    error_bytes: int
    answered: int
    failed: int


async def merge(
    store: Store,
    index: LineIndex,
    segments: Segments,
    *,
    source: str,
    output_name: str,
    errors_name: str,
    unfinished: str,
    record_name: str,
) -> Merged:
    """Write both files. The same segments give the same files, however often it is repeated.

    `source`, `output_name` and `errors_name` name the input and the two files. Lines without a record get one with the
    code `unfinished`, whose id begins with `record_name`. If the code is empty, they are left out.
    """
    has_errors = bool(segments.failed or (unfinished and segments.done < len(index)))
    answered = failed = 0
    async with AsyncExitStack() as stack:
        output: Writing | None = None
        errors: Writing | None = None
        if segments.answered:
            output = await stack.enter_async_context(store.create(output_name))
        if has_errors:
            errors = await stack.enter_async_context(store.create(errors_name))
        custom_ids = await stack.enter_async_context(aclosing(_custom_ids(store, source)))
        for places in _ranges(index, segments):
            records = await segments.read(place for place in places if segments.has(place))
            for place in places:
                if segments.is_answered(place):
                    assert output is not None
                    await output.write(records[place])
                    answered += 1
                elif segments.has(place):
                    assert errors is not None
                    await errors.write(records[place])
                    failed += 1
                elif unfinished and errors is not None:
                    number = index.number(place)
                    custom_id = await _custom_id_of(custom_ids, number)
                    record = unfinished_record(f"{record_name}-{number}", custom_id, unfinished)
                    await errors.write(dumps_line(record))
                    failed += 1
    output_bytes, error_bytes = (0 if writing is None else writing.size for writing in (output, errors))
    return Merged(output_bytes, error_bytes, answered, failed)


def _ranges(index: LineIndex, segments: Segments) -> list[range]:
    """All places in order, cut so that the records of a range fit in memory."""
    ranges, start, size = [], 0, 0
    for place in range(len(index)):
        length = segments.length(place)
        if size + length > MAX_RECORDS_BYTES and place > start:
            ranges.append(range(start, place))
            start, size = place, 0
        size += length
    return [*ranges, range(start, len(index))]


async def _custom_ids(store: Store, name: str) -> AsyncGenerator[tuple[int, str], None]:
    """Number and custom_id of each line of the input. They were checked before. None if the input was deleted."""
    try:
        async with aclosing(stored_lines(store, name)) as lines:
            async for raw in lines:
                try:
                    yield raw.number, parse_line("line", raw.number, raw.data).custom_id
                except LineFault as fault:
                    yield raw.number, fault.custom_id
    except NotStored:
        return


async def _custom_id_of(custom_ids: AsyncIterator[tuple[int, str]], number: int) -> str:
    """The custom_id of a line; the numbers that are asked for must grow."""
    async for found, custom_id in custom_ids:
        if found == number:
            return custom_id
    return f"line-{number}"
