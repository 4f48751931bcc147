"""`ktqueue jobs`: list, show, follow, cancel, retry."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ktqueue.cli.flags import AsJson, CommonFlags, expand, settings
from ktqueue.cli.terminal.console import results, span, table, write, write_json
from ktqueue.cli.terminal.failures import EXIT_CODES_HELP, ExitCode, UsageFault
from ktqueue.core.errors import JobConflict, JobNotFound
from ktqueue.core.events import JobState
from ktqueue.core.request import JobClass

if TYPE_CHECKING:
    from rich.table import Table

    from ktqueue.broker.broker import Broker
    from ktqueue.broker.jobs import JobRecord

JobId = Annotated[str, typer.Argument(metavar="ID", help="The job.")]


def application() -> typer.Typer:
    """The commands of `ktqueue jobs`."""
    app = typer.Typer(no_args_is_help=True, help="List, show, follow, cancel and retry jobs.", epilog=EXIT_CODES_HELP)
    app.command("list")(list_jobs)
    app.command("show")(show)
    app.command("follow")(follow)
    app.command("cancel")(cancel)
    app.command("retry")(retry)
    return app


@expand
def list_jobs(
    common: CommonFlags,
    state: Annotated[JobState | None, typer.Option("--state", help="Only jobs in this state.")] = None,
    job_class: Annotated[JobClass | None, typer.Option("--class", help="Only jobs of this class.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Only jobs of this model.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Only jobs of this tenant.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000, help="Most jobs to list.")] = 20,
    watch: Annotated[
        float | None, typer.Option("--watch", min=0.1, max=3600, help="List them again after so many seconds.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    from ktqueue.cli.connection import ask, ask_again
    from ktqueue.openai.records import record_json

    async def question(broker: "Broker") -> "Sequence[JobRecord]":
        return await broker.jobs.list(state=state, limit=limit, tenant=tenant, job_class=job_class, model=model)

    def show(records: "Sequence[JobRecord]") -> None:
        if as_json:
            write_json([record_json(record) for record in records], indent=None if watch else 2)
        elif records:
            results().print(_table(records))
        else:
            sys.stderr.write("no jobs\n")

    if watch is None:
        show(ask(settings(common), question))
    else:
        ask_again(settings(common), question, show if as_json else _page(show), watch)


def _page(show: "Callable[[Sequence[JobRecord]], None]") -> "Callable[[Sequence[JobRecord]], None]":
    """Show each list on a cleared screen, or below the last list if there is no terminal."""

    def page(records: "Sequence[JobRecord]") -> None:
        console = results()
        if console.is_terminal:
            console.clear()
        show(records)
        if not console.is_terminal:
            write("\n")

    return page


def _table(records: "Sequence[JobRecord]") -> "Table":
    now = time.time()
    rows = [
        (
            record.id,
            _state(record),
            record.job_class.value,
            record.model,
            span(now - record.created_at),
            str(record.usage.completion_tokens) if record.usage else "",
            str(record.attempts),
        )
        for record in records
    ]
    heads = ("id", "state", "class", "model", "age", "tokens", "tries")
    return table(heads, rows, right=("age", "tokens", "tries"))


@expand
def show(common: CommonFlags, job_id: JobId, as_json: AsJson = False) -> None:
    """Show one job: its record and its request."""
    from ktqueue.cli.connection import ask
    from ktqueue.openai.records import record_json

    record = ask(settings(common), lambda broker: broker.jobs.get(job_id))
    document = {**record_json(record), "request": None if record.request is None else asdict(record.request)}
    if as_json:
        write_json(document)
        return
    results().print(table(("field", "value"), _lines(document)), markup=False)


@expand
def follow(
    common: CommonFlags,
    job_id: JobId,
    after: Annotated[int, typer.Option("--after", min=0, metavar="SEQ", help="Skip events up to this number.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write a job's tokens as they arrive, from the first. Ctrl-C leaves the job running."""
    from ktqueue.cli.connection import client
    from ktqueue.cli.submit import follow as write_events

    with client(settings(common)) as connected:
        write_events(
            connected, connected.status(job_id), after=after, live=True, as_json=as_json, cancel_on_interrupt=False
        )


