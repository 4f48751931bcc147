"""The input of a batch: OpenAI batch lines, one JSON object a line. Reads them one at a time, names what is wrong.

Line format: {"custom_id", "method": "POST", "url", "body"}; custom_ids are unique in a file.
(OpenAI API reference, Batch, "request input object".)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktqueue.batches.faults import BatchFault
from ktqueue.batches.id_set import IdSet
from ktqueue.core.codec import CodecError, loads

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
URLS = (CHAT_URL, COMPLETIONS_URL)
MAX_LINE_BYTES = 32 << 20
MAX_CUSTOM_ID_LENGTH = 512  # characters
MAX_FAULTS_SHOWN = 10


class LineFault(BatchFault):
    """One line of the input is wrong; the message begins with file:line."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch file. `number` counts lines from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(slots=True)
class Survey:
    """What a whole input file holds. `models` maps each model asked for to the first line that does."""

    lines: int = 0
    ids: IdSet = field(default_factory=IdSet)
    models: dict[str, int] = field(default_factory=dict)


def read_lines(path: Path) -> Iterator[BatchLine]:
    """The lines in order, blank ones left out. Raises LineFault, OSError."""
    for line in _attempts(path):
        if isinstance(line, LineFault):
            raise line
        yield line


def survey(path: Path, *, model: str | None) -> Survey:
    """Read the whole file and check every line and that custom_ids are unique. `model` stands in for the lines' own.

    Raises BatchFault naming the first faulty lines.
    """
    found = Survey()
    faults: list[str] = []
    for line in _attempts(path):
        if isinstance(line, BatchLine) and not found.ids.add(line.custom_id):
            line = LineFault(f"{path}:{line.number}: custom_id {line.custom_id!r} was used before")
        found.lines += 1
        if isinstance(line, LineFault):
            faults.append(line.message)
            if len(faults) == MAX_FAULTS_SHOWN:
                faults.append(f"(the first {MAX_FAULTS_SHOWN} faults are shown)")
                break
            continue
        name = model or line.body.get("model")
        if isinstance(name, str):
            found.models.setdefault(name, line.number)
    if faults:
        raise BatchFault("\n".join(faults))
    if not found.lines:
        raise BatchFault(f"{path}: holds no lines")
    return found


def _attempts(path: Path) -> Iterator[BatchLine | LineFault]:
    """Each line that is not blank, parsed or at fault."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if raw.strip():
                try:
                    yield _parse(path, number, raw)
                except LineFault as fault:
                    yield fault
                    if len(raw) > MAX_LINE_BYTES:
                        return


def _parse(path: Path, number: int, raw: bytes) -> BatchLine:
    def fault(text: str) -> LineFault:
        return LineFault(f"{path}:{number}: {text}")

    if len(raw) > MAX_LINE_BYTES:
        raise fault(f"longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        value = loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise fault(f"not UTF-8: byte {error.start + 1}") from error
    except CodecError as error:
        raise fault(error.message) from error
    if not isinstance(value, dict):
        raise fault("must be a JSON object")
    custom_id, method, url, body = (value.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_LENGTH:
        raise fault(f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_LENGTH} characters, got {custom_id!r:.80}")
    if method != "POST":
        raise fault(f"method must be POST, got {method!r:.80}")
    if url not in URLS:
        raise fault(f"url must be {' or '.join(URLS)}, got {url!r:.80}")
    if not isinstance(body, dict):
        raise fault(f"body must be an object, got {body!r:.80}")
    if body.get("stream"):
        raise fault("body.stream must be false or absent in a batch")
    return BatchLine(number, custom_id, url, body)
