"""The input of a batch: one JSON object on each line, read one at a time. Errors name file and line.

A line is {"custom_id", "method": "POST", "url", "body"}, with a custom_id that is unique in the file (OpenAI API
reference, Batch, "request input object"). Or it is plain: a body with `prompt` or `messages`, and maybe a custom_id.
Without one, the line number names it, as in `line-7`.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from ktqueue.anthropic.endpoints import BATCH_ENDPOINTS
from ktqueue.batches.errors import BatchFault
from ktqueue.batches.id_set import IdSet
from ktqueue.core.codec import CodecError, loads
from ktqueue.openai.endpoints import CHAT, COMPLETIONS

# Keys that distinguish a batch line from a plain one.
ENVELOPE, PLAIN = {"method", "url", "body"}, {"prompt", "messages"}
MAX_LINE_BYTES = 32 << 20
MAX_CUSTOM_ID_LENGTH = 512  # characters
MAX_FAULTS_SHOWN = 10


class LineFault(BatchFault):
    """A line of the input is wrong. The message begins with file:line. `custom_id` is the line's, if it is valid.

    `reason`: the message without its beginning. `kind`: the code of such a fault in OpenAI's batches.
    """

    def __init__(
        self,
        source: Path | str,
        number: int,
        reason: str,
        *,
        kind: str = "invalid_request",
        param: str | None = None,
        custom_id: str | None = None,
    ) -> None:
        super().__init__(f"{source}:{number}: {reason}", param=param)
        self.number = number
        self.reason = reason
        self.kind = kind
        self.custom_id = custom_id or line_id(number)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch file. `number` is its line number, from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(slots=True)
class Survey:
    """Facts about a whole input file. `models` maps each model to the first line that names it.

    `modelless`: number of the first line without a model.
    """

    lines: int = 0
    modelless: int | None = None
    ids: IdSet = field(default_factory=IdSet)
    models: dict[str, int] = field(default_factory=dict)


def line_id(number: int) -> str:
    """The custom_id of a line without one."""
    return f"line-{number}"


def read_lines(path: Path) -> Iterator[BatchLine]:
    """The lines in order, without blank lines. Raises LineFault, OSError."""
    for line in attempt_lines(path):
        if isinstance(line, LineFault):
            raise line
        yield line


def attempt_lines(path: Path, *, url: str | None = None) -> Iterator[BatchLine | LineFault]:
    """Each line that is not blank, or its fault. A custom_id that was used before is a fault too. Raises OSError.

    `url`: that of all lines, none of which may be plain.
    """
    ids = IdSet()
    for line in _attempts(path, url):
        if ids.add(line.custom_id):
            yield line
            continue
        reason = line.reason if isinstance(line, LineFault) else f"custom_id {line.custom_id!r} was used before"
        fault = LineFault(path, line.number, reason)
        ids.add(fault.custom_id)
        yield fault


def survey(path: Path, *, model: str | None, url: str | None = None, skip_invalid: bool = False) -> Survey:
    """Read the whole file, check every line, and check that custom_ids are unique. `model` replaces the lines' models.

    `url`: see `attempt_lines`.
    Raises BatchFault naming the first faulty lines, unless `skip_invalid`.
    """
    found = Survey()
    faults: list[str] = []
    for line in attempt_lines(path, url=url):
        found.lines += 1
        found.ids.add(line.custom_id)
        if isinstance(line, LineFault):
            if skip_invalid:
                continue
            faults.append(line.message)
            if len(faults) == MAX_FAULTS_SHOWN:
                faults.append(f"(the first {MAX_FAULTS_SHOWN} faults are shown)")
                break
            continue
        line_model = model or line.body.get("model")
        if isinstance(line_model, str):
            found.models.setdefault(line_model, line.number)
        elif line_model is None:
            found.modelless = found.modelless or line.number
    if faults:
        raise BatchFault("\n".join(faults))
    if not found.lines:
        raise BatchFault(f"{path}: has no lines")
    return found


def _attempts(path: Path, url: str | None) -> Iterator[BatchLine | LineFault]:
    """Each line that is not blank, or its fault."""
    urls = tuple(BATCH_ENDPOINTS) if url is None else (url,)
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if raw.strip():
                try:
                    yield parse_line(path, number, raw, urls=urls, plain_allowed=url is None)
                except LineFault as fault:
                    yield fault
            while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):  # skip the rest of a line that is too long
                raw = file.readline(MAX_LINE_BYTES + 1)


def parse_line(
    source: Path | str,
    number: int,
    raw: bytes,
    *,
    urls: Collection[str] = tuple(BATCH_ENDPOINTS),
    plain_allowed: bool = True,
) -> BatchLine:
    """Read one line of `source`. Raises LineFault."""
    custom_id: str | None = None

    def fault(reason: str, kind: str = "invalid_request", param: str | None = None) -> LineFault:
        return LineFault(source, number, reason, kind=kind, param=param, custom_id=custom_id)

    if len(raw) > MAX_LINE_BYTES:
        raise fault(f"longer than {MAX_LINE_BYTES >> 20} MiB", "line_too_long")
    try:
        value = loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise fault(f"not UTF-8: byte {error.start + 1}", "invalid_json_line") from error
    except CodecError as error:
        wrong = error.__cause__  # a place in the line, which it takes for a document
        reason = (
            f"not JSON: {wrong.msg}, at character {wrong.pos + 1}" if isinstance(wrong, JSONDecodeError) else str(error)
        )
        raise fault(reason, "invalid_json_line") from error
    if not isinstance(value, dict):
        raise fault("must be a JSON object", "invalid_json_line")
    is_plain = plain_allowed and not ENVELOPE & value.keys() and bool(PLAIN & value.keys())
    if not is_plain and not ENVELOPE & value.keys():
        plain = (
            ", or be a body with prompt or messages" if plain_allowed else "; plain lines are for `ktqueue batch run`"
        )
        raise fault(f"must have custom_id, method, url and body{plain}", "invalid_custom_id", "custom_id")
    name = value.get("custom_id", line_id(number) if is_plain else None)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_CUSTOM_ID_LENGTH:
        raise fault(
            f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_LENGTH} characters, got {name!r:.80}",
            "invalid_custom_id",
            "custom_id",
        )
    custom_id = name
    url: Any
    body: Any
    if is_plain:
        url = CHAT.path if "messages" in value else COMPLETIONS.path
        body = {name: field for name, field in value.items() if name != "custom_id"}
    else:
        method, url, body = value.get("method"), value.get("url"), value.get("body")
        if method != "POST":
            raise fault(f"method must be POST, got {method!r:.80}", "invalid_method", "method")
        if url not in urls:
            rule = "; a batch over HTTP has one url" if len(urls) == 1 else ""
            raise fault(f"url must be {' or '.join(urls)}, got {url!r:.80}{rule}", "invalid_url", "url")
        if not isinstance(body, dict):
            raise fault(f"body must be an object, got {body!r:.80}", "invalid_body", "body")
    if body.get("stream"):
        raise fault("body.stream must be false or absent in a batch", "unsupported_parameter", "body.stream")
    return BatchLine(number, custom_id, url, body)
