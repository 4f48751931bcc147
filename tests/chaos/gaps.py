"""How long streams were silent after each attack on their worker, and the reasons for long silences."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ktqueue.core.request import JobClass
from tests.chaos.nemesis import UNSEEN_KILL, WORKER_DRAIN, WORKER_KILL, WORKER_STOP, Attack
from tests.chaos.reader import JobOutcome, ReaderView
from tests.chaos.timeline import Line, around

ON_THEIR_WAY_SECONDS = 0.3
MARGIN_SECONDS = 1.0  # before a silence: an attack in this time can still lengthen it
KINDS = (WORKER_KILL, UNSEEN_KILL, WORKER_STOP, WORKER_DRAIN)


@dataclass(frozen=True)
class Gap:
    """A job's silence around an attack: the times of its reader's events before and after, in seconds (monotonic)."""

    attack: Attack
    outcome: JobOutcome
    first: float
    last: float

    @property
    def seconds(self) -> float:
        """The length of the silence."""
        return self.last - self.first


def find(jobs: Sequence[JobOutcome], attacks: Sequence[Attack]) -> list[Gap]:
    """Return the gaps whose reader was connected, and in which no other attack could have lengthened the silence."""
    readers = {outcome.job_id: outcome for outcome in jobs}
    found = []
    for attack in attacks:
        if attack.kind not in KINDS:
            continue
        for job in attack.jobs & readers.keys():
            outcome = readers[job]
            span = None if outcome.view is None else _span(outcome.view, attack.at)
            if span is None:
                continue
            gap = Gap(attack, outcome, *span)
            others = (
                other for other in attacks if other is not attack and gap.first - MARGIN_SECONDS <= other.at <= gap.last
            )
            if not any(job in other.jobs or other.kind not in KINDS for other in others):
                found.append(gap)
    return found


def spreads(gaps: Sequence[Gap]) -> dict[str, dict[str, dict[str, float]]]:
    """Return count, percentiles and maximum of the gaps, in seconds, by class of job and kind of attack."""
    return {
        job_class: {
            kind: _spread(
                [gap.seconds for gap in gaps if (gap.outcome.job_class, gap.attack.kind) == (job_class, kind)]
            )
            for kind in KINDS
        }
        for job_class in JobClass
    }


def longest(jobs: Sequence[JobOutcome]) -> float:
    """Return the longest silence within a connection, in seconds, whatever its reason."""
    return max(
        (
            after - before
            for outcome in jobs
            if outcome.view is not None
            for (before, connection), (after, next_connection) in pairwise(
                zip(outcome.view.times, outcome.view.connection, strict=True)
            )
            if connection == next_connection
        ),
        default=0.0,
    )


def explain(gap: Gap, lines: Sequence[Line]) -> dict[str, Any]:
    """Describe a gap, with the log lines about its job or no job. Times are seconds since the event before it."""
    return {
        "class": str(gap.outcome.job_class),
        "job": gap.outcome.job_id,
        "seconds": gap.seconds,
        "over": gap.attack.kind,
        "at": gap.attack.at - gap.first,
        "meanwhile": around(lines, gap.first - MARGIN_SECONDS, gap.last + 0.1, gap.outcome.job_id, zero=gap.first),
    }


def _span(view: ReaderView, moment: float) -> tuple[float, float] | None:
    """Return when the longest silence at a moment began and ended. Earlier events may arrive a little later."""
    first, last = bisect_right(view.times, moment), bisect_right(view.times, moment + ON_THEIR_WAY_SECONDS)
    found = None
    for i in range(max(1, first), min(last + 1, len(view.times))):
        before, after = view.times[i - 1], view.times[i]
        if view.connection[i - 1] == view.connection[i] and (found is None or after - before > found[1] - found[0]):
            found = (before, after)
    return found


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    return {
        "count": len(ordered),
        "p50_s": ordered[len(ordered) // 2],
        "p99_s": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max_s": ordered[-1],
    }
