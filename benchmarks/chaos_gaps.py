"""How long streams were silent over each blow to their worker, and why where that was long. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.chaos_nemesis import UNSEEN_KILL, WORKER_DRAIN, WORKER_KILL, WORKER_STOP, Blow
from benchmarks.chaos_timeline import Line, around
from benchmarks.chaos_view import Told, View
from ktqueue.core.request import JobClass

ON_THEIR_WAY_SECONDS = 0.3
MARGIN_SECONDS = 1.0  # before a silence; what is done to others then still shows in it
KINDS = (WORKER_KILL, UNSEEN_KILL, WORKER_STOP, WORKER_DRAIN)


@dataclass(frozen=True)
class Gap:
    """A job's silence over a blow, in s of the monotonic clock: its reader's events before and after."""

    blow: Blow
    told: Told
    first: float
    last: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.last - self.first


def find(jobs: Sequence[Told], blows: Sequence[Blow]) -> list[Gap]:
    """Those where the reader was there, and nothing was done meanwhile to Redis, gateway, fork server or the job."""
    readers = {told.job_id: told for told in jobs}
    found = []
    for blow in blows:
        if blow.kind not in KINDS:
            continue
        for job in blow.jobs & readers.keys():
            told = readers[job]
            span = None if told.view is None else _span(told.view, blow.at)
            if span is None:
                continue
            gap = Gap(blow, told, *span)
            others = (one for one in blows if one is not blow and gap.first - MARGIN_SECONDS <= one.at <= gap.last)
            if not any(job in one.jobs or one.kind not in KINDS for one in others):
                found.append(gap)
    return found


def spreads(gaps: Sequence[Gap]) -> dict[str, dict[str, dict[str, float]]]:
    """By class of job and kind of blow, in seconds."""
    return {
        one: {
            kind: _spread([gap.seconds for gap in gaps if (gap.told.job_class, gap.blow.kind) == (one, kind)])
            for kind in KINDS
        }
        for one in JobClass
    }


def longest(jobs: Sequence[Told]) -> float:
    """The longest silence of all, whatever was done."""
    return max(
        (
            after - before
            for told in jobs
            if told.view is not None
            for (before, one), (after, other) in pairwise(zip(told.view.times, told.view.connection, strict=True))
            if one == other
        ),
        default=0.0,
    )


def explain(gap: Gap, lines: Sequence[Line]) -> dict[str, Any]:
    """What happened meanwhile, in s since the last event before: to the job, and what was not about a job."""
    return {
        "class": str(gap.told.job_class),
        "job": gap.told.job_id,
        "seconds": gap.seconds,
        "over": gap.blow.kind,
        "at": gap.blow.at - gap.first,
        "meanwhile": around(lines, gap.first - MARGIN_SECONDS, gap.last + 0.1, gap.told.job_id, zero=gap.first),
    }


def _span(view: View, at: float) -> tuple[float, float] | None:
    """When the longest silence about a moment began and ended; events of before it may be on their way for a while."""
    first, last = bisect_right(view.times, at), bisect_right(view.times, at + ON_THEIR_WAY_SECONDS)
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
