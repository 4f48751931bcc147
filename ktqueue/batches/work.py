"""One batch line to generation requests, and their events to the line's record in the output. Pure.

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
from ktqueue.core.request import JobClass
from ktqueue.openai.choices import Choices
from ktqueue.openai.endpoints import ENDPOINTS
from ktqueue.openai.errors import error_body, failure, status_of

EXPIRED_MESSAGE = "This request could not be executed before the completion window expired."


class Work:
    """What one line asks for. `requests` has one for each of its prompts."""

    def __init__(self, line: BatchLine, run: str, *, model: str | None, job_class: JobClass) -> None:
        """`run` names the batch run, `model` stands in for the line's own. Raises InvalidRequest."""
        self.custom_id = line.custom_id
        self.id = work_id(line, run, model)
        self._endpoint = ENDPOINTS[line.url]
        requests = self._endpoint.parse(_body(line, model)).requests()
        self.requests = tuple(replace(request, job_class=job_class) for request in requests)

    def job_id(self, place: int, attempt: int = 0) -> str:
        """The name of the job of one prompt: the same in each try of the run, so that its job is found again."""
        again = f"-r{attempt}" if attempt else ""
        return f"{self.id}-{place}{again}"

    def answer(self, events: Sequence[tuple[int, TokenEvent]], created: int) -> dict[str, Any]:
        """The record of a line whose jobs are done. `events` are (place of the prompt, event)."""
        first = self.requests[0]
        reply = self._endpoint.reply_to(first, self.id, created)
        choices = Choices(len(self.requests), first.sampling.n)
        whole = choices.whole(events)
        return record(self.id, self.custom_id, 200, reply.whole(whole, choices.usage()))


def work_id(line: BatchLine, run: str, model: str | None) -> str:
    """A line's name in its run; another body, or model, under the same custom_id has another name."""
    digest = blake2b(dumps([line.custom_id, line.url, _body(line, model)]), digest_size=8)
    return f"batch-{run}-{digest.hexdigest()}"


def _body(line: BatchLine, model: str | None) -> dict[str, Any]:
    return line.body if model is None else {**line.body, "model": model}


def record(name: str, custom_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """A record with an HTTP response, good or bad."""
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": None}


def failure_record(name: str, custom_id: str, info: ErrorInfo) -> dict[str, Any]:
    """The record of a line that failed. An expired job has no HTTP response, as in OpenAI's batches."""
    if info.code == DeadlineExceeded.code:
        error = {"code": "batch_expired", "message": EXPIRED_MESSAGE}
        return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": None, "error": error}
    return record(name, custom_id, status_of(info), error_body(info))


def failed(event: TokenEvent) -> ErrorInfo | None:
    """The error with which a job ended, None if it is done or goes on."""
    fault = failure(event)
    return fault.info() if fault is not None else None