@expand
def cancel(
    common: CommonFlags,
    job_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="The jobs.")],
    as_json: AsJson = False,
) -> None:
    """Cancel jobs: a queued one ends at once, a running one within a step."""
    from ktqueue.cli.connection import ask
    from ktqueue.openai.records import record_json

    faults: list[str] = []

    async def question(broker: "Broker") -> "list[JobRecord]":
        found = []
        for job_id in job_ids:
            try:
                found.append(await broker.jobs.cancel(job_id))
            except JobNotFound as error:
                faults.append(error.message)
        return found

    records = ask(settings(common), question)
    if as_json:
        write_json([record_json(record) for record in records])
    else:
        for record in records:
            results().print(f"{record.id} {_state(record)}")
    _end(faults)


@expand
def retry(
    common: CommonFlags,
    job_ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="The jobs.")] = None,
    error: Annotated[
        str | None, typer.Option("--error", metavar="CODE", help="All jobs that failed with this code (poison_job).")
    ] = None,
    all_failed: Annotated[bool, typer.Option("--all-failed", help="All failed jobs.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send failed jobs again, each as a new job from the beginning."""
    from ktqueue.cli.connection import ask
    from ktqueue.openai.records import record_json

    if sum((bool(job_ids), error is not None, all_failed)) != 1:
        raise UsageFault("give either IDs, --error CODE or --all-failed")
    config = settings(common)
    chosen = job_ids or [
        record.id for record in ask(config, _retriable) if all_failed or (record.error and record.error.code == error)
    ]
    if not job_ids and chosen and not yes:
        if not sys.stdin.isatty():
            raise UsageFault(f"{len(chosen)} jobs would be sent again; confirm with --yes")
        if not typer.confirm(f"Send {len(chosen)} jobs again?", err=True):
            raise typer.Exit(ExitCode.FAILED)
    faults: list[str] = []

    async def question(broker: "Broker") -> "list[tuple[str, JobRecord]]":
        sent = []
        for job_id in chosen:
            try:
                sent.append((job_id, await broker.jobs.retry(job_id)))
            except (JobNotFound, JobConflict) as fault:
                faults.append(fault.message)
        return sent

    sent = ask(config, question)
    if as_json:
        write_json([{**record_json(record), "retry_of": job_id} for job_id, record in sent])
    else:
        for job_id, record in sent:
            results().print(f"{job_id} -> {record.id} {_state(record)}")
        if not sent and not faults:
            sys.stderr.write(f"no failed jobs {f'with the code {error} ' if error else ''}to send again\n")
    _end(faults)


def _end(faults: Sequence[str]) -> None:
    """Write the faults of single jobs. Raises typer.Exit if there are any."""
    for message in faults:
        sys.stderr.write(f"ktqueue: {message}\n")
    if faults:
        raise typer.Exit(ExitCode.FAILED)


async def _retriable(broker: "Broker") -> "list[JobRecord]":
    """Failed jobs whose requests are still stored."""
    records = await broker.jobs.list(state=JobState.FAILED, limit=1_000)
    return [record for record in records if not record.request_dropped and record.retried_as is None]


def _state(record: "JobRecord") -> str:
    colour = {JobState.RUNNING: "cyan", JobState.DONE: "green", JobState.FAILED: "red"}.get(record.state, "default")
    asked = " (cancelling)" if record.cancel_requested and not record.state.terminal else ""
    return f"[{colour}]{record.state.value}{asked}[/]"


def _lines(document: object, prefix: str = "") -> list[tuple[str, str]]:
    """Flatten a document to dotted names and texts. Empty values are left out."""
    if isinstance(document, dict):
        return [line for key, value in document.items() for line in _lines(value, f"{prefix}.{key}" if prefix else key)]
    if isinstance(document, list | tuple) and document and not isinstance(document[0], int | float | str):
        return [line for i, value in enumerate(document) for line in _lines(value, f"{prefix}[{i}]")]
    if document is None or document == () or document == []:
        return []
    return [(prefix, str(document))]
