"""How the chunks of a streamed answer become bytes: server-sent events with or without names, or lines of JSON."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ktqueue.core.codec import Json, dumps
from ktqueue.core.errors import ErrorInfo
from ktqueue.openai.errors import error_body


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The bytes of a stream. `chunk` takes a chunk and its id, which is None if the stream cannot be resumed.

    `ping` shows that the connection lives and means nothing; `end` comes last. `error_body` is the JSON of an error,
    also in an answer that is no stream.
    """

    media_type: str
    chunk: Callable[[Mapping[str, Any], int | str | None], bytes]
    ping: bytes
    end: bytes
    error_body: Callable[[ErrorInfo], Json]

    def error(self, info: ErrorInfo) -> bytes:
        """An error that occurs after the status line was sent."""
        return self.chunk(self.error_body(info), None)


def server_sent_event(value: Any, event_id: int | str | None = None, *, name: str = "") -> bytes:
    """One event with JSON data and, if given, an `event:` and an `id:`."""
    head = f"event: {name}\n" if name else ""
    if event_id is not None:
        head += f"id: {event_id}\n"
    return b"%bdata: %b\n\n" % (head.encode(), dumps(value))


def named_event(value: Mapping[str, Any], event_id: int | str | None = None) -> bytes:
    """One event with the name that its field `type` has."""
    return server_sent_event(value, event_id, name=str(value["type"]))


def json_line(value: Mapping[str, Any], event_id: int | str | None = None) -> bytes:
    """One line of JSON. It cannot have an id."""
    return dumps(value) + b"\n"


# Comments are ignored by every reader of server-sent events.
EVENTS = StreamFormat("text/event-stream", server_sent_event, b": ping\n\n", b"data: [DONE]\n\n", error_body)
