"""The broker's record of a job, as readers see it. Knows how the scripts lay it out, not how to fetch it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ktqueue.broker.limits import Standing
from ktqueue.core.codec import CodecError, decode_event, decode_request
from ktqueue.core.errors import ErrorInfo, InvalidRequest
from ktqueue.core.events import JobState, TokenEvent, Usage
from ktqueue.core.request import GenerationRequest, JobClass

MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job. Times are Unix seconds by the server's clock.

    `request` is None where this version cannot read it: see `readable_request`. It is a summary once `request_dropped`:
    its prompt, messages and tools are gone, which are kept for live and for failed jobs alone. `retried_as`: the job
    that a failed one was sent again as. `digest`: of the worker that has it, or that it has begun with; None of a job
    that has not.
    `position` is its place in its queue, from 1, while it is queued. `attempts` counts the workers that
    began it, those that gave it back aside. `usage` and `error` are those of its last event. `standing`, where `submit`
    made the job just now, is what its tenant has left.
    """

    id: str
    state: JobState
    model: str
    job_class: JobClass
    tenant: str
    created_at: float
    request: GenerationRequest | None
    digest: str | None = None
    fault: CodecError | InvalidRequest | None = None  # why there is no request
    started_at: float | None = None
    finished_at: float | None = None
    deadline: float | None = None
    attempts: int = 0
    worker_id: str | None = None
    position: int | None = None
    usage: Usage | None = None
    error: ErrorInfo | None = None
    cancel_requested: bool = False
    request_dropped: bool = False
    retried_as: str | None = None
    standing: Standing | None = None

    @property
    def priority(self) -> int | None:
        """Of its request: lower goes first."""
        return None if self.request is None else self.request.priority

    def readable_request(self) -> GenerationRequest:
        """The request. Raises NewerFormat where a newer version wrote it, CodecError where it is none."""
        if self.request is None:
            raise self.fault or CodecError(f"the request of job {self.id} cannot be read")
        return self.request


def decode_job(job_id: str, described: Sequence[object]) -> JobRecord:
    """The reply of the `job` script, [fields and values, place or None], as a record. What this version cannot read is
    left out."""
    flat, place = described
    assert isinstance(flat, list)
    values: dict[str, bytes] = {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}
    last: TokenEvent | None = None
    with suppress(CodecError):
        last = decode_event(0, values["end"]) if "end" in values else None
    request, fault = None, None
    try:
        request = decode_request(values["request"])
    except (CodecError, InvalidRequest) as error:
        fault = error
    return JobRecord(
        id=job_id,
        state=JobState(values["state"].decode()),
        model=values["model"].decode(),
        job_class=JobClass(values["class"].decode()),
        tenant=values["tenant"].decode(),
        created_at=int(values["order"]) / MICROSECONDS,
        request=request,
        fault=fault,
        digest=values["digest"].decode() if "digest" in values else None,
        started_at=_seconds(values.get("started")),
        finished_at=_seconds(values.get("finished")),
        deadline=_seconds(values.get("deadline")),
        attempts=int(values["attempts"]),
        worker_id=values["worker"].decode() if "worker" in values else None,
        position=int(str(place)) + 1 if place is not None else None,
        usage=last.usage if last else None,
        error=last.error if last else None,
        cancel_requested="cancel" in values,
        request_dropped="dropped" in values,
        retried_as=values["retried"].decode() if "retried" in values else None,
    )


def _seconds(microseconds: bytes | None) -> float | None:
    return None if microseconds is None else int(microseconds) / MICROSECONDS
