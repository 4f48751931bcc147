"""Jobs from the client's side: submit, look up, cancel, list, depth. Knows nothing of who runs them."""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ktqueue.broker.job_record import MICROSECONDS, JobRecord, decode_job
from ktqueue.broker.limits import NO_COST, Cost, check_size, limit_error, limit_words, standing
from ktqueue.broker.models import RETRY_NO_WORKER, Models, model_not_found
from ktqueue.broker.prefix_hashes import prefix_names
from ktqueue.broker.scripts import Refused, Scripts
from ktqueue.broker.terminal_events import Terminal, microseconds, milliseconds
from ktqueue.core.codec import encode_request
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import (
    IdempotencyConflict,
    InvalidRequest,
    JobConflict,
    JobNotFound,
    KtqueueError,
    QueueFull,
    RequestTooLarge,
    Unavailable,
)
from ktqueue.core.events import JobState
from ktqueue.core.limits import TenantLimits
from ktqueue.core.request import GenerationRequest, JobClass, summary_of
from ktqueue.core.tenants import DEFAULT_TENANT

__all__ = ["BoundJobs", "JobRecord", "Jobs", "QueueDepth", "TenantLoad", "not_found"]

MAX_LISTED = 1_000
MAX_LISTED_BYTES = 16 << 20  # of requests in one listing
RETRY_AFTER = {JobClass.INTERACTIVE: 2.0, JobClass.BATCH: 30.0}  # seconds, when the queue is full
RETRY_NO_MEMORY = 5.0  # seconds

