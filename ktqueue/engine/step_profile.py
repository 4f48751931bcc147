"""Measures where the time of steps goes: sums, and one JSON line per step if a path is given."""

from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from ktqueue.core.codec import dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step: seconds of wall time in each part, and its number of rows, of sampled rows and of computed tokens."""

    schedule: float  # plan the step and build the batch
    forward: float
    sample: float
    commit: float  # text, stop strings, pages, launch of the next step
    rows: int
    sampled: int
    tokens: int


class Profile:
    """Sums up records, and appends them to `path` as JSON lines. Raises OSError if the file cannot be written."""

    def __init__(self, path: Path | None = None) -> None:
        self.steps = 0
        self.schedule_seconds = 0.0
        self.forward_seconds = 0.0
        self.sample_seconds = 0.0
        self.commit_seconds = 0.0
        self._file: BinaryIO | None = path.open("ab") if path is not None else None

    def record(self, step: StepRecord) -> None:
        """Add one step."""
        self.steps += 1
        self.schedule_seconds += step.schedule
        self.forward_seconds += step.forward
        self.sample_seconds += step.sample
        self.commit_seconds += step.commit
        if self._file is not None:
            self._file.write(dumps(asdict(step)) + b"\n")

    def close(self) -> None:
        """Flush and close the file, if there is one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
