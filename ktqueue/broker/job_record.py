"""The broker's record of a job. Decodes the scripts' replies, but does not call them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ktqueue.broker.limits import TenantUsage
from ktqueue.core.codec import CodecError, decode_event, decode_request, reading
from ktqueue.core.errors import ErrorInfo, InvalidRequest, JobNotFound
from ktqueue.core.events import JobState, TokenEvent, Usage
from ktqueue.core.request import GenerationRequest, JobClass

MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job. Times are Unix seconds by the server's clock.

    request: None if this version cannot read it (see `readable_request`). Once `request_dropped`, only a summary
    without prompt, messages and tools: these are kept for live and failed jobs only.
    retried_as: id of the job that repeats this failed one.
    digest: model digest of the job's worker, or of the worker that started it; None before that.
    position: place in its queue, from 1, while it is queued.
    attempts: number of workers that started the job and did not hand it back.
    usage, error: from its last event.
    tenant_usage: what the tenant has left; only set by the `submit` that made the job.
    """

    id: str
    state: JobState
    model: str
    job_class: JobClass
    tenant: str
    created_at: float
    request: GenerationRequest | None
    digest: str | None = None
    fault: CodecError | InvalidRequest | None = None  # why `request` is None
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
    tenant_usage: TenantUsage | None = None

    @property
    def priority(self) -> int | None:
        """Priority of its request; lower goes first."""
        return None if self.request is None else self.request.priority

    def readable_request(self) -> GenerationRequest:
        """The request. Raises NewerFormat if a newer version wrote it, CodecError if it is damaged."""
        if self.request is None:
            raise self.fault or CodecError(f"the request of job {self.id} cannot be read")
        return self.request


def decode_job(job_id: str, described: Sequence[object]) -> JobRecord:
    """Decode a job in a script's reply: [fields and values, place or None].

    A request or an end that this version cannot read is left out. Raises CodecError for anything else.
    """
    with reading(f"job {job_id}"):
        return _decode(job_id, described)


def _decode(job_id: str, described: Sequence[object]) -> JobRecord:
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


def job_not_found(job_id: str) -> JobNotFound:
    """The error for an unknown job, or one that the caller may not see."""
    return JobNotFound(f"no job {job_id[:80]!r}: never submitted, or its record has expired", param="job_id")
