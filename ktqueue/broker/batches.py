"""Batches over HTTP: their records, and the leases of the control workers that run them.

A batch has one owner at a time. `take` gives it a lease and a number, the fence, which grows with each owner. All that
an owner stores is refused once another owner has a larger fence. The scripts use only the server's clock.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from ktqueue.broker.jobs import digest
from ktqueue.broker.scripts import ScriptRefused, Scripts
from ktqueue.broker.terminal_events import microseconds, milliseconds
from ktqueue.core.codec import CodecError, dumps, loads, reading
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import BatchConflict, BatchNotFound, IdempotencyConflict, InvalidRequest, TooManyBatches

LEASES = 5  # a batch's lease is so many times `broker.lease_seconds`, because its owner does other work too
TRIAL_SECONDS = 60.0  # in which the death of an owner counts for the batch on trial alone
MAX_LISTED = 1_000  # newest batches of a tenant that its list shows
RETRY_AFTER = 30.0  # seconds, if the tenant has too many batches
MICROSECONDS = 1_000_000


class BatchStatus(StrEnum):
    """Where a batch is. The names and their order are those of OpenAI's Batch object."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the batch stays in this status."""
        return self in (self.FAILED, self.COMPLETED, self.EXPIRED, self.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What a client asks for. `completion_window` as it was sent; `output_seconds`: life of the output files."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUsage:
    """Sums of tokens over the lines that have an answer."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def plus(self, other: "BatchUsage") -> "BatchUsage":
        """The sum of both."""
        return BatchUsage(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """What the owners of a batch found out and did so far.

    `total`, `answered` and `failed` count lines, once their records are stored. `errors` has a few objects {code,
    message, param, line}. `segments` are (name, count) of the stored records. `outcome`: the status in which the batch
    ends, once that is known.
    """

    model: str | None = None
    total: int = 0
    answered: int = 0
    failed: int = 0
    usage: BatchUsage = field(default_factory=BatchUsage)
    errors: tuple[Mapping[str, Any], ...] = ()
    segments: tuple[tuple[str, int], ...] = ()
    outcome: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None


@dataclass(frozen=True, slots=True)
class BatchSpeed:
    """How fast a batch runs, as its owner last said. None: not known.

    running: its requests that have begun. waiting: those in the queue. held_by: what keeps these from rows, of the
    reasons of WorkerInfo.
    """

    tokens_per_second: float | None = None
    seconds_left: float | None = None
    running: int | None = None
    waiting: int | None = None
    held_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch. Times in Unix seconds by the server's clock; `times` has the time of each status that was reached.

    `caller`: the client's address if there are no API keys, else ''. `now`: the server's time of this reply, None in
    replies to clients. `failures_without_progress`: owners in a row that failed by an unexpected error, or died with
    the batch on trial, before they had stored anything new.
    """

    id: str
    tenant: str
    caller: str = ""
    request: BatchRequest
    status: BatchStatus
    created_at: float
    expires_at: float
    times: Mapping[BatchStatus, float] = field(default_factory=dict)
    facts: BatchFacts = field(default_factory=BatchFacts)
    speed: BatchSpeed = field(default_factory=BatchSpeed)
    failures_without_progress: int = 0
    now: float | None = None

    @property
    def is_late(self) -> bool:
        """Whether its completion window was over at the time of the reply."""
        return self.now is not None and self.now >= self.expires_at


@dataclass(frozen=True, slots=True)
class BatchLease:
    """The right to run a batch, until another owner has a larger fence."""

    id: str
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """The batches that have not ended: how many by status, how many without a living owner, and what they still need.

    `lines_left`: of those whose lines are counted. `seconds_left`: of the running one that needs longest, None while
    unknown. Only 256 batches are looked at.
    """

    by_status: Mapping[BatchStatus, int] = field(default_factory=dict)
    unowned: int = 0
    lines_left: int = 0
    seconds_left: float | None = None

    @property
    def count(self) -> int:
        """Number of batches."""
        return sum(self.by_status.values())


class Batches:
    """All batches of an installation. Every call raises Unavailable if Redis does not answer."""

    def __init__(self, scripts: Scripts, config: BrokerConfig) -> None:
        self._scripts = scripts
        self._config = config
        self.lease_seconds = LEASES * config.lease_seconds

    async def create(
        self,
        request: BatchRequest,
        *,
        window_seconds: float,
        tenant: str,
        caller: str = "",
        idempotency_key: str | None = None,
    ) -> BatchRecord:
        """Create a batch. The same key of a tenant returns the existing one. Callers of a tenant have even shares.

        Raises TooManyBatches, and what `find` raises.
        """
        batch_id = f"batch_{secrets.token_hex(12)}"
        record = await self._create(batch_id, request, tenant, idempotency_key, window_seconds, caller)
        assert record is not None
        return record

    async def find(self, request: BatchRequest, *, tenant: str, idempotency_key: str) -> BatchRecord | None:
        """The batch that the key of a tenant has created, or None.

        Raises IdempotencyConflict if the key was used for another request, and BatchConflict if its batch has expired.
        """
        return await self._create("", request, tenant, idempotency_key)

    async def _create(
        self, batch_id: str, request: BatchRequest, tenant: str, key: str | None, seconds: float = 0.0, caller: str = ""
    ) -> BatchRecord | None:
        body = dumps({"v": 1, **asdict(request)})
        try:
            reply = await self._scripts.call(
                "create_batch",
                batch_id,
                tenant,
                body,
                hashlib.sha256(body).hexdigest(),
                microseconds(seconds),
                "" if key is None else digest(tenant, f"batch:{key}"),
                milliseconds(self._config.idempotency_ttl),
                self._config.max_open_batches,
                MAX_LISTED,
                caller,
            )
        except ScriptRefused as refused:
            raise _create_error(refused) from refused
        return None if reply is None else _decoded(reply[1].decode(), reply[2])

    async def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """One batch of a tenant. Raises BatchNotFound, also for a batch of another tenant."""
        return _found(batch_id, await self._scripts.call("get_batch", batch_id, tenant))

    async def list(self, tenant: str, *, limit: int, after: str | None = None) -> tuple[Sequence[BatchRecord], bool]:
        """A tenant's batches, newest first, those older than the batch `after`, and whether there are more.

        Raises InvalidRequest if there is no batch `after`.
        """
        reply = await self._scripts.call("list_batches", tenant, limit, after or "")
        if reply is None:
            raise InvalidRequest(f"after must be the id of a batch, got {after!r:.80}", param="after", value=after)
        found = []
        for batch_id, described in reply[0]:
            with suppress(CodecError):
                found.append(_decoded(batch_id.decode(), described))
        return found, bool(reply[1])

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Ask for the end of a batch. Its owner then cancels the jobs, and stores what is done.

        Cancelling it again is no error. Raises BatchNotFound, BatchConflict if its lines have all ended.
        """
        record = _found(batch_id, await self._scripts.call("cancel_batch", batch_id, tenant))
        if record.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            raise BatchConflict(
                f"the batch {batch_id} is {record.status} already and cannot be cancelled",
                param="batch_id",
                limit="a batch that has not ended",
                value=record.status.value,
            )
        return record

    async def load(self) -> BatchLoad:
        """The batches of all tenants that have not ended."""
        by_status: dict[BatchStatus, int] = {}
        unowned = lines_left = 0
        seconds: list[float] = []
        for word, described, is_owned, speed in await self._scripts.call("open_batches"):
            try:
                with reading("a batch"):
                    status, facts, left = BatchStatus(word.decode()), _facts(described), _speed(speed).seconds_left
            except CodecError:
                continue
            if status.ended:  # only its objects are left
                continue
            by_status[status] = by_status.get(status, 0) + 1
            unowned += not is_owned
            lines_left += facts.total - facts.answered - facts.failed
            if left is not None and status is BatchStatus.IN_PROGRESS and is_owned:
                seconds.append(left)
        return BatchLoad(
            by_status=by_status, unowned=unowned, lines_left=lines_left, seconds_left=max(seconds, default=None)
        )

    # What owners call. Each call but `take` raises LeaseLost if the batch has another owner.

    async def take(self, owner: str, *, of_newcomers: bool = False) -> tuple[BatchLease, BatchRecord] | None:
        """Take a batch without a living owner, if there is one. The lease lasts `lease_seconds`.

        `of_newcomers`: only of a caller none of whose batches has an owner. With API keys a tenant is one caller.
        Raises CodecError if its record is damaged. After `broker.max_attempts` times nobody takes it again.
        """
        again, most = microseconds(self.lease_seconds), self._config.max_attempts
        reply = await self._scripts.call(
            "take_batch", owner, again, 1 if of_newcomers else "", most, microseconds(TRIAL_SECONDS)
        )
        if reply is None:
            return None
        batch_id, fence, now, described = reply
        lease = BatchLease(batch_id.decode(), fence)
        try:
            return lease, _decoded(lease.id, described, now)
        except CodecError as error:
            ttl = milliseconds(self._config.batch_ttl)
            is_last = await self._scripts.call("release_batch", lease.id, fence, ttl, again, most) == 2
            raise CodecError(f"{error}; it is put aside") if is_last else error from None

    async def update(
        self,
        lease: BatchLease,
        facts: BatchFacts | None = None,
        *,
        change: tuple[BatchStatus, BatchStatus] | None = None,
        failures: int = 0,
        speed: BatchSpeed | None = None,
    ) -> BatchRecord:
        """Renew the lease, and store facts, the speed, and a change of the status, from one to another.

        Facts are progress, after which the batch has so many `failures` without progress; a speed is not. If the status
        is not the first of `change`, nothing is stored. The record that is returned shows that.
        """
        before, after = change or ("", "")
        reply = await self._scripts.call(
            "update_batch",
            lease.id,
            lease.fence,
            microseconds(self.lease_seconds),
            before,
            after,
            "" if facts is None else dumps({"v": 1, **asdict(facts)}),
            failures,
            "" if speed is None else dumps(asdict(speed)),
        )
        return _decoded(lease.id, reply[1], reply[0])

    async def release(self, lease: BatchLease, *, is_clean: bool = True) -> None:
        """Give the batch back. Another owner can take it now, unless it has ended and its objects were deleted."""
        ttl = milliseconds(self._config.batch_ttl) if is_clean else ""
        await self._scripts.call("release_batch", lease.id, lease.fence, ttl, "", "")

    async def note_failure(self, lease: BatchLease) -> None:
        """Store that a run failed by an unexpected error. The next owner can take the batch after one more lease."""
        again = microseconds(self.lease_seconds)
        await self._scripts.call("release_batch", lease.id, lease.fence, "", again, "")


def _create_error(refused: ScriptRefused) -> Exception:
    match refused.code:
        case "CONFLICT":
            return IdempotencyConflict(f"batch {refused.detail} was created with this key for another request")
        case "GONE":
            return BatchConflict(f"batch {refused.detail} of this idempotency key has ended and has expired")
        case "OPEN" | "SHARE":
            count, limit = (int(word) for word in refused.detail.split())
            whose = " of this address" if refused.code == "SHARE" else ""
            return TooManyBatches(
                f"{count} batches{whose} have not ended, but at most {limit} may wait or run at once",
                limit=limit,
                value=count,
                retry_after=RETRY_AFTER,
            )
    return refused


def _found(batch_id: str, described: Sequence[bytes] | None) -> BatchRecord:
    if described is None:
        shown = batch_id[:80]
        raise BatchNotFound(f"no batch {shown!r}: it was never created, or has expired", param="batch_id", value=shown)
    return _decoded(batch_id, described)


def _decoded(batch_id: str, described: Sequence[bytes], now: bytes | None = None) -> BatchRecord:
    with reading(f"batch {batch_id}"):
        values = {name.decode(): value for name, value in zip(described[::2], described[1::2], strict=True)}
        request = loads(values["request"])
        return BatchRecord(
            id=batch_id,
            tenant=values["tenant"].decode(),
            caller=values.get("caller", b"").decode(),
            request=BatchRequest(**_known(BatchRequest, request)),
            status=BatchStatus(values["status"].decode()),
            created_at=int(values["created"]) / MICROSECONDS,
            expires_at=int(values["expires"]) / MICROSECONDS,
            times={
                BatchStatus(name.removeprefix("at:")): int(value) / MICROSECONDS
                for name, value in values.items()
                if name.startswith("at:")
            },
            facts=_facts(values.get("facts")),
            speed=_speed(values.get("speed")),
            failures_without_progress=int(values.get("failures", 0)),
            now=None if now is None else int(now) / MICROSECONDS,
        )


def _facts(data: bytes | None) -> BatchFacts:
    value = loads(data or b"{}")
    value["usage"] = BatchUsage(**_known(BatchUsage, value.get("usage", {})))
    value["errors"] = tuple(value.get("errors", ()))
    value["segments"] = tuple((name, count) for name, count in value.get("segments", ()))
    return BatchFacts(**_known(BatchFacts, value))


def _speed(data: bytes | None) -> BatchSpeed:
    return BatchSpeed(**_known(BatchSpeed, loads(data or b"{}")))


def _known(kind: type, value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows."""
    names = {each.name for each in fields(kind)}
    return {name: entry for name, entry in value.items() if name in names}
