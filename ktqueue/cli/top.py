"""`ktqueue top`: watch workers, queues and tokens per second, as tables for people or as JSON for programs."""

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktqueue.cli.flags import CommonFlags, expand, settings
from ktqueue.cli.terminal.console import results, span, write_json
from ktqueue.cli.terminal.short_names import ShortName
from ktqueue.core.config import Config
from ktqueue.core.errors import Unavailable
from ktqueue.core.model_card import SHORT_DIGEST
from ktqueue.core.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ktqueue.broker.batches import BatchLoad
    from ktqueue.broker.jobs import BoundJobs
    from ktqueue.broker.models import WorkerInfo
    from ktqueue.broker.snapshot import Snapshot

PATIENCE_SECONDS = 3.0  # a snapshot that takes longer counts as no answer
REMEMBERED_SECONDS = 15.0  # how long the remark that Redis was away is shown
NARROW = 80  # columns; in fewer some of a table's columns are left out
LEFT_OUT = ("host", "digest", "wanted")
FIXED_LINES = 5  # of a frame: the summary, a remark, an empty line, two table heads


@expand
def top(
    common: CommonFlags,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the state once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON for programs, one line for each update.")] = False,
) -> None:
    """Watch workers, queues and tokens per second. Ctrl-C exits."""
    import asyncio

    config = settings(common)
    with suppress(KeyboardInterrupt):
        asyncio.run(watch(config, interval, once=once, as_json=as_json))


@dataclass(frozen=True, slots=True)
class Look:
    """The latest snapshot. While Redis cannot be reached it is an older one, and `fault` says why."""

    snapshot: "Snapshot"
    fault: Unavailable | None = None
    remark: str = ""


async def watch(config: Config, interval: float, *, once: bool, as_json: bool) -> None:
    """Show a look at each interval until Ctrl-C. Raises Unavailable if Redis cannot be reached at the first."""
    console = results()
    moving = console.is_terminal and not console.is_dumb_terminal and not once and not as_json
    live = None
    if moving:
        from rich.live import Live

        live = Live(console=console, screen=True, auto_refresh=False)
    try:
        async with aclosing(looks(config, interval)) as stream:
            async for look in stream:
                if as_json:
                    write_json(_document(look), indent=None)
                elif live is not None:
                    live.start()
                    live.update(frame(look.snapshot, look.remark, console.height, console.width), refresh=True)
                else:
                    console.print(frame(look.snapshot, look.remark, columns=console.width))
                    sys.stdout.write("" if once else "\n")
                    sys.stdout.flush()
                if once:
                    return
    except BrokenPipeError:  # `ktqueue top --json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
    finally:
        if live is not None:
            live.stop()


def _document(look: Look) -> dict[str, Any]:
    return look.snapshot.document() if look.fault is None else {"time": time.time(), "error": look.fault.message}


async def looks(config: Config, interval: float) -> AsyncGenerator[Look, None]:
    """Take a Look every `interval` seconds, for ever. Raises Unavailable if Redis cannot be reached at the first."""
    import asyncio

    from ktqueue.broker.broker import Broker
    from ktqueue.broker.snapshot import take_snapshot

    last: Snapshot | None = None
    away, seen_at, back_at, remark = False, 0.0, 0.0, ""
    async with await Broker.open(config.broker) as broker:
        while True:
            fault = None
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    last = await take_snapshot(broker)
            except (Unavailable, TimeoutError) as error:
                fault = error if isinstance(error, Unavailable) else Unavailable("Redis does not answer")
                if last is None:
                    raise fault from error
            now = time.monotonic()
            if fault is not None:
                away, remark = True, f"{now - seen_at:.0f} s without an answer, trying again: {fault.message}"
            elif away:
                away, back_at, remark = False, now, f"Redis is back after {now - seen_at:.0f} s"
            elif now - back_at > REMEMBERED_SECONDS:
                remark = ""
            if fault is None:
                seen_at = now
            yield Look(last, fault, remark)
            await asyncio.sleep(interval)


def frame(snapshot: "Snapshot", remark: str = "", lines: int | None = None, columns: int = NARROW) -> "Group":
    """Return a summary, a remark and the tables. With `lines`, only as many rows as fit."""
    from rich.console import Group
    from rich.text import Text

    queues = [(depth.model, *row) for depth in snapshot.depths for row in depth.by_class()]
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
        _workers(shown_workers, columns),
        Text(),
        _queues(queues, snapshot.workers, columns),
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
            *_batches(snapshot.batches),
            f"Redis {format_bytes(snapshot.memory_used)}{limit}",
        )
    )


