"""Translates a batch line to the requests of its jobs, and their events to its output record.

`ktqueue.openai` makes the bodies, so a batch answers exactly as HTTP does.
A record: {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": {"code", "message"}}, where
response or error is null (OpenAI API reference, Batch, "request output object").
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from ktqueue.batches.input import BatchLine
from ktqueue.core.codec import dumps
from ktqueue.core.errors import DeadlineExceeded, ErrorInfo
from ktqueue.core.events import TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import JobClass
from ktqueue.openai.choices import Choices
from ktqueue.openai.client_names import rename
from ktqueue.openai.endpoints import ENDPOINTS
from ktqueue.openai.errors import error_body, failure, status_of

EXPIRED_MESSAGE = "This request could not be executed before the completion window expired."


class LineJobs:
    """The jobs of one line: `requests` has one for each of its prompts."""

    def __init__(
        self, line: BatchLine, run: str, *, model: str | None, card: ModelCard | None, job_class: JobClass
    ) -> None:
        """`run` names the batch run; `model` replaces the line's model, whose card is `card` if it is known.

        Raises InvalidRequest.
        """
        self.custom_id = line.custom_id
        self.id = request_id(line, run, model)
        self._endpoint = ENDPOINTS[line.url]
        self._digest = card.digest if card else ""
        requests = self._endpoint.parse(_body(line, model)).requests(card)
        self.requests = tuple(replace(request, job_class=job_class) for request in requests)

    def job_id(self, place: int, attempt: int = 0) -> str:
        """The id of one prompt's job. It is the same when the run is resumed, so that the job is found again."""
        suffix = f"-r{attempt}" if attempt else ""
        return f"{self.id}-{place}{suffix}"

    def answer(self, events: Sequence[tuple[int, TokenEvent]], created: int) -> dict[str, Any]:
        """The output record of a line whose jobs are done. `events` are (place of the prompt, event)."""
        first = self.requests[0]
        reply = self._endpoint.reply_to(first, self.id, created, self._digest)
        choices = Choices(len(self.requests), first)
        whole = choices.whole(events)
        return response_record(self.id, self.custom_id, 200, reply.whole(whole, choices.usage()))

    def failure(self, place: int, event: TokenEvent) -> ErrorInfo | None:
        """The error of the last event of a prompt's job that failed, else None. `place`: of the prompt."""
        fault = failure(event)
        if fault is None:
            return None
        rename(fault, self._endpoint.names_in(self.requests[place]))
        return fault.info()


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


def failure_record(record_id: str, custom_id: str, info: ErrorInfo) -> dict[str, Any]:
    """The record of a line that failed. An expired job has no HTTP response, as in OpenAI's batches."""
    if info.code == DeadlineExceeded.code:
        error = {"code": "batch_expired", "message": EXPIRED_MESSAGE}
        return {"id": f"batch_req_{record_id}", "custom_id": custom_id, "response": None, "error": error}
    return response_record(record_id, custom_id, status_of(info), error_body(info))
