"""`ktqueue batch`, and its command `run`: a file of OpenAI batch lines in, a file of answers out."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktqueue.cli.batch import over_http
from ktqueue.cli.flags import AsJson, CommonFlags, expand, settings
from ktqueue.cli.terminal.console import results, write_json
from ktqueue.cli.terminal.failures import EXIT_CODES_HELP, ExitCode, UsageFault
from ktqueue.core.config import BrokerConfig
from ktqueue.core.request import JobClass

if TYPE_CHECKING:
    from ktqueue.cli.batch.session import BatchJob, Summary

STANDARD_INPUT = Path("-")


def application() -> typer.Typer:
    """The commands of `ktqueue batch`."""
    app = typer.Typer(no_args_is_help=True, help="Run files of requests, here or on a server.", epilog=EXIT_CODES_HELP)
    here, there = "Through Redis", "On a gateway, or a server with OpenAI's API"
    app.command("run", rich_help_panel=here)(run)
    app.command("submit", rich_help_panel=there)(over_http.submit)
    app.command("status", rich_help_panel=there)(over_http.status)
    app.command("follow", rich_help_panel=there)(over_http.follow)
    app.command("cancel", rich_help_panel=there)(over_http.cancel)
    app.command("fetch", rich_help_panel=there)(over_http.fetch)
    app.command("list", rich_help_panel=there)(over_http.list_batches)
    return app


@expand
def run(
    common: CommonFlags,
    source: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="OpenAI batch lines or plain lines; - is standard input.")
    ],
    target: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="File for the answers.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Replaces the model of the lines.")
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency",
            min=1,
            metavar="N",
            help="Lines that run at once.",
            show_default="twice the workers' rows",
        ),
    ] = None,
    job_class: Annotated[JobClass, typer.Option("--class", help="Interactive: somebody waits.")] = JobClass.BATCH,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed lines again.")] = False,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Let invalid lines fail, and run the others.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete earlier answers.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run OpenAI batch lines, of chats, completions, responses or messages. The same command again continues a run.

    A plain line is only a body, {"prompt": "..."} or {"messages": [...]}. Its id is its line number.

    Answers are appended to OUT.jsonl as they arrive, failures to OUT.errors.jsonl, in any order. The exit code is 1 if
    a line failed, 130 if the run was interrupted. Ctrl-C waits for the running lines. A second Ctrl-C leaves them in
    Redis, where the next run finds them.
    """
    from ktqueue.cli.batch.session import BatchJob

    from_standard_input = source == STANDARD_INPUT
    if from_standard_input:
        from ktqueue.batches.spool import spool

        source = spool(sys.stdin.buffer, target, overwrite=overwrite)
    elif not source.is_file():
        raise UsageFault(f"{source}: no such file")
    job = BatchJob(
        source=source,
        target=target,
        model=model,
        window=max_concurrency,
        job_class=job_class,
        overwrite=overwrite,
        retry_failed=retry_failed,
        skip_invalid=skip_invalid,
    )
    summary = run_batch(settings(common).broker, job)
    if as_json:
        write_json(_plain(summary))
    else:
        again = f"`ktqueue batch run {source} -o {target}`" if from_standard_input else "the same command again"
        _show(summary, again)
    if summary.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if summary.failed or summary.answered < summary.total:  # fewer if the input became shorter meanwhile
        raise typer.Exit(ExitCode.FAILED)


def run_batch(broker: BrokerConfig, job: "BatchJob") -> "Summary":
    """Check the input, then run the lines without an answer. Raises UsageFault, ModelNotFound, Unavailable, OSError."""
    import asyncio

    from ktqueue.batches.errors import BatchFault
    from ktqueue.batches.input import survey
    from ktqueue.batches.output import BatchOutput, OutputPaths
    from ktqueue.batches.spool import spool_path
    from ktqueue.cli.batch.session import session

    OutputPaths.of(job.target).check_differs_from(job.source)
    try:
        found = survey(job.source, model=job.model, skip_invalid=job.skip_invalid)
    except BatchFault:
        if (
            job.source == spool_path(job.target) and not job.target.exists()
        ):  # nothing was run, and the next input may differ
            job.source.unlink(missing_ok=True)
        raise
    output = BatchOutput(job.target, overwrite=job.overwrite, retry_failed=job.retry_failed)
    try:
        strangers = output.unknown_ids(found.ids)
        if strangers:
            raise UsageFault(
                f"{job.target} has answers to lines that are not in {job.source}, such as {strangers[0]!r}: "
                "choose another output, or --overwrite"
            )
        return asyncio.run(session(broker, job, found, output))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        finished = len(output.ids) == found.lines
        output.close(finished=finished)
        if finished and job.source == spool_path(job.target):
            job.source.unlink(missing_ok=True)


def _plain(summary: "Summary") -> dict[str, Any]:
    return {name: getattr(summary, name) for name in summary.__slots__}


def _show(summary: "Summary", again: str) -> None:
    console = results()
    done = summary.answered + summary.failed
    parts = [f"{done} of {summary.total} lines"]
    if summary.skipped:
        parts.append(f"{summary.skipped} of them earlier")
    parts += [f"{summary.failed} failed"] * bool(summary.failed)
    parts += [f"{summary.tokens} tokens in {summary.seconds:.1f} s", f"{summary.tokens_per_second:.0f} tok/s"]
    console.print(", ".join(parts), markup=False)
    console.print(f"answers   {summary.output}", markup=False)
    if summary.errors:
        console.print(f"failures  {summary.errors}", markup=False)
    if done < summary.total:
        console.print(f"{again} continues from here", style="dim", markup=False)
