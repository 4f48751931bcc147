"""The last events that the broker itself writes, and the lifetimes that go with an end. Pure."""

from dataclasses import dataclass

from ktqueue.core.codec import encode_event
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import (
    Cancelled,
    DeadlineExceeded,
    KtqueueError,
    ModelChanged,
    PoisonJob,
    VersionChanged,
)
from ktqueue.core.events import JobState, TokenEvent


@dataclass(frozen=True, slots=True)
class Terminal:
    """Encoded events, and how long an ended job's record and journal stay, as the scripts read it.

    `job_ttl`: of a record, of a failed job's with its request (both in milliseconds), and the most bytes of such
    requests. `journal_ttl` in milliseconds.
    """

    cancelled: bytes
    expired: bytes
    poison: bytes
    model_changed: bytes
    version_changed: bytes
    job_ttl: str
    journal_ttl: int

    @classmethod
    def of(cls, config: BrokerConfig) -> "Terminal":
        """Those of an installation."""

        def event(state: JobState, error: KtqueueError) -> bytes:
            return encode_event(TokenEvent(seq=0, state=state, error=error.info()))

        return cls(
            cancelled=event(JobState.CANCELLED, Cancelled("the job was cancelled")),
            expired=event(JobState.EXPIRED, DeadlineExceeded("the job's deadline passed before it was done")),
            poison=event(
                JobState.FAILED,
                PoisonJob(
                    f"the job's worker died {config.max_attempts} times; it is not tried again",
                    limit=config.max_attempts,
                ),
            ),
            model_changed=event(
                JobState.FAILED,
                ModelChanged(
                    "the job has begun, and the workers of its model now have other weights or settings; no worker "
                    f"that could go on with it came for {config.digest_wait:g} s (broker.digest_wait)",
                    limit=config.digest_wait,
                ),
            ),
            version_changed=event(
                JobState.FAILED,
                VersionChanged(
                    "the job was written by a newer version of ktqueue; no worker that reads it came for "
                    f"{config.digest_wait:g} s (broker.digest_wait)",
                    limit=config.digest_wait,
                ),
            ),
            job_ttl=f"{milliseconds(config.job_ttl)} {milliseconds(config.failed_ttl)} {config.max_failed_bytes}",
            journal_ttl=milliseconds(config.journal_ttl),
        )


def milliseconds(seconds: float) -> int:
    """At least 1: Redis refuses a TTL of 0."""
    return max(1, round(seconds * 1_000))


def microseconds(seconds: float) -> int:
    """The unit of the scripts."""
    return max(1, round(seconds * 1_000_000))
