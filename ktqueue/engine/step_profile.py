"""Where the time of a step goes. Sums always; one JSON line a step when a path is given."""

from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from ktqueue.core.codec import dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step. Seconds of wall time in each part; `rows` ran, of which `sampled` got a token, over `tokens` tokens."""

    schedule: float  # plan and index building
    forward: float
    sample: float
    commit: float  # text, stops, pages
    rows: int
    sampled: int
    tokens: int


class Profile:
    """Adds records up, and writes them to `path` as JSON lines. Raises OSError if it can't be written."""

    def __init__(self, path: Path | None = None) -> None:
        self.steps = 0
        self.schedule_seconds = 0.0
        self.forward_seconds = 0.0
        self.sample_seconds = 0.0
        self.commit_seconds = 0.0
        self._file: BinaryIO | None = path.open("ab") if path is not None else None

    def record(self, step: StepRecord) -> None:
        """Take in one step."""
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