_JOB_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_RETRIED = re.compile(r"(.+)-r(\d{1,9})")
LONGEST_NAME = 116  # characters of an id that gets a number behind it


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Jobs of one model: waiting by class, and running.

    `batch_running` of the running ones are of the batch class. Waits are seconds that the oldest waiting job of a class
    has waited, by the server's clock; None where none waits. It is sought among the hundred that are first in line.
    """

    model: str
    interactive: int
    batch: int
    running: int
    batch_running: int = 0
    interactive_wait: float | None = field(default=None, compare=False)
    batch_wait: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundJobs:
    """Waiting jobs of one model that only workers with this digest (None: any) can take, and that read this format.

    `unserved`: seconds since there was such a worker, or no other one either.
    """

    model: str
    format: int
    digest: str | None
    interactive: int
    batch: int
    unserved: float


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """Jobs of a tenant that count for its limits: waiting and running ones, waiting ones and the bytes of these.

    `stored_bytes`: what all of its jobs hold in Redis, ended ones too until they are forgotten.
    """

    tenant: str
    live: int
    queued: int
    queued_bytes: int
    stored_bytes: int = field(default=0, compare=False)


JobRecords = list[JobRecord]  # inside Jobs, `list` is a method
QueueDepths = list[QueueDepth]


class Jobs:
    """All jobs of an installation. Every call raises Unavailable when Redis is away."""

    def __init__(self, scripts: Scripts, config: BrokerConfig) -> None:
        self._scripts = scripts
        self._config = config
        self._models = Models(scripts)
        self._terminal = Terminal.of(config)

    async def submit(
        self,
        request: GenerationRequest,
        *,
        job_id: str | None = None,
        idempotency_key: str | None = None,
        tenant: str = DEFAULT_TENANT,
        limits: TenantLimits | None = None,
    ) -> JobRecord:
        """Put a job into its queue. Once this has returned, the job ends in exactly one terminal state.

        The same `job_id`, or the same `idempotency_key` of a tenant, returns the job that is there already.
        A request without a seed is given one, so that a resumed job repeats its noise.

        With `limits`, even where all of them are None, the job counts among its tenant's, and reserves tokens until
        its end tells how many it took. A submission sent twice counts once.

        Raises ModelNotFound; Unavailable while no model is known; QueueFull; TenantLimitReached; RateLimitExceeded;
        RequestTooLarge; IdempotencyConflict when the id or key was used with another request; JobConflict when the
        key's job has been forgotten.
        """
        body = encode_request(request)
        if len(body) > self._config.max_request_bytes:
            raise RequestTooLarge(
                f"the request has {len(body)} bytes, at most {self._config.max_request_bytes} are allowed",
                limit=self._config.max_request_bytes,
                value=len(body),
            )
        job_id = f"job-{secrets.token_hex(12)}" if job_id is None else _checked(job_id)
        stored, stored_body = request, body
        if request.sampling.seed is None:
            stored = request.with_seed(secrets.randbits(63))
            stored_body = encode_request(stored)
        cost = NO_COST
        if limits is not None:
            cost = Cost.of(request)
            check_size(limits, cost, len(stored_body))
        cap = {
            JobClass.INTERACTIVE: self._config.max_queued_interactive,
            JobClass.BATCH: self._config.max_queued_batch,
        }[request.job_class]
        try:
            reply = await self._scripts.call(
                "submit_job",
                job_id,
                request.model,
                request.job_class.value,
                tenant,
                stored_body,
                hashlib.sha256(body).hexdigest(),
                "" if request.expires_in is None else microseconds(request.expires_in),
                "" if idempotency_key is None else digest(tenant, idempotency_key),
                milliseconds(self._config.idempotency_ttl),
                cap,
                round(request.priority * self._config.priority_seconds * MICROSECONDS),
                request.sampling.n,
                self._config.max_queued_bytes,
                limit_words(limits, cost),
                "" if request.webhook is None else 1,
                " ".join(prefix_names(request)),
                encode_request(summary_of(stored)),
                f"{round(self._config.memory_share * 1000)} {round(self._config.tenant_memory_share * 1000)}",
            )
        except Refused as refused:
            if refused.code == "MODEL_UNKNOWN":
                raise model_not_found(request.model, await self._models.cards()) from refused
            error = limit_error(refused, cost, RETRY_AFTER[request.job_class])
            raise error or _submit_error(refused, request, cap) from refused
        if reply[0] == 0:
            return decode_job(reply[1].decode(), reply[2])
        created_at = int(reply[1]) / MICROSECONDS
        worker = reply[2].decode() if isinstance(reply[2], bytes) else None
        return JobRecord(
            id=job_id,
            state=JobState.QUEUED if worker is None else JobState.RUNNING,
            model=request.model,
            job_class=request.job_class,
            tenant=tenant,
            created_at=created_at,
            deadline=None if request.expires_in is None else created_at + request.expires_in,
            started_at=None if worker is None else created_at,
            attempts=0 if worker is None else 1,
            worker_id=worker,
            position=reply[2] + 1 if worker is None else None,
            request=stored,
            standing=standing(limits, reply[3:]),
        )

    async def get(self, job_id: str) -> JobRecord:
        """One job. Raises JobNotFound."""
        return _found(job_id, await self._scripts.call("get_job", job_id))

    async def cancel(self, job_id: str) -> JobRecord:
        """Stop a job: a queued one ends at once, a running one within a step, an ended one stays as it is.

        Raises JobNotFound.
        """
        terminal = self._terminal
        reply = await self._scripts.call(
            "cancel_job", job_id, terminal.cancelled, terminal.job_ttl, terminal.journal_ttl
        )
        return _found(job_id, reply)

    async def retry(self, job_id: str, *, limits: TenantLimits | None = None) -> JobRecord:
        """Send a failed job again as a new job of the same tenant, which begins from the start. Returns the new job.

        A job is sent again once: another call returns the same new job, while that is known. `limits` as in `submit`.

        Raises JobNotFound; JobConflict where the job has not failed or its request is no longer kept; what `submit`
        raises.
        """
        record = await self.get(job_id)
        if record.retried_as is not None:
            return await self.get(record.retried_as)
        if record.state is not JobState.FAILED:
            raise JobConflict(
                f"the job {job_id} is {record.state}: only failed jobs are sent again",
                param="job_id",
                limit="a failed job",
                value=record.state.value,
            )
        if record.request_dropped:
            raise JobConflict(
                f"the request of job {job_id} is no longer kept: submit it again",
                param="job_id",
                limit="a failed job with its request",
                value=job_id,
            )
        # The id follows from the old one, so that a call that is repeated makes no second job.
        request = record.readable_request()
        again = await self.submit(request, job_id=_next_id(job_id), tenant=record.tenant, limits=limits)
        await self._scripts.call("mark_retried", job_id, again.id)
        return again

    async def list(
        self,
        *,
        state: JobState | None = None,
        limit: int = 100,
        tenant: str | None = None,
        job_class: JobClass | None = None,
        model: str | None = None,
    ) -> JobRecords:
        """Live jobs, then ended ones, newest first; fewer than `limit` where the requests are big.

        Those of one tenant, class or model, or of all. Looks at 2,000 live and 2,000 ended jobs, whosesoever they are.
        A request that another version wrote and this one cannot decode is None.
        """
        reply = await self._scripts.call(
            "list_jobs",
            min(limit, MAX_LISTED),
            state or "",
            MAX_LISTED_BYTES,
            tenant or "",
            job_class or "",
            model or "",
        )
        return [decode_job(job_id.decode(), described) for job_id, described in reply]

    async def depth(self) -> QueueDepths:
        """How much waits and runs, by model, for every model that is known or has jobs."""
        by_model: dict[str, dict[JobClass, tuple[int, int, float | None]]] = {}
        for model, job_class, waiting, running, wait in await self._scripts.call("queue_depths"):
            seconds = None if wait is None else wait / MICROSECONDS
            by_model.setdefault(model.decode(), {})[JobClass(job_class.decode())] = (waiting, running, seconds)
        return [_depth(model, by_model[model]) for model in sorted(by_model)]

    async def bound(self) -> Sequence[BoundJobs]:
        """Waiting jobs that only some workers of their model can take: 64 groups at most, longest unserved first."""
        reply = await self._scripts.call("bound_jobs")
        return [
            BoundJobs(
                model=model.decode(),
                format=form,
                digest=None if digest == b"-" else digest.decode(),
                interactive=interactive,
                batch=batch,
                unserved=unserved / MICROSECONDS,
            )
            for model, form, digest, interactive, batch, unserved in reply
        ]

    async def tenant_loads(self, tenants: Sequence[str]) -> Sequence[TenantLoad]:
        """What these tenants have in work."""
        reply = await self._scripts.call("tenant_loads", *tenants)
        return [TenantLoad(name, *numbers) for name, numbers in zip(tenants, reply, strict=True)]


def _depth(model: str, counts: Mapping[JobClass, tuple[int, int, float | None]]) -> QueueDepth:
    interactive, batch = counts[JobClass.INTERACTIVE], counts[JobClass.BATCH]
    return QueueDepth(
        model,
        interactive[0],
        batch[0],
        interactive[1] + batch[1],
        batch_running=batch[1],
        interactive_wait=interactive[2],
        batch_wait=batch[2],
    )


def _checked(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise InvalidRequest(
            f"job_id must be 1 to 128 letters, digits or _ . : -, got {job_id[:80]!r}",
            param="job_id",
            limit="1 to 128 letters, digits or _ . : -",
            value=job_id[:80],
        )
    return job_id


def _next_id(job_id: str) -> str:
    """The id of a job's next try: `job-1`, `job-1-r2`, `job-1-r3`."""
    match = _RETRIED.fullmatch(job_id)
    name, number = (match[1], int(match[2]) + 1) if match else (job_id, 2)
    if len(name) > LONGEST_NAME:
        name = f"job-{hashlib.sha256(name.encode()).hexdigest()[:24]}"
    return f"{name}-r{number}"


