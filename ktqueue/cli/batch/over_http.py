"""`ktqueue batch submit, status, follow, cancel, fetch, list`: batches that a server runs, over OpenAI's API."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktqueue.cli.batch.view import counts, faults, note, show, show_list
from ktqueue.cli.flags import AsJson, ConfigFile, expand
from ktqueue.cli.terminal.console import notes, results, write, write_json
from ktqueue.cli.terminal.failures import ExitCode, UsageFault
from ktqueue.core.codec import Json
from ktqueue.core.errors import KtqueueError, Unavailable

if TYPE_CHECKING:
    from ktqueue.cli.batch.service import BatchService

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0  # seconds between two looks at a batch
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # entries, and characters of each, in OpenAI's API
MAX_LISTED = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """The server that runs the batches."""

    config: ConfigFile = None
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url", "--url", metavar="URL", help="A gateway or another server.", show_default="the own gateway"
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", help="The server's key.", show_default=False, envvar="OPENAI_API_KEY"),
    ] = None

    def connect(self) -> "BatchService":
        """Return the batches of the server. Raises ConfigError."""
        from ktqueue.cli.batch.service import BatchService

        base_url = self.base_url
        if base_url is None:
            from ktqueue.core.config import load_config
            from ktqueue.workers.supervision.supervisor import gateway_url

            base_url = gateway_url(load_config(self.config, os.environ, {}))
        return BatchService(base_url, self.api_key)

    def again(self, command: str, batch_id: str) -> str:
        """Return the command line of another command of the batch on the same server. The key is left out."""
        address = f" --base-url {self.base_url}" if self.base_url else ""
        return f"`ktqueue batch {command} {batch_id}{address}`"


BatchId = Annotated[str, typer.Argument(metavar="ID", help="The batch.")]


@expand
def submit(
    server: ServerFlags,
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="OpenAI batch lines of one endpoint and model.")],
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", metavar="PATH", help="What the lines call.", show_default="the first line's url"),
    ] = None,
    window: Annotated[str, typer.Option("--window", metavar="TIME", help="Lines that run later expire.")] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option("--metadata", metavar="KEY=VALUE", help="Kept with the batch; may be repeated.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for its end, with a progress bar.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a file, upload it, and create a batch. Prints its id.

    Works with every server that has OpenAI's /v1/files and /v1/batches.
    """
    from ktqueue.cli.terminal.progress import Bar

    if not source.is_file():  # it is read to be checked, and again to be sent
        raise UsageFault(f"{source}: {'is not a regular file' if source.exists() else 'no such file'}")
    entries = _metadata(metadata or [])
    called = _check_input(source, endpoint)
    with server.connect() as service:
        with Bar("upload", source.stat().st_size, in_bytes=True) as bar:
            file_id = service.upload(source, bar.update)
        try:
            batch = service.create(file_id, called, window, entries)
        except Unavailable:  # it may have been created
            raise
        except KtqueueError:
            service.delete_file(file_id)
            raise
        if follow:
            if not as_json:
                write(f"{batch['id']}\n")
            _follow(service, server, batch["id"], as_json=as_json)
        elif as_json:
            write_json(batch)
        else:
            write(f"{batch['id']}\n")
            notes().print(f"{server.again('follow', batch['id'])} shows its progress", style="dim", markup=False)


@expand
def status(server: ServerFlags, batch_id: BatchId, as_json: AsJson = False) -> None:
    """Show one batch."""
    with server.connect() as service:
        batch = service.batch(batch_id)
    write_json(batch) if as_json else show(batch)


@expand
def follow(server: ServerFlags, batch_id: BatchId, as_json: AsJson = False) -> None:
    """Show the progress of a batch until it ends. Ctrl-C leaves it running.

    The exit code is 1 if the batch or a line of it failed, 130 after Ctrl-C.
    """
    with server.connect() as service:
        _follow(service, server, batch_id, as_json=as_json)


@expand
def cancel(server: ServerFlags, batch_id: BatchId, as_json: AsJson = False) -> None:
    """Cancel a batch. The lines that are done are kept, and can be fetched when it has ended."""
    with server.connect() as service:
        batch = service.cancel(batch_id)
    if as_json:
        write_json(batch)
    else:
        write(f"{batch['id']} {batch.get('status')}\n")


