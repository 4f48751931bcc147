"""Jobs from the client's side: submit, get, cancel, retry, list, count. Knows nothing of workers."""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ktqueue.broker.job_record import MICROSECONDS, JobRecord, decode_job, job_not_found
from ktqueue.broker.limits import Cost, check_size, limit_argument, limit_error, tenant_usage
from ktqueue.broker.models import RETRY_NO_WORKER, Models, find_card, model_not_found
from ktqueue.broker.prefix_hashes import prefix_hashes
from ktqueue.broker.scripts import ScriptRefused, Scripts
from ktqueue.broker.terminal_events import TerminalEvents, microseconds, milliseconds
from ktqueue.core.codec import CodecError, encode_request, named, request_hashes
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import (
    IdempotencyConflict,
    InvalidRequest,
    JobConflict,
    KtqueueError,
    QueueFull,
    RequestTooLarge,
    Unavailable,
)
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest, JobClass, summary_of
from ktqueue.core.tenants import DEFAULT_TENANT, TenantLimits

__all__ = ["BoundJobs", "JobRecord", "Jobs", "QueueDepth", "TenantLoad"]

MAX_LISTED = 1_000
MAX_FORGOTTEN = 128  # jobs that one call deletes
MAX_LISTED_BYTES = 16 << 20  # bytes of requests in one listing
RETRY_AFTER = {JobClass.INTERACTIVE: 2.0, JobClass.BATCH: 30.0}  # seconds, if the queue is full
RETRY_NO_MEMORY = 5.0  # seconds
MAX_CALLER = 64  # characters