def _batches(load: "BatchLoad") -> list[str]:
    """Describe the batches that have not ended, if there are any."""
    if not load.count:
        return []
    parts = [f"{load.count} batch{'' if load.count == 1 else 'es'}", f"{load.lines_left:,} lines left"]
    if load.seconds_left is not None:
        parts.append(span(load.seconds_left))
    if load.unowned:
        parts.append(f"{load.unowned} without a control worker")
    return [", ".join(parts)]


def _unserved(bound: Sequence["BoundJobs"]) -> str:
    """Describe jobs that no running worker can take: the group that has waited longest, and how many others."""
    first = bound[0]
    needed = f"digest {first.digest[:SHORT_DIGEST]}" if first.digest else f"record format {first.format}"
    others = sum(jobs.interactive + jobs.batch for jobs in bound[1:])
    more = f" (and {others} more)" if others else ""
    return f"{first.interactive + first.batch} jobs of {first.model} wait for a worker with {needed}{more}"


def _workers(workers: Sequence["WorkerInfo"], columns: int) -> "Table":
    rows: list[Sequence[str]] = []
    for worker in workers:
        stats = worker.stats
        pages = f"{1 - stats.get('free_pages', 0) / stats['total_pages']:.0%}" if stats.get("total_pages") else ""
        rows.append(
            (
                "-".join(worker.worker_id.rsplit("-", 2)[1:]),  # the host has its own column
                worker.model,
                worker.host,
                span(worker.lease_left, digits=1),
                f"{stats.get('running', 0):.0f}/{worker.max_num_seqs}",
                pages,
                _rate(stats.get("generation_tokens_per_second", 0.0)),
                "draining"
                if stats.get("draining")
                else ""
                if worker.step_age is None
                else span(worker.step_age, digits=1),
            )
        )
    return _table(("worker", "model", "host"), ("lease", "rows", "pages", "tok/s", "last step"), rows, columns)


def _queues(
    queues: Sequence[tuple[str, str, int, int, float | None]], workers: Sequence["WorkerInfo"], columns: int
) -> "Table":
    listed: list[Sequence[str]] = []
    digests: dict[str, set[str]] = {}
    rates: defaultdict[tuple[str, str], float] = defaultdict(float)
    wanted: Counter[str] = Counter()
    held: defaultdict[str, set[str]] = defaultdict(set)
    for worker in workers:
        digests.setdefault(worker.model, set()).add(worker.digest[:SHORT_DIGEST])
        wanted[worker.model] += int(worker.stats.get("rows_wanted", 0))
        held[worker.model] |= {worker.rows_held_by} - {""}
        batch = worker.stats.get("batch_tokens_per_second", 0.0)
        rates[worker.model, "batch"] += batch
        rates[worker.model, "interactive"] += worker.stats.get("generation_tokens_per_second", 0.0) - batch
    for model, job_class, waiting, running, wait in queues:
        oldest = "" if wait is None else span(wait, digits=1)
        served = " ".join(sorted(digests.get(model, ())))
        rows = f"{wanted[model]:,}" if job_class == "batch" and wanted[model] else ""
        if rows and waiting and held[model]:
            rows += f" ({', '.join(sorted(held[model]))})"
        rate = _rate(rates[model, job_class])
        listed.append((model, job_class, served, f"{waiting:,}", f"{running:,}", rows, oldest, rate))
    words, numbers = ("queue", "class", "digest"), ("waiting", "running", "wanted", "oldest wait", "tok/s")
    return _table(words, numbers, listed, columns)


def _table(words: Sequence[str], numbers: Sequence[str], rows: list[Sequence[str]], columns: int) -> "Table":
    """Make a table: numbers are never cut, words are, but no two of a column so that they look the same."""
    from rich.table import Table

    listing = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    shown = [name not in LEFT_OUT or columns >= NARROW for name in (*words, *numbers)]
    for name in compress(words, shown):
        listing.add_column(name, overflow="ellipsis", no_wrap=False)
    for name in compress(numbers, shown[len(words) :]):
        listing.add_column(name, justify="right", no_wrap=True)
    values = [frozenset(column) for column in zip(*rows, strict=True)][: len(words)]
    for row in rows:
        cells: list[ShortName | str] = [ShortName(word, column) for word, column in zip(row, values, strict=False)]
        listing.add_row(*compress([*cells, *row[len(words) :]], shown))
    return listing


def _rate(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
