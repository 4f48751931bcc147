"""What `ktqueue top` shows of a Snapshot: tables for people, a document for programs."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ktqueue.cli.terminal.console import span
from ktqueue.core.model_card import SHORT_DIGEST
from ktqueue.core.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ktqueue.broker.jobs import BoundJobs, QueueDepth
    from ktqueue.broker.models import WorkerInfo
    from ktqueue.broker.snapshot import Snapshot

FIXED_LINES = 5  # of a frame: the summary, a remark, an empty line, two table heads


def document(snapshot: "Snapshot") -> dict[str, Any]:
    """Return a snapshot as JSON values. Times in seconds."""
    return {
        "time": snapshot.taken_at,
        "tokens_per_second": snapshot.tokens_per_second,
        "redis": {"memory_used": snapshot.memory_used, "memory_limit": snapshot.memory_limit or None},
        "workers": [
            {
                "id": worker.worker_id,
                "model": worker.model,
                "digest": worker.digest[:SHORT_DIGEST],
                "host": worker.host,
                "pid": worker.pid,
                "started_at": worker.started_at,
                "lease_left": worker.lease_left,
                "step_age": worker.step_age,
                "jobs": worker.running,
                "seats": worker.max_num_seqs,
                "stats": dict(worker.stats),
            }
            for worker in snapshot.workers
        ],
        "queues": [
            {"model": depth.model, "job_class": job_class, "waiting": waiting, "running": running, "oldest_wait": wait}
            for depth in snapshot.depths
            for job_class, waiting, running, wait in _classes(depth)
        ],
        "bound": [asdict(jobs) for jobs in snapshot.bound],
    }


def frame(snapshot: "Snapshot", remark: str = "", lines: int | None = None) -> "Group":
    """Return a summary, a remark and the tables. With `lines`, only as many rows as fit."""
    from rich.console import Group
    from rich.text import Text

    queues = [(depth.model, *row) for depth in snapshot.depths for row in _classes(depth)]
    shown_workers: Sequence[WorkerInfo] = snapshot.workers
    if lines is not None:
        room = max(lines - FIXED_LINES, 4)
        queues = queues[: max(room // 2, room - len(shown_workers))]
        shown_workers = shown_workers[: room - len(queues)]
    hidden = len(snapshot.workers) - len(shown_workers) + 2 * len(snapshot.depths) - len(queues)
    if snapshot.bound:
        remark = f"{_unserved(snapshot.bound)}  {remark}"
    if hidden:
        remark = f"({hidden} lines do not fit)  {remark}"
    return Group(
        Text(_summary(snapshot), style="bold", no_wrap=True, overflow="ellipsis"),
        Text(remark, style="yellow", no_wrap=True, overflow="ellipsis"),
        _workers(shown_workers),
        Text(),
        _queues(queues, snapshot.workers),
    )


def _summary(snapshot: "Snapshot") -> str:
    workers = snapshot.workers
    rows = sum(int(worker.stats.get("running", 0)) for worker in workers)
    max_rows = sum(worker.max_num_seqs for worker in workers)
    limit = f" of {format_bytes(snapshot.memory_limit)}" if snapshot.memory_limit else ""
    return "  ".join(
        (
            time.strftime("%H:%M:%S", time.localtime(snapshot.taken_at)),
            f"{len(workers)} worker{'' if len(workers) == 1 else 's'}",
            f"{rows}/{max_rows} rows",
            f"{_rate(snapshot.tokens_per_second)} tok/s",
            f"Redis {format_bytes(snapshot.memory_used)}{limit}",
        )
    )


def _unserved(bound: Sequence["BoundJobs"]) -> str:
    """Describe jobs that no running worker can take: the group that has waited longest, and how many others."""
    first = bound[0]
    needed = f"digest {first.digest[:SHORT_DIGEST]}" if first.digest else f"record format {first.format}"
    others = sum(jobs.interactive + jobs.batch for jobs in bound[1:])
    more = f" (and {others} more)" if others else ""
    return f"{first.interactive + first.batch} jobs of {first.model} wait for a worker with {needed}{more}"


def _workers(workers: Sequence["WorkerInfo"]) -> "Table":
    made = _table(("worker", "model", "host"), ("lease", "rows", "pages", "tok/s", "last step"))
    for worker in workers:
        stats = worker.stats
        pages = f"{1 - stats.get('free_pages', 0) / stats['total_pages']:.0%}" if stats.get("total_pages") else ""
        made.add_row(
            "-".join(worker.worker_id.rsplit("-", 2)[1:]),  # the host has its own column
            worker.model,
            worker.host,
            span(worker.lease_left, digits=1),
            f"{stats.get('running', 0):.0f}/{worker.max_num_seqs}",
            pages,
            _rate(stats.get("generation_tokens_per_second", 0.0)),
            "draining" if stats.get("draining") else "" if worker.step_age is None else span(worker.step_age, digits=1),
        )
    return made


def _queues(queues: Sequence[tuple[str, str, int, int, float | None]], workers: Sequence["WorkerInfo"]) -> "Table":
    made = _table(("queue", "class", "digest"), ("waiting", "running", "oldest wait"))
    digests: dict[str, set[str]] = {}
    for worker in workers:
        digests.setdefault(worker.model, set()).add(worker.digest[:SHORT_DIGEST])
    for model, job_class, waiting, running, wait in queues:
        oldest = "" if wait is None else span(wait, digits=1)
        served = " ".join(sorted(digests.get(model, ())))
        made.add_row(model, job_class, served, f"{waiting:,}", f"{running:,}", oldest)
    return made


def _classes(depth: "QueueDepth") -> list[tuple[str, int, int, float | None]]:
    """(class, waiting, running, seconds that the oldest job has waited) of each class."""
    return [
        ("interactive", depth.interactive, depth.running - depth.batch_running, depth.interactive_wait),
        ("batch", depth.batch, depth.batch_running, depth.batch_wait),
    ]


def _table(words: Sequence[str], numbers: Sequence[str]) -> "Table":
    """Make a table for 80 columns: numbers are never cut, words are."""
    from rich.table import Table

    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in words:
        made.add_column(name, overflow="ellipsis", no_wrap=False)
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _rate(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