_JOB_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_RETRIED = re.compile(r"(.+)-r(\d{1,9})")
LONGEST_NAME = 116  # characters of an id to which a number is appended


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Numbers of jobs of one model: waiting by class, and running, of which `batch_running` are of the batch class.

    `callers`: of all tenants, those with waiting jobs by class. Waits are the seconds that the oldest waiting job of a
    class has waited, by the server's clock, or None. Only the first hundred jobs of each queue are compared.
    """

    model: str
    interactive: int
    batch: int
    running: int
    batch_running: int = 0
    interactive_wait: float | None = field(default=None, compare=False)
    batch_wait: float | None = field(default=None, compare=False)
    callers: Mapping[str, int] = field(default_factory=dict, compare=False)

    def by_class(self) -> list[tuple[str, int, int, float | None]]:
        """(class, waiting, running, seconds that the oldest job has waited) of each class."""
        return [
            ("interactive", self.interactive, self.running - self.batch_running, self.interactive_wait),
            ("batch", self.batch, self.batch_running, self.batch_wait),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundJobs:
    """Waiting jobs of one model that only workers with this digest (None: any) and record format can take.

    `unserved`: seconds since such a worker, or no worker of the model at all, was there.
    """

    model: str
    format: int
    digest: str | None
    interactive: int
    batch: int
    unserved: float


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """What counts for a tenant's limits: live jobs (waiting or running), queued jobs and their bytes.

    `stored_bytes`: memory that all its jobs take in Redis, including ended ones until they expire.
    """

    tenant: str
    live: int
    queued: int
    queued_bytes: int
    stored_bytes: int = field(default=0, compare=False)


JobRecords = list[JobRecord]  # because `list` is a method of Jobs
QueueDepths = list[QueueDepth]


class Jobs:
    """All jobs of an installation. Every call raises Unavailable if Redis does not answer."""

    def __init__(self, scripts: Scripts, config: BrokerConfig) -> None:
        self._scripts = scripts
        self._config = config
        self._models = Models(scripts)
        self._terminal = TerminalEvents.of(config)

    async def submit(
        self,
        request: GenerationRequest,
        *,
        job_id: str | None = None,
        idempotency_key: str | None = None,
        tenant: str = DEFAULT_TENANT,
        limits: TenantLimits | None = None,
        keep: float = 0.0,
        caller: str = "",
    ) -> JobRecord:
        """Queue a job. Once this has returned, the job ends in exactly one terminal state.

        The same `job_id`, or the same `idempotency_key` of a tenant, returns the existing job. A request without a seed
        gets one, so that a resumed job repeats its noise.

        With `limits`, even if all of them are None, the job is counted for its tenant, and reserves tokens until its
        end, when the real number is known. A submission that is sent twice counts once.

        `keep`: for how many seconds after its end the job and its journal can be read, if that is longer than usual.
        `caller`: who of the tenant submits it, such as a client's address. The tenant's callers take turns.

        Raises ModelNotFound, QueueFull, TenantLimitReached, RateLimitExceeded, RequestTooLarge; Unavailable while no
        model is known; IdempotencyConflict if the id or key was used for another request; JobConflict if the key's job
        has expired.
        """
        body = encode_request(request)
        if len(body) > self._config.max_request_bytes:
            raise RequestTooLarge(
                f"the request has {len(body)} bytes, but at most {self._config.max_request_bytes} are allowed",
                limit=self._config.max_request_bytes,
                value=len(body),
            )
        job_id = f"job-{secrets.token_hex(12)}" if job_id is None else _checked(job_id)
        stored, stored_body = request, body
        if request.sampling.seed is None:
            stored = request.with_seed(secrets.randbits(63))
            stored_body = encode_request(stored)
        cost = Cost.of(request)
        if limits is not None:
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
                request_hashes(request),
                "" if request.expires_in is None else microseconds(request.expires_in),
                "" if idempotency_key is None else digest(tenant, idempotency_key),
                milliseconds(self._config.idempotency_ttl),
                cap,
                round(request.priority * self._config.priority_seconds * MICROSECONDS),
                0 if request.prompt_only else request.sampling.n,
                self._config.max_queued_bytes,
                limit_argument(limits, cost),
                "" if request.webhook is None else 1,
                "" if request.prompt_only else " ".join(prefix_hashes(request, tenant)),
                encode_request(summary_of(stored)),
                f"{round(self._config.memory_share * 1000)} {round(self._config.tenant_memory_share * 1000)}",
                milliseconds(keep),
                caller.strip()[:MAX_CALLER],
                f"{cost.prompt} {cost.most}",
                "" if limits is None else limits.weight,
            )
        except ScriptRefused as refused:
            if refused.code == "MODEL_UNKNOWN":
                cards = await self._models.cards()
                card = find_card(cards, request.model)
                if card is None or card.name == request.model:
                    raise model_not_found(request.model, cards) from refused
                return await self.submit(
                    replace(request, model=card.name),
                    job_id=job_id,
                    idempotency_key=idempotency_key,
                    tenant=tenant,
                    limits=limits,
                    keep=keep,
                    caller=caller,
                )
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
            tenant_usage=tenant_usage(limits, reply[3:]),
        )

    async def get(self, job_id: str) -> JobRecord:
        """One job. Raises JobNotFound."""
        return _found(job_id, await self._scripts.call("get_job", job_id))

    async def cancel(self, job_id: str) -> JobRecord:
        """Cancel a job. A queued job ends at once, a running one within a step; an ended one stays as it is.

        Raises JobNotFound.
        """
        terminal = self._terminal
        reply = await self._scripts.call(
            "cancel_job", job_id, terminal.cancelled, terminal.job_ttl, terminal.journal_ttl
        )
        return _found(job_id, reply)

    async def retry(self, job_id: str, *, limits: TenantLimits | None = None, caller: str = "") -> JobRecord:
        """Submit a failed job's request again, as a new job of the same tenant. Returns the new job.

        A job is retried once: a second call returns the same new job while it exists. Options are those of `submit`.

        Raises JobNotFound, what `submit` raises, and JobConflict if the job has not failed or its request is no longer
        kept.
        """
        record = await self.get(job_id)
        if record.retried_as is not None:
            return await self.get(record.retried_as)
        if record.state is not JobState.FAILED:
            raise JobConflict(
                f"the job {job_id} is {record.state}, but only failed jobs can be retried",
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
        # The new id is derived from the old one, so that a repeated call makes no second job.
        request = record.readable_request()
        again = await self.submit(request, job_id=_next_id(job_id), tenant=record.tenant, limits=limits, caller=caller)
        await self._scripts.call("mark_retried", job_id, again.id)
        return again

    async def forget(self, job_ids: Sequence[str]) -> None:
        """Delete ended jobs whose answers are stored elsewhere. Jobs that have not ended stay."""
        for start in range(0, len(job_ids), MAX_FORGOTTEN):
            await self._scripts.call("forget_jobs", *job_ids[start : start + MAX_FORGOTTEN])

    async def list(
        self,
        *,
        state: JobState | None = None,
        limit: int = 100,
        tenant: str | None = None,
        job_class: JobClass | None = None,
        model: str | None = None,
    ) -> JobRecords:
        """Live jobs, then ended ones, newest first. There are fewer than `limit` if the requests are big.

        Filters by state, tenant, class and model. Only the newest 2,000 live and 2,000 ended jobs of all tenants are
        searched. A request that this version cannot decode is None, and a job that it cannot decode is left out.
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
        records = []
        for job_id, described in reply:
            with suppress(CodecError):
                records.append(decode_job(job_id.decode(), described))
        return records

    async def depth(self) -> QueueDepths:
        """Numbers of waiting and running jobs, for every model that is known or has jobs."""
        by_model: dict[str, dict[JobClass, tuple[int, int, float | None, int]]] = {}
        for model, job_class, waiting, running, wait, callers in named(await self._scripts.call("queue_depths")):
            seconds = None if wait is None else wait / MICROSECONDS
            by_model.setdefault(model, {})[JobClass(job_class.decode())] = (waiting, running, seconds, callers)
        return [_depth(model, by_model[model]) for model in sorted(by_model)]

    async def bound(self) -> Sequence[BoundJobs]:
        """Waiting jobs that only some workers of their model can take: up to 64 groups, longest unserved first."""
        reply = await self._scripts.call("bound_jobs")
        return [
            BoundJobs(
                model=model,
                format=form,
                digest=None if digest == b"-" else digest.decode(),
                interactive=interactive,
                batch=batch,
                unserved=unserved / MICROSECONDS,
            )
            for model, form, digest, interactive, batch, unserved in named(reply)
        ]

    async def tenant_loads(self, tenants: Sequence[str]) -> Sequence[TenantLoad]:
        """What counts for these tenants' limits."""
        reply = await self._scripts.call("tenant_loads", *tenants)
        return [TenantLoad(name, *numbers) for name, numbers in zip(tenants, reply, strict=True)]


