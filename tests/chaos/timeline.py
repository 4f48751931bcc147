"""One timeline of what all processes logged and what was done to them, to explain why a stream was silent.

Reads the logs in the state folder. Each of their lines begins with the local time.
"""

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.chaos.nemesis import Attack

STAMPED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (.*)")
LOGGERS = ("ktqueue.workers", "ktqueue.broker")
JOB = re.compile(r"\bjob-[0-9a-f]{24}\b")


@dataclass(frozen=True, order=True)
class Line:
    """A line that the process `who` logged. `at`: seconds of the monotonic clock."""

    at: float
    who: str
    text: str


class LogCollector(logging.Handler):
    """Collects what is logged in this process, which includes the supervisor."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[Line] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(Line(time.monotonic() - (time.time() - record.created), "supervisor", record.getMessage()))


def timeline(state_dir: Path, collected: Sequence[Line], attacks: Sequence[Attack]) -> list[Line]:
    """Return the collected lines, those of the log files, and the attacks, in order of time."""
    since = time.monotonic() - time.time()
    lines = [*collected]
    lines += [
        Line(attack.at, "nemesis", f"{attack.kind} ({len(attack.jobs)} jobs, process {attack.pid})")
        for attack in attacks
    ]
    for path in sorted(state_dir.glob("*.log")):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            found = STAMPED.match(text)
            if found is not None:
                logged_at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp() + since
                lines.append(Line(logged_at, path.stem, found[2]))
    return sorted(lines)


def around(lines: Sequence[Line], first: float, last: float, job: str, zero: float) -> list[str]:
    """Return the lines of a time span that name this job or no job, such as "+0.012 worker-2: text"."""
    texts = []
    for line in lines:
        named = JOB.search(line.text)
        if first <= line.at <= last and (named is None or named[0] == job):
            texts.append(f"{line.at - zero:+.3f} {line.who}: {line.text}")
    return texts
