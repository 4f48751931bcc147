"""A batch run: what to run, and how it ended."""

from dataclasses import dataclass
from pathlib import Path

from ktqueue.core.request import JobClass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """What to run, and how. `window`: lines that run at once; None: twice the rows of all workers."""

    source: Path
    target: Path
    model: str | None = None
    window: int | None = None
    job_class: JobClass = JobClass.BATCH
    overwrite: bool = False
    retry_failed: bool = False
    skip_invalid: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """State of a batch at the end of a run. `tokens` and times are of this run only; times in seconds."""

    total: int
    answered: int
    failed: int
    skipped: int
    tokens: int
    seconds: float
    tokens_per_second: float
    first_token_p50: float | None
    first_token_p95: float | None
    interrupted: bool
    output: str
    errors: str | None
