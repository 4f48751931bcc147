"""The final events that the broker itself writes, and how long ended jobs are kept. Does no I/O."""

from dataclasses import dataclass

from ktqueue.core.codec import encode_event
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import Cancelled, DeadlineExceeded, KtqueueError, ModelChanged, PoisonJob, VersionChanged
from ktqueue.core.events import JobState, TokenEvent


@dataclass(frozen=True, slots=True)
class TerminalEvents:
    """Encoded events, and the lifetimes of ended jobs in the form that the scripts read.

    `job_ttl`: three numbers: lifetime of a record, lifetime of a failed job's record (both in milliseconds), and the
    most bytes that the requests of failed jobs may take. `journal_ttl`: in milliseconds.
    """

    cancelled: bytes
    expired: bytes
    poison: bytes
    model_changed: bytes
    version_changed: bytes
    job_ttl: str
    journal_ttl: int

    @classmethod
    def of(cls, config: BrokerConfig) -> "TerminalEvents":
        """The events and lifetimes for these settings."""

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
                    "the job has started, but the workers of its model now have other weights or settings; no worker "
                    f"that could continue it appeared for {config.digest_wait:g} s (broker.digest_wait)",
                    limit=config.digest_wait,
                ),
            ),
            version_changed=event(
                JobState.FAILED,
                VersionChanged(
                    "the job was written by a newer version of ktqueue; no worker that can read it appeared for "
                    f"{config.digest_wait:g} s (broker.digest_wait)",
                    limit=config.digest_wait,
                ),
            ),
            job_ttl=f"{milliseconds(config.job_ttl)} {milliseconds(config.failed_ttl)} {config.max_failed_bytes}",
            journal_ttl=milliseconds(config.journal_ttl),
        )


def milliseconds(seconds: float) -> int:
    """Seconds as whole milliseconds, at least 1, because Redis refuses a TTL of 0."""
    return max(1, round(seconds * 1_000))


def microseconds(seconds: float) -> int:
    """Seconds as whole microseconds, the scripts' unit, at least 1."""
    return max(1, round(seconds * 1_000_000))
