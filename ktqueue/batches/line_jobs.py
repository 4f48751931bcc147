"""Translates a batch line to the requests of its jobs, and their events to its output record.

`ktqueue.openai` makes the bodies, so a batch answers exactly as HTTP does.
A record: {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": {"code", "message"}}, where
response or error is null (OpenAI API reference, Batch, "request output object").
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from ktqueue.anthropic.endpoints import BATCH_ENDPOINTS
from ktqueue.batches.input import BatchLine
from ktqueue.core.codec import dumps
from ktqueue.core.errors import DeadlineExceeded, ErrorInfo
from ktqueue.core.events import TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import JobClass
from ktqueue.openai.choices import Choices
from ktqueue.openai.client_names import rename
from ktqueue.openai.errors import error_body, failure, status_of

UNFINISHED = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "The batch was cancelled before this request was executed.",
    "batch_failed": "The batch failed before this request was executed.",
}
"""Codes and messages of lines that were not run to their end."""


class LineJobs:
    """The jobs of one line: `requests` has one for each of its prompts."""

    def __init__(
        self, line: BatchLine, name: str, *, model: str | None, card: ModelCard | None, job_class: JobClass
    ) -> None:
        """`name`: the id of the line's request. `model` replaces the line's model, whose card is `card` if it is known.

        Raises InvalidRequest.
        """
        self.custom_id = line.custom_id
        self.id = name
        self._digest = card.digest if card else ""
        self._parsed = BATCH_ENDPOINTS[line.url].parse(_body(line, model), card)
        self.requests = tuple(replace(request, job_class=job_class) for request in self._parsed.requests)

    def answer(self, events: Sequence[tuple[int, TokenEvent]], created: int) -> tuple[dict[str, Any], Usage]:
        """The output record of a line whose jobs are done, and its tokens. `events`: (place of the prompt, event)."""
        first = self.requests[0]
        reply = self._parsed.reply(self.id, created, self._digest)
        choices = Choices(len(self.requests), first)
        whole = choices.whole(events)
        usage = choices.usage()
        return response_record(self.id, self.custom_id, 200, reply.whole(whole, usage)), usage

    def failure(self, place: int, event: TokenEvent) -> ErrorInfo | None:
        """The error of the last event of a prompt's job that failed, else None. `place`: of the prompt."""
        fault = failure(event)
        if fault is None:
            return None
        rename(fault, self._parsed.names(self.requests[place]))
        return fault.info()


def job_id(name: str, place: int, attempt: int = 0) -> str:
    """The id of one prompt's job. It is the same when the run is resumed, so that the job is found again."""
    suffix = f"-r{attempt}" if attempt else ""
    return f"{name}-{place}{suffix}"


def request_id(line: BatchLine, run: str, model: str | None) -> str:
    """The id of a line's request in its run. It depends on the custom_id, the URL, the body and the model."""
    digest = blake2b(dumps([line.custom_id, line.url, _body(line, model)]), digest_size=8)
    return f"batch-{run}-{digest.hexdigest()}"


def _body(line: BatchLine, model: str | None) -> dict[str, Any]:
    return line.body if model is None else {**line.body, "model": model}


def response_record(record_id: str, custom_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """A record with an HTTP response, of any status."""
    response = {"status_code": status, "request_id": record_id, "body": body}
    return {"id": f"batch_req_{record_id}", "custom_id": custom_id, "response": response, "error": None}


def failure_record(record_id: str, custom_id: str, info: ErrorInfo, url: str | None = None) -> dict[str, Any]:
    """The record of a line that failed, in the form of its endpoint.

    An expired job has no HTTP response, as in OpenAI's batches.
    """
    if info.code == DeadlineExceeded.code:
        return unfinished_record(record_id, custom_id, "batch_expired")
    body_of = error_body if url is None else BATCH_ENDPOINTS[url].error_body
    return response_record(record_id, custom_id, status_of(info), body_of(info))


def unfinished_record(record_id: str, custom_id: str, code: str) -> dict[str, Any]:
    """The record of a line that was not run to its end. `code`: a key of UNFINISHED."""
    error = {"code": code, "message": UNFINISHED[code]}
    return {"id": f"batch_req_{record_id}", "custom_id": custom_id, "response": None, "error": error}
