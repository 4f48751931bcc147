"""The broker's record of a job, as readers see it. Knows how the scripts lay it out, not how to fetch it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ktqueue.broker.limits import Standing
from ktqueue.core.codec import decode_event, decode_request
from ktqueue.core.errors import ErrorInfo
from ktqueue.core.events import JobState, Usage
from ktqueue.core.request import GenerationRequest, JobClass

MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job. Times are Unix seconds by the server's clock.

    `position` is its place in its class's queue, from 1, while it is queued. `attempts` counts the workers that
    began it, those that gave it back aside. `request` is a summary once `request_dropped`: its prompt, messages and
    tools are gone, which only live and failed jobs keep. `retried_as`: the job that a failed one was sent again as.
    `usage` and `error` are those of its last event. `standing`, where `submit` made the job just now, is what its
    tenant has left.
    """

    id: str
    state: JobState
    model: str
    job_class: JobClass
    tenant: str
    created_at: float
    request: GenerationRequest
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
    def priority(self) -> int:
        """Of its request: lower goes first."""
        return self.request.priority


def decode_job(job_id: str, described: Sequence[object]) -> JobRecord:
    """The reply of the `job` script, [fields and values, place or None], as a record. Raises CodecError."""
    flat, place = described
    assert isinstance(flat, list)
    values: dict[str, bytes] = {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}
    last = decode_event(0, values["end"]) if "end" in values else None
    return JobRecord(
        id=job_id,
        state=JobState(values["state"].decode()),
        model=values["model"].decode(),
        job_class=JobClass(values["class"].decode()),
        tenant=values["tenant"].decode(),
        created_at=int(values["order"]) / MICROSECONDS,
        request=decode_request(values["request"]),
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
