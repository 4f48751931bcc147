"""POST /v1/batches: its body, and the batch object. Source: OpenAI's API reference, Batch."""

import re
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ktqueue.broker.batches import BatchRecord, BatchRequest, BatchStatus
from ktqueue.core.codec import Json
from ktqueue.core.errors import InvalidRequest
from ktqueue.openai.common_fields import Metadata
from ktqueue.openai.validation import StrictBody, must_be

SHORTEST_WINDOW, LONGEST_WINDOW = 1, 14 * 86_400  # seconds
_WINDOW = re.compile(r"([0-9]{1,7})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def _window(value: Any) -> Any:
    match = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    if match is None or not SHORTEST_WINDOW <= int(match[1]) * _UNITS[match[2]] <= LONGEST_WINDOW:
        raise must_be("a time from 1s to 14d, such as 24h", value)
    return value


class OutputExpiresAfter(StrictBody):
    """When the output files expire: `seconds` after their creation."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3_600, le=2_592_000)


class BatchBody(StrictBody):
    """The body of POST /v1/batches."""

    input_file_id: str = Field(min_length=1, max_length=64)
    endpoint: str
    completion_window: Annotated[str, BeforeValidator(_window)] = Field(pattern=r"^[0-9]{1,7}[smhd]$")
    metadata: Metadata = None
    output_expires_after: OutputExpiresAfter | None = None

    def request(self, endpoints: tuple[str, ...]) -> BatchRequest:
        """What the client asks for. `endpoints`: those that batches may use. Raises InvalidRequest."""
        if self.endpoint not in endpoints:
            known = ", ".join(endpoints)
            raise InvalidRequest(
                f"endpoint must be one of {known}, got {self.endpoint!r:.80}",
                param="endpoint",
                limit=known,
                value=self.endpoint[:80],
            )
        return BatchRequest(
            input_file_id=self.input_file_id,
            endpoint=self.endpoint,
            completion_window=self.completion_window,
            metadata=self.metadata,
            output_seconds=None if self.output_expires_after is None else self.output_expires_after.seconds,
        )

    @property
    def window_seconds(self) -> int:
        """The completion window in seconds."""
        return int(self.completion_window[:-1]) * _UNITS[self.completion_window[-1]]


def batch_json(record: BatchRecord) -> Json:
    """The batch object. Null is what OpenAI's examples have as null; other fields are left out while there are none.

    `progress` is ours: it is there while the batch runs, and its numbers are null until known.
    """
    request, facts, usage = record.request, record.facts, record.facts.usage
    times: Json = {f"{status}_at": None for status in BatchStatus if status is not BatchStatus.VALIDATING}
    times |= {f"{status}_at": int(seconds) for status, seconds in record.times.items()}
    errors = {"object": "list", "data": [dict(error) for error in facts.errors]} if facts.errors else None
    more: Json = {} if facts.model is None else {"model": facts.model}
    if record.status is BatchStatus.IN_PROGRESS:
        more["progress"] = asdict(record.speed)
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": request.endpoint,
        "errors": errors,
        "input_file_id": request.input_file_id,
        "completion_window": request.completion_window,
        "status": record.status,
        "output_file_id": facts.output_file_id,
        "error_file_id": facts.error_file_id,
        "created_at": int(record.created_at),
        "expires_at": int(record.expires_at),
        **times,
        "request_counts": {"total": facts.total, "completed": facts.answered, "failed": facts.failed},
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        },
        "metadata": None if request.metadata is None else dict(request.metadata),
        **more,
    }
