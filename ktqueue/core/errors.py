"""What a caller may catch. Each error has a stable code and the HTTP status it maps to.

An error names the field, the limit and the value it speaks of, so that a person can mend the input.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """An error as it travels in a journal or an HTTP body.

    `status` is the HTTP status; `param` the field at fault; `limit` and `value` are given where
    a bound was broken.
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
    """No API key, or one that is not known."""

    code = "invalid_api_key"
    status = 401


class ModelNotFound(KtqueueError):
    """No worker serves the model that was asked for."""

    code = "model_not_found"
    status = 404


class JobNotFound(KtqueueError):
    """No job of that id: never submitted, or its record has expired."""

    code = "job_not_found"
    status = 404


class JobConflict(KtqueueError):
    """The job is not in a state that allows the call."""

    code = "job_conflict"
    status = 409


class RequestTooLarge(KtqueueError):
    """The body, or what it asks for, is larger than a limit."""

    code = "request_too_large"
    status = 413


class IdempotencyConflict(KtqueueError):
    """The idempotency key was used before with another request."""

    code = "idempotency_conflict"
    status = 422


class QueueFull(KtqueueError):
    """The queue of this class holds as many jobs, or all queues as many bytes, as they may."""

    code = "queue_full"
    status = 429


class TenantLimitReached(KtqueueError):
    """The tenant has as many jobs, or bytes of them, as it may."""

    code = "tenant_limit_reached"
    status = 429


class RateLimitExceeded(KtqueueError):
    """The tenant has used the requests or tokens of its minute; `retry_after` says when this one would be let in."""

    code = "rate_limit_exceeded"
    status = 429


class Cancelled(KtqueueError):
    """The job was cancelled."""

    code = "cancelled"
    status = 499


class Unavailable(KtqueueError):
    """The broker or every worker of the model is away; try again."""

    code = "unavailable"
    status = 503


class DeadlineExceeded(KtqueueError):
    """The job's deadline passed before it was done."""

    code = "deadline_exceeded"
    status = 504


class EngineFailure(KtqueueError):
    """The engine could not finish this one sequence."""

    code = "engine_failure"
    status = 500


class PoisonJob(KtqueueError):
    """The job's workers died so often that it is not tried again."""

    code = "poison_job"
    status = 500


class ModelChanged(KtqueueError):
    """The job has begun under weights or settings that no worker of its model has any more."""

    code = "model_changed"
    status = 503


class VersionChanged(KtqueueError):
    """The job was written by a version of ktqueue that no worker of its model has any more."""

    code = "version_changed"
    status = 503


class LeaseLost(KtqueueError):
    """This worker incarnation's lease has lapsed: its jobs belong to others now."""

    code = "lease_lost"
    status = 503


class JournalRegressed(KtqueueError):
    """The reader has seen more of the journal than there is: the broker lost data."""

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
    """The exception that an ErrorInfo stands for: of the class with its code, or a plain KtqueueError."""
    known, waiting = {KtqueueError.code: KtqueueError}, [KtqueueError]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            known.setdefault(kind.code, kind)
            waiting.append(kind)
    kind = known.get(info.code, KtqueueError)
    return kind(info.message, param=info.param, limit=info.limit, value=info.value)
