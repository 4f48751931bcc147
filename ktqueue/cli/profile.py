"""`ktqueue profile`: what the steps and tokens of a profile took, as a table, a trace, a flame graph and a page."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktqueue.cli.terminal.console import escaped, notes, plain_text, results, table
from ktqueue.cli.terminal.failures import UsageFault

if TYPE_CHECKING:
    from ktqueue.profiling.folder import ProcessProfile
    from ktqueue.profiling.request_times import RequestTimes
    from ktqueue.profiling.summary import Bucket, Part

PAGE, TRACE, FLAME = "profile.html", "trace.json", "flame.speedscope.json"
LEAST_SHARE = 0.0005  # a smaller part of a step is not shown


def profile(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where --profile wrote.", show_default=False)],
    tables: Annotated[bool, typer.Option("--table/--no-table", help="Print tables.")] = True,
    page: Annotated[bool, typer.Option("--page/--no-page", help=f"Write {PAGE}: plots for a browser.")] = True,
    trace: Annotated[
        bool, typer.Option("--trace/--no-trace", help=f"Write {TRACE} for ui.perfetto.dev or chrome://tracing.")
    ] = True,
    flame: Annotated[bool, typer.Option("--flame/--no-flame", help=f"Write {FLAME} for www.speedscope.app.")] = True,
    last: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="SECONDS", help="Only the end of the profile.", show_default="all of it"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for the files.", show_default="the profile's"),
    ] = None,
) -> None:
    """Show what steps, tokens and requests took: tables, a page of plots, a trace and a flame graph."""
    from ktqueue.profiling import flame as flames
    from ktqueue.profiling import page as pages
    from ktqueue.profiling import trace as traces
    from ktqueue.profiling.folder import ProfileError, read_profile
    from ktqueue.profiling.request_times import request_times

    try:
        processes = read_profile(folder, last_seconds=last)
    except ProfileError as error:
        raise UsageFault(error.message) from error
    requests = request_times(processes)
    if tables:
        for process in processes:
            _show(process)
        if requests:
            _show_requests(requests)
    target = output or folder
    target.mkdir(parents=True, exist_ok=True)
    if page:
        _write(target / PAGE, [pages.page(processes, requests).encode()])
    if trace:
        _write(target / TRACE, traces.trace(processes))
    if flame:
        _write(target / FLAME, flames.flame_graph(processes))


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a whole file, and say where it is."""
    try:
        with path.open("wb") as file:
            file.writelines(pieces)
    except OSError as error:  # a full disk does not say which file
        raise OSError(error.errno, error.strerror, str(path)) from error
    notes().print(f"wrote {path}", markup=False, soft_wrap=True)


def _show(process: "ProcessProfile") -> None:
    from ktqueue.profiling.summary import buckets, percentile

    console = results()
    head = process.head
    facts = [head.get("model"), head.get("cpu"), head.get("gpu")]
    title, about = (escaped(plain_text(text)) for text in (process.title, ", ".join(str(f) for f in facts if f)))
    console.print(f"[bold]{title}[/]  {about}", soft_wrap=True)
    if bandwidth := head.get("memory_bandwidth"):
        console.print(f"memory: {bandwidth / 1e9:.1f} GB/s by a probe at the start", style="dim")
    for loss in process.losses:
        console.print(loss, style="yellow")
    if process.requests:
        seconds = sorted(answer["seconds"] for answer in process.requests)
        middle, p95 = (_ms(percentile(seconds, part)) for part in (0.5, 0.95))
        console.print(f"{len(seconds):,} HTTP requests; median {middle} ms, p95 {p95} ms", style="dim")
    console.print()
    if found := buckets(process):
        _show_buckets(found)
        console.print()
        _show_parts("rows", [(bucket.rows, bucket.parts) for bucket in found])
        console.print()


def _show_requests(requests: "Sequence[RequestTimes]") -> None:
    from ktqueue.profiling.summary import percentile, request_parts

    seconds = sorted(times.seconds for times in requests)
    tokens = sum(times.tokens for times in requests)
    results().print(
        f"[bold]{len(requests)} requests[/]  {tokens:,} tokens; median {_ms(percentile(seconds, 0.5))} ms, "
        f"p95 {_ms(percentile(seconds, 0.95))} ms\n",
        soft_wrap=True,
    )
    _show_parts("", [("requests", request_parts(requests))])


def _show_buckets(found: "list[Bucket]") -> None:
    heads = ("rows", "steps", "tok/s", "ms", "p95", "experts", "MB a step", "GB/s", "memory", "least ms")
    listing = table(heads, right=heads[1:])
    listing.padding = (0, 1, 0, 0)  # narrow, so that it fits 80 columns
    for bucket in found:
        rate = bucket.expert_bandwidth
        listing.add_row(
            bucket.rows,
            f"{bucket.steps:,}",
            _digits(bucket.tokens_per_second),
            _ms(bucket.median),
            _ms(bucket.p95),
            f"{bucket.experts / bucket.steps:,.0f}" if bucket.experts else "",
            _digits(bucket.expert_bytes / bucket.steps / 1e6) if bucket.expert_bytes else "",
            _digits(rate / 1e9) if rate else "",
            f"{rate / bucket.bandwidth:.0%}" if rate and bucket.bandwidth else "",
            _ms(bucket.floor) if bucket.floor is not None else "",
        )
    results().print(listing)
    if any(bucket.uses or bucket.bus_bytes for bucket in found):
        _show_gpu_experts(found)


def _show_gpu_experts(found: "list[Bucket]") -> None:
    heads = ("rows", "experts on CPU", "on GPU", "found there", "MB fetched", "MB streamed")
    listing = table(heads, right=heads[1:])
    for bucket in found:
        listing.add_row(
            bucket.rows,
            f"{bucket.experts / bucket.steps:,.0f}",
            f"{bucket.gpu_experts / bucket.steps:,.0f}",
            "" if bucket.found is None else f"{bucket.found:.1%}",
            _digits(bucket.fetched_bytes / bucket.steps / 1e6),
            _digits(bucket.bus_bytes / bucket.steps / 1e6),
        )
    results().print()
    results().print(listing)


def _show_parts(title: str, groups: "list[tuple[str, Sequence[Part]]]") -> None:
    heads = (title, "part", "ms", "p95", "share")
    listing = table(heads, right=heads[2:])
    for name, parts in groups:
        for part in parts:
            if part.share >= LEAST_SHARE:
                listing.add_row(name, part.name, _ms(part.median), _ms(part.p95), f"{part.share:.1%}")
                name = ""
        listing.add_section()
    results().print(listing)


def _ms(seconds: float) -> str:
    return _digits(seconds * 1e3)


def _digits(value: float) -> str:
    """A number with about four digits."""
    return f"{value:,.{3 if value < 1 else 2 if value < 100 else 1 if value < 1000 else 0}f}"
