"""Traces of real servers: when requests arrived, and the tokens of their prompts and answers.

Known are the columns of Azure's and BurstGPT's CSV files, and the fields of Mooncake's and Bailian's JSON lines.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from ktqueue.core.codec import CodecError, loads
from ktqueue.core.errors import InvalidRequest

# Names of columns and fields, in lower case and without spaces and underscores.
_INPUT = ("inputlength", "contexttokens", "requesttokens")
_OUTPUT = ("outputlength", "generatedtokens", "responsetokens")
MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16  # tokens of a block in `hash_ids`
MAX_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace, `seconds` after its first one. Prompts with an equal block id share that block."""

    seconds: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


def read_trace(path: Path, count: int) -> list[Arrival]:
    """Read the first `count` requests that have output. Raises InvalidRequest naming the line, OSError."""
    found: list[Arrival] = []
    began: float | None = None
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        for number, row in _rows(path, file):
            arrival = _arrival(f"{path}:{number}", row)
            if arrival.output_tokens < 1:  # a failed request
                continue
            began = arrival.seconds if began is None else began
            seconds, input_tokens = max(0.0, arrival.seconds - began), max(1, arrival.input_tokens)
            found.append(replace(arrival, seconds=seconds, input_tokens=input_tokens))
            if len(found) == count:
                break
    if not found:
        raise InvalidRequest(f"{path}: has no request with output")
    return found


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The lines of JSON, or the rows of CSV under its heads, with their numbers."""
    is_json = file.read(1) == "{"
    file.seek(0)
    if is_json:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    value = loads(line)
                except CodecError as error:
                    raise InvalidRequest(f"{path}:{number}: {error.message}") from error
                if not isinstance(value, dict):
                    raise InvalidRequest(f"{path}:{number}: must be an object")
                yield number, value
        return
    rows = csv.DictReader(file)
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise InvalidRequest(f"{path}:{rows.line_num}: {error}") from error


def _arrival(place: str, row: Mapping[Any, Any]) -> Arrival:
    fields = {str(name).lower().replace(" ", "").replace("_", ""): value for name, value in row.items()}
    is_bailian = "chatid" in fields
    return Arrival(
        # Mooncake counts milliseconds, all others seconds.
        _seconds(place, fields) / (1000 if "hashids" in fields and not is_bailian else 1),
        _tokens(place, fields, _INPUT),
        _tokens(place, fields, _OUTPUT),
        _blocks(place, fields),
        BAILIAN_BLOCK if is_bailian else MOONCAKE_BLOCK,
    )


def _seconds(place: str, fields: Mapping[str, Any]) -> float:
    value = str(fields.get("timestamp"))
    try:
        seconds = float(value)
    except ValueError:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError as error:
            message = f"{place}: timestamp must be a number or a date with a time, got {value!r}"
            raise InvalidRequest(message) from error
        seconds = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    if not math.isfinite(seconds):
        raise InvalidRequest(f"{place}: timestamp must be finite, got {value!r}")
    return seconds


def _tokens(place: str, fields: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = [name for name in names if name in fields]
    if not found:
        raise InvalidRequest(f"{place}: has none of the columns {', '.join(names)}")
    value = fields[found[0]]
    try:
        tokens = int(value)
    except (TypeError, ValueError):
        tokens = -1
    if tokens < 0:
        raise InvalidRequest(f"{place}: {found[0]} must be a number of tokens, got {value!r}")
    return tokens


def _blocks(place: str, fields: Mapping[str, Any]) -> tuple[int, ...]:
    value = fields.get("hashids", ())
    is_list = isinstance(value, list | tuple) and len(value) <= MAX_BLOCKS
    if not is_list or not all(isinstance(block, int) for block in value):
        raise InvalidRequest(f"{place}: hash_ids must be a list of at most {MAX_BLOCKS} integers")
    return tuple(value)
