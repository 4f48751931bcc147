"""Errors that a caller may catch. Each class has a stable code and an HTTP status.

An error names the field, the limit and the value, so that a person can correct the input.
"""

from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """An error as plain data, for journals and HTTP bodies.

    `status` is the HTTP status and `param` the wrong field. `limit` and `value` are set if a limit was exceeded.
    """

    code: str
    message: str
    status: int = 500
    param: str | None = None
    limit: float | str | None = None
    value: float | str | None = None


class KtqueueError(Exception):
    """Base of all errors that a caller may catch."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        limit: float | str | None = None,
        value: float | str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.limit = limit
        self.value = value
        self.retry_after = retry_after  # seconds

    @classmethod
    def must_be(cls, param: str, wanted: str, value: float | str, *, limit: float | str | None = None) -> Self:
        """The error `PARAM must be WANTED, got VALUE`. `limit`: as data; None: `wanted`."""
        limit = wanted if limit is None else limit
        return cls(f"{param} must be {wanted}, got {value!r}", param=param, limit=limit, value=value)

    def info(self) -> ErrorInfo:
        """The error as plain data."""
        return ErrorInfo(
            code=self.code,
            message=self.message,
            status=self.status,
            param=self.param,
            limit=self.limit,
            value=self.value,
        )


class InvalidRequest(KtqueueError):
    """A field of the request is wrong."""

    code = "invalid_value"
    status = 400


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit the model's context."""

    code = "context_length_exceeded"


class AuthenticationFailed(KtqueueError):
    """The API key is missing or unknown."""

    code = "invalid_api_key"
    status = 401


class ModelNotFound(KtqueueError):
    """No worker serves the requested model."""

    code = "model_not_found"
    status = 404


class JobNotFound(KtqueueError):
    """No job has this id: it was never submitted, or its record has expired."""

    code = "job_not_found"
    status = 404


class JobConflict(KtqueueError):
    """The job is not in a state that allows the call."""

    code = "job_conflict"
    status = 409


class FileNotFound(KtqueueError):
    """No file has this id: it was never uploaded, was deleted, or has expired."""

    code = "file_not_found"
    status = 404


class FileInUse(KtqueueError):
    """The file is the input of a batch that has not ended."""

    code = "file_in_use"
    status = 409


class FileLimitReached(InvalidRequest):
    """The tenant has as many files, or bytes in them, as it may have. Waiting does not help, so it is no 429."""

    code = "file_limit_reached"


class BatchNotFound(KtqueueError):
    """No batch has this id: it was never created, or its record has expired."""

    code = "batch_not_found"
    status = 404


class BatchConflict(KtqueueError):
    """The batch is not in a state that allows the call."""

    code = "batch_conflict"
    status = 409


class TooManyBatches(KtqueueError):
    """The tenant has as many batches that have not ended as it may have."""

    code = "too_many_batches"
    status = 429


class RequestTooLarge(KtqueueError):
    """The body, or the work that it requests, exceeds a limit."""

    code = "request_too_large"
    status = 413


class IdempotencyConflict(KtqueueError):
    """The idempotency key was used before with another request."""

    code = "idempotency_conflict"
    status = 422


class QueueFull(KtqueueError):
    """The queue of this class is at its limit of jobs, or all queues together are at their limit of bytes."""

    code = "queue_full"
    status = 429


class TenantLimitReached(KtqueueError):
    """The tenant is at its limit of jobs, or of bytes in them."""

    code = "tenant_limit_reached"
    status = 429


class RateLimitExceeded(KtqueueError):
    """The tenant has used its requests or tokens for now. `retry_after` says when this request would be accepted."""

    code = "rate_limit_exceeded"
    status = 429


class Cancelled(KtqueueError):
    """The job was cancelled."""

    code = "cancelled"
    status = 499


class Unavailable(KtqueueError):
    """Redis, the gateway, the hub, or every worker of the model cannot be reached now. Try again."""

    code = "unavailable"
    status = 503


class DeadlineExceeded(KtqueueError):
    """The job's deadline passed before it was done."""

    code = "deadline_exceeded"
    status = 504


class EngineFailure(KtqueueError):
    """The engine could not finish this sequence."""

    code = "engine_failure"
    status = 500


class PoisonJob(KtqueueError):
    """So many workers died while running this job that it is not tried again."""

    code = "poison_job"
    status = 500


class ModelChanged(KtqueueError):
    """The job was started with weights or settings that no worker of its model has now."""

    code = "model_changed"
    status = 503


class VersionChanged(KtqueueError):
    """The job was written by a version of ktqueue that no worker of its model can read now."""

    code = "version_changed"
    status = 503


class LeaseLost(KtqueueError):
    """The worker's lease has expired, so other workers may have its jobs now."""

    code = "lease_lost"
    status = 503


class JournalRegressed(KtqueueError):
    """The reader has seen more events than the journal has now: Redis lost data."""

    code = "journal_regressed"
    status = 500


class ConfigError(KtqueueError):
    """A setting is unknown or wrong."""

    code = "config_error"


class CheckpointError(KtqueueError):
    """A model file is missing, truncated, corrupt, or does not fit the model."""

    code = "checkpoint_error"


class RuleError(KtqueueError):
    """A rule file is wrong; the message begins with file:line."""

    code = "rule_error"


def error_of(info: ErrorInfo) -> KtqueueError:
    """Make the exception for an ErrorInfo: of the class with its code, else a plain KtqueueError."""
    by_code, unvisited = {KtqueueError.code: KtqueueError}, [KtqueueError]
    while unvisited:
        for kind in unvisited.pop().__subclasses__():
            by_code.setdefault(kind.code, kind)
            unvisited.append(kind)
    kind = by_code.get(info.code, KtqueueError)
    return kind(info.message, param=info.param, limit=info.limit, value=info.value)
