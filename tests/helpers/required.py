"""Fields that may be None in general and that a test needs: each function returns the field or fails by its name."""

from typing import TypeVar

from ktqueue.broker.job_record import JobRecord
from ktqueue.core.errors import ErrorInfo, KtqueueError

Value = TypeVar("Value")


def required(value: Value | None, name: str) -> Value:
    """Return `value`; fail if it is None."""
    assert value is not None, f"{name} is None"
    return value


def error_of(record: JobRecord) -> ErrorInfo:
    """Return the error that a job ended with."""
    return required(record.error, f"the error of job {record.id}")


def number(value: float | str | None, name: str) -> float:
    """Return a limit or value of an error as a number; fail if it is a text or missing."""
    assert isinstance(value, int | float), f"{name} is {value!r} and not a number"
    return value


def retry_after(error: KtqueueError) -> float:
    """Return the seconds that the error asks its caller to wait."""
    return required(error.retry_after, f"retry_after of {error!r}")