@expand
def fetch(
    server: ServerFlags,
    batch_id: BatchId,
    target: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="File for the answers.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace earlier files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download what a batch wrote: answers to OUT.jsonl, failed lines to OUT.errors.jsonl.

    A file appears when it is complete.
    """
    from ktqueue.batches.output import OutputPaths
    from ktqueue.cli.batch.service import ENDED

    paths = OutputPaths.of(target)
    for path in (paths.answers, paths.failures):
        if path.exists() and not overwrite:
            raise UsageFault(f"{path} exists already: choose another output, or --overwrite")
    written: dict[str, str | None] = {"answers": None, "failures": None}
    with server.connect() as service:
        batch = service.batch(batch_id)
        files = {"answers": batch.get("output_file_id"), "failures": batch.get("error_file_id")}
        if not any(files.values()):
            if batch.get("status") in ENDED:
                raise KtqueueError("\n".join([f"{batch_id} is {batch['status']} and has no output", *faults(batch)]))
            raise KtqueueError(
                f"{batch_id} is {batch.get('status')} and has no output yet; {server.again('follow', batch_id)} waits"
            )
        for name, path in (("answers", paths.answers), ("failures", paths.failures)):
            if file_id := files[name]:
                _download(service, file_id, path)
                written[name] = str(path)
            else:
                path.unlink(missing_ok=True)  # of an earlier batch
    if as_json:
        write_json({"id": batch_id, "status": batch.get("status"), **written})
        return
    for name, shown in written.items():
        if shown:
            results().print(f"{name:9} {shown}", markup=False, soft_wrap=True)


@expand
def list_batches(
    server: ServerFlags,
    limit: Annotated[int, typer.Option("--limit", min=1, max=MAX_LISTED, help="Most batches to list.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the batches of the key, newest first."""
    with server.connect() as service:
        batches = service.batches(limit)
    if as_json:
        write_json(batches)
        return
    if not batches:
        sys.stderr.write("no batches\n")
        return
    show_list(batches)


def _metadata(pairs: list[str]) -> dict[str, str]:
    """Return KEY=VALUE pairs as a dict. Raises UsageFault."""
    entries: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals or len(key) > MAX_KEY or len(value) > MAX_VALUE:
            raise UsageFault(
                f"--metadata must be KEY=VALUE with at most {MAX_KEY} and {MAX_VALUE} characters, got {pair!r:.80}"
            )
        entries[key] = value
    if len(entries) > MAX_METADATA:
        raise UsageFault(f"--metadata may be given {MAX_METADATA} times, got {len(entries)} keys")
    return entries


def _check_input(source: Path, endpoint: str | None) -> str:
    """Check every line, and return the endpoint that all of them call. Raises BatchFault, UsageFault."""
    from ktqueue.batches.input import LineFault, attempt_lines, survey
    from ktqueue.batches.stored.validation import MAX_LINES

    if endpoint is None:
        first = next(attempt_lines(source), None)
        endpoint = None if first is None or isinstance(first, LineFault) else first.url
    found = survey(source, model=None, url=endpoint)
    if found.lines > MAX_LINES:
        raise UsageFault(f"{source}: a batch has at most {MAX_LINES} lines, got {found.lines}")
    if found.modelless is not None:
        raise UsageFault(f"{source}:{found.modelless}: body.model is missing")
    if len(found.models) > 1:
        (first_model, _), (model, number), *_ = found.models.items()
        raise UsageFault(
            f"{source}:{number}: all lines of a batch need the same model: the first has {first_model!r}, "
            f"this one {model!r}"
        )
    assert endpoint is not None  # otherwise the first line is faulty
    return endpoint


def _follow(service: "BatchService", server: ServerFlags, batch_id: str, *, as_json: bool) -> None:
    """Show a bar until the batch ends, then the batch. Raises typer.Exit unless all lines have an answer."""
    try:
        batch = _until_ended(service, batch_id)
    except KeyboardInterrupt:
        notes().print(
            f"{batch_id} keeps running; {server.again('follow', batch_id)} shows it again", style="dim", markup=False
        )
        raise
    if as_json:
        write_json(batch)
    else:
        show(batch)
        if batch.get("output_file_id") or batch.get("error_file_id"):
            hint = f"{server.again('fetch', f'{batch_id} -o OUT.jsonl')} downloads its output"
            notes().print(hint, style="dim", markup=False)
    if batch.get("status") != "completed" or counts(batch)[1]:
        raise typer.Exit(ExitCode.FAILED)


def _until_ended(service: "BatchService", batch_id: str) -> Json:
    from ktqueue.cli.batch.service import ENDED
    from ktqueue.cli.terminal.progress import Bar

    batch, pause = service.batch(batch_id), FIRST_PAUSE
    with Bar("batch") as bar:
        while True:
            done, _, total = counts(batch)
            bar.update(done, total or None, note(batch))
            if batch.get("status") in ENDED:
                return batch
            time.sleep(pause)
            pause = min(pause * 1.05, LONGEST_PAUSE)
            try:
                batch = service.batch(batch_id)
            except KtqueueError as error:
                if not isinstance(error, Unavailable) and error.retry_after is None:
                    raise
                bar.update(done, total or None, "waiting for the server")  # the batch goes on, so this command does too
                pause = min(max(pause, error.retry_after or 0), LONGEST_PAUSE)


def _download(service: "BatchService", file_id: str, path: Path) -> None:
    """Write a stored file to `path`, which appears when it is complete and on disk."""
    from ktqueue.cli.terminal.progress import Bar

    with service.content(file_id) as (parts, size), Bar(path.name, size, in_bytes=True) as bar, _draft(path) as draft:
        done = 0
        with draft.open("wb") as file:
            for part in parts:
                done += file.write(part)
                bar.update(done)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, which takes the name `path` at the end, and is deleted after an exception."""
    draft = path.with_name(f"{path.name}.part")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
