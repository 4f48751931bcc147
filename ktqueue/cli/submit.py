"""`ktqueue submit`: submit one job to Redis."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktqueue.cli.flags import AsJson, CommonFlags, expand, settings
from ktqueue.cli.requests import SamplingFlags, SystemMessage, read_messages, read_text
from ktqueue.cli.terminal.console import plain_text, write, write_json
from ktqueue.cli.terminal.failures import ExitCode, UsageFault
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.hub_model import served_name
from ktqueue.core.request import GenerationRequest, JobClass

if TYPE_CHECKING:
    from ktqueue.broker.jobs import JobRecord
    from ktqueue.client import SyncClient


@expand
def submit(
    common: CommonFlags,
    sampling: SamplingFlags,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads standard input, @FILE a file.", show_default=False)
    ] = None,
    messages: Annotated[
        str | None,
        typer.Option("--messages", metavar="JSON", help="A whole chat: JSON, - or @FILE.", show_default=False),
    ] = None,
    system: SystemMessage = None,
    chat: Annotated[
        bool, typer.Option("--chat/--completion", help="Apply the chat template, or continue the plain text.")
    ] = True,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Model.", show_default="the one served")
    ] = None,
    job_class: Annotated[JobClass, typer.Option("--class", help="Interactive: somebody waits.")] = JobClass.INTERACTIVE,
    priority: Annotated[
        int, typer.Option("--priority", metavar="INTEGER", help="-100 to 100; lower runs first in its class.")
    ] = 0,
    n: Annotated[int, typer.Option("-n", help="Choices.")] = 1,
    expires_in: Annotated[
        float | None,
        typer.Option("--expires-in", metavar="SECONDS", help="Expire after this time.", show_default=False),
    ] = None,
    job_id: Annotated[
        str | None,
        typer.Option("--job-id", metavar="ID", help="Id of the job; submitting it again finds it.", show_default=False),
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Write tokens as they come.", show_default="on a terminal"),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Write the job's id and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job and write its answer."""
    from ktqueue.cli.connection import client, only_model

    config = settings(common)
    if messages is not None and (prompt is not None or system is not None or not chat):
        raise UsageFault("--messages cannot be used with PROMPT, --system or --completion")
    if prompt is None and messages is None:
        if sys.stdin.isatty():
            raise UsageFault("give a PROMPT or --messages (- reads standard input)")
        prompt = "-"
    fields: dict[str, Any] = {
        "sampling": sampling.params(n=n),
        "job_class": job_class,
        "priority": priority,
        "expires_in": expires_in,
    }
    if messages is not None:
        fields["messages"] = read_messages(messages)
    elif chat:
        turns = [{"role": "system", "content": system}] if system is not None else []
        fields["messages"] = (*turns, {"role": "user", "content": read_text(prompt or "")})
    else:
        if system is not None:
            raise UsageFault("--system needs --chat")
        fields["prompt"] = read_text(prompt or "")
    request = GenerationRequest(model=served_name(model) if model else only_model(config), **fields)
    with client(config) as connected:
        record = connected.submit(request, job_id=job_id)
        if detach:
            if as_json:
                write_json({"id": record.id, "state": record.state.value})
            else:
                write(f"{record.id}\n")
            return
        live = stream if stream is not None else sys.stdout.isatty()
        follow(connected, record, live=live, as_json=as_json, cancel_on_interrupt=True)


def follow(
    connected: "SyncClient",
    record: "JobRecord",
    *,
    after: int = 0,
    live: bool,
    as_json: bool,
    cancel_on_interrupt: bool,
) -> None:
    """Write a job's text (or JSON) until it ends, with `live` as it arrives. Exits FAILED unless the job is done."""
    from ktqueue.openai.records import event_json, result_json

    as_it_comes = live and (as_json or record.readable_request().sampling.n == 1)
    events: list[TokenEvent] = []
    try:
        for event in connected.stream(record.id, after=after):
            events.append(event)
            if as_it_comes and as_json:
                write_json({"id": record.id, **event_json(event)}, indent=None)
            elif as_it_comes:
                write(plain_text(event.text))
    except (KeyboardInterrupt, BrokenPipeError) as reason:  # the output is not read any more
        state = connected.cancel(record.id).state if cancel_on_interrupt else None
        if isinstance(reason, KeyboardInterrupt):
            write("\n" * (as_it_comes and not as_json))
            if state in (JobState.DONE, JobState.FAILED):  # it ended first
                sys.stderr.write(f"{record.id} is {state.value} already\n")
            elif state is not None:
                sys.stderr.write(f"cancelled {record.id}\n")
        raise
    last = events[-1]
    choices = result_json(record, events)
    if as_it_comes:
        write("\n" * (not as_json))
    elif as_json:
        ended = {key: value for key, value in event_json(last).items() if key in ("state", "usage", "error")}
        write_json({"id": record.id, "model": record.model, "choices": choices, **ended})
    else:
        for choice in choices:
            write(f"[{choice['index']}] " * (len(choices) > 1) + plain_text(choice["text"]) + "\n")
    if last.state is not JobState.DONE:
        message = last.error.message if last.error is not None else f"it ended as {last.state}"
        sys.stderr.write(f"ktqueue: job {record.id}: {message}\n")
        raise typer.Exit(ExitCode.FAILED)