def _depth(model: str, counts: Mapping[JobClass, tuple[int, int, float | None, int]]) -> QueueDepth:
    interactive, batch = counts[JobClass.INTERACTIVE], counts[JobClass.BATCH]
    return QueueDepth(
        model,
        interactive[0],
        batch[0],
        interactive[1] + batch[1],
        batch_running=batch[1],
        interactive_wait=interactive[2],
        batch_wait=batch[2],
        callers={job_class.value: count[3] for job_class, count in counts.items()},
    )


def _checked(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise InvalidRequest.must_be("job_id", "1 to 128 letters, digits or _ . : -", job_id[:80])
    return job_id


def _next_id(job_id: str) -> str:
    """The id of a job's retry: `job-1`, `job-1-r2`, `job-1-r3`."""
    match = _RETRIED.fullmatch(job_id)
    name, number = (match[1], int(match[2]) + 1) if match else (job_id, 2)
    if len(name) > LONGEST_NAME:
        name = f"job-{hashlib.sha256(name.encode()).hexdigest()[:24]}"
    return f"{name}-r{number}"


def digest(tenant: str, key: str) -> str:
    """Digest of a tenant's idempotency key or conversation id, different for each tenant."""
    return hashlib.sha256(f"{len(tenant)}:{tenant}{key}".encode()).hexdigest()


def _found(job_id: str, reply: Sequence[object] | None) -> JobRecord:
    if reply is None:
        raise job_not_found(job_id)
    return decode_job(job_id, reply)


def _submit_error(refused: ScriptRefused, request: GenerationRequest, cap: int) -> KtqueueError:
    match refused.code:
        case "QUEUE_BYTES":
            waiting, limit = (int(word) for word in refused.detail.split())
            return QueueFull(
                f"requests of {waiting} bytes wait, but at most {limit} may",
                limit=limit,
                value=waiting,
                retry_after=RETRY_AFTER[request.job_class],
            )
        case "MEMORY":
            used, limit = (int(word) for word in refused.detail.split())
            return Unavailable(
                f"Redis uses {used} bytes of memory, but new jobs may fill at most {limit}",
                limit=limit,
                value=used,
                retry_after=RETRY_NO_MEMORY,
            )
        case "CONFLICT":
            return IdempotencyConflict(f"job {refused.detail} was submitted with this id or key for another request")
        case "GONE":
            return JobConflict(f"job {refused.detail} of this idempotency key has ended and its record has expired")
        case "NO_MODELS":
            return Unavailable("no worker serves any model yet", retry_after=RETRY_NO_WORKER)
        case "QUEUE_FULL":
            return QueueFull(
                f"{refused.detail} {request.job_class} jobs of {request.model!r} wait, but at most {cap} may",
                limit=cap,
                value=int(refused.detail),
                retry_after=RETRY_AFTER[request.job_class],
            )
    raise refused