def digest(tenant: str, key: str) -> str:
    """A tenant's own word as a part of a key: another tenant's is another one."""
    return hashlib.sha256(f"{len(tenant)}:{tenant}{key}".encode()).hexdigest()


def _found(job_id: str, reply: Sequence[object] | None) -> JobRecord:
    if reply is None:
        raise not_found(job_id)
    return decode_job(job_id, reply)


def not_found(job_id: str) -> JobNotFound:
    """The error for an id that names no job, or none that the caller may see."""
    return JobNotFound(f"no job {job_id[:80]!r}: never submitted, or its record has expired", param="job_id")


def _submit_error(refused: Refused, request: GenerationRequest, cap: int) -> KtqueueError:
    match refused.code:
        case "QUEUE_BYTES":
            waiting, limit = (int(word) for word in refused.detail.split())
            return QueueFull(
                f"requests of {waiting} bytes wait, at most {limit} may",
                limit=limit,
                value=waiting,
                retry_after=RETRY_AFTER[request.job_class],
            )
        case "MEMORY":
            used, limit = (int(word) for word in refused.detail.split())
            return Unavailable(
                f"Redis uses {used} bytes of memory, new jobs may take it to {limit}",
                limit=limit,
                value=used,
                retry_after=RETRY_NO_MEMORY,
            )
        case "CONFLICT":
            return IdempotencyConflict(f"job {refused.detail} was submitted under this key with another request")
        case "GONE":
            return JobConflict(f"job {refused.detail} of this idempotency key has ended and its record has expired")
        case "NO_MODELS":
            return Unavailable("no worker serves any model yet", retry_after=RETRY_NO_WORKER)
        case "QUEUE_FULL":
            return QueueFull(
                f"{refused.detail} {request.job_class} jobs of {request.model!r} wait, at most {cap} may",
                limit=cap,
                value=int(refused.detail),
                retry_after=RETRY_AFTER[request.job_class],
            )
    raise refused
