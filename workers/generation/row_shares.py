"""Shares of an engine's rows: which interactive jobs have more rows than the part of their tenant and caller. Pure."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from ktqueue.broker.lease import Owner
from ktqueue.core.request import JobClass
from ktqueue.workers.generation.running_job import RunningJob


def interactive_rows(jobs: Iterable[RunningJob]) -> Counter[Owner]:
    """The rows that each owner of interactive jobs has here."""
    rows: Counter[Owner] = Counter()
    for job in jobs:
        if job.request.job_class is JobClass.INTERACTIVE:
            rows[job.owner] += job.rows
    return rows


def jobs_over_share(jobs: Collection[RunningJob], rows: int) -> frozenset[str]:
    """The ids of interactive jobs beyond the share of their owner in `rows` rows, if there are several owners.

    Tenants share the rows by weight, and callers the rows of their tenant equally. The jobs that rank first are within
    the share, at least one of each caller.
    """
    owners = interactive_rows(jobs).keys()
    if len(owners) < 2:
        return frozenset()
    callers: defaultdict[str, set[Owner]] = defaultdict(set)
    for owner in owners:
        callers[owner.tenant].add(owner)
    weights = {owner.tenant: owner.weight for owner in owners}
    taken: Counter[Owner] = Counter()
    over: set[str] = set()
    for job in sorted(jobs, key=lambda job: job.rank):
        if job.request.job_class is not JobClass.INTERACTIVE:
            continue
        tenant = job.owner.tenant
        share = rows * weights[tenant] / sum(weights.values()) / len(callers[tenant])
        if taken[job.owner] >= max(1, int(share)):
            over.add(job.id)
        taken[job.owner] += job.rows
    return frozenset(over)
