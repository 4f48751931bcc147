"""How a batch object of OpenAI's API is shown in a terminal. Fields that a server leaves out are not shown."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from ktqueue.cli.terminal.console import plain_text, results, span, table
from ktqueue.core.codec import Json

_HELD_BY = {
    "rows": "all rows are taken",
    "costs": "more rows would not be faster",
    "pages": "the cache is full",
    "interactive": "interactive jobs go first",
    "workers": "no worker serves the model",
}
_ENDED_AT = ("completed_at", "failed_at", "expired_at", "cancelled_at")


def show(batch: Json) -> None:
    """Write the fields of a batch and its errors."""
    console = results()
    rows = [(plain_text(name), plain_text(value)) for name, value in _fields(batch)]
    console.print(table(("field", "value"), rows), markup=False)
    for fault in faults(batch):
        console.print(fault, markup=False, soft_wrap=True)


def show_list(batches: Sequence[Json]) -> None:
    """Write a table of batches."""
    now = time.time()
    listing = table(("id", "status", "lines", "failed", "model", "age"), right=("lines", "failed", "age"))
    for batch in batches:
        done, failed, total = counts(batch)
        listing.add_row(
            batch["id"],
            str(batch.get("status")),
            f"{done}/{total}",
            str(failed),
            str(batch.get("model") or ""),
            span(now - batch.get("created_at", now)),
        )
    results().print(listing, markup=False)


def counts(batch: Json) -> tuple[int, int, int]:
    """Return how many lines are done, how many of these failed, and how many there are."""
    counts = batch.get("request_counts") or {}
    failed = counts.get("failed") or 0
    return (counts.get("completed") or 0) + failed, failed, counts.get("total") or 0


def note(batch: Json) -> str:
    """Return what the bar says beside the number of lines."""
    failed = counts(batch)[1]
    parts = [str(batch.get("status")).replace("_", " ")] if batch.get("status") != "in_progress" else []
    parts += [f"{failed} failed"] * bool(failed)
    progress = batch.get("progress") or {}
    if progress.get("held_by") == "workers":
        parts.append(f"waiting for a worker of {batch.get('model')}")
    elif speed := progress.get("tokens_per_second"):
        parts.append(f"{speed:.0f} tok/s")
    return ", ".join(parts)


def faults(batch: Json) -> list[str]:
    """Return a line for each error of a batch."""
    errors = (batch.get("errors") or {}).get("data") or ()
    places = (f"line {error['line']}: " if error.get("line") else "" for error in errors)
    return [plain_text(f"{place}{error.get('message')}") for place, error in zip(places, errors, strict=True)]


def _fields(batch: Json) -> Iterator[tuple[str, str]]:
    """Yield what is shown of a batch, by name."""
    done, failed, total = counts(batch)
    yield "id", batch["id"]
    yield "status", str(batch.get("status"))
    if total:
        yield "lines", f"{done} of {total}" + (f", {failed} failed" if failed else "")
    for name in ("endpoint", "model", "input_file_id", "output_file_id", "error_file_id"):
        if batch.get(name):
            yield name.removesuffix("_id").replace("_", " "), str(batch[name])
    usage: Any = batch.get("usage") or {}
    if usage.get("total_tokens"):
        yield "tokens", f"{usage.get('input_tokens', 0)} in, {usage.get('output_tokens', 0)} out"
    progress: Any = batch.get("progress") or {}
    if progress.get("tokens_per_second"):
        yield "speed", f"{progress['tokens_per_second']:.0f} tok/s"
    if progress.get("seconds_left"):
        yield "time left", span(progress["seconds_left"])
    if progress.get("running") or progress.get("waiting"):
        reasons = [_HELD_BY.get(each, each) for each in str(progress.get("held_by") or "").split(", ") if each]
        waiting = f"{progress.get('waiting') or 0} waiting" + (f": {', '.join(reasons)}" if reasons else "")
        yield "in flight", f"{progress.get('running') or 0} running, {waiting}"
    created, now = batch.get("created_at"), time.time()
    if created:
        yield "created", f"{span(now - created)} ago"
        if ended := next((batch[name] for name in _ENDED_AT if batch.get(name)), None):
            yield "took", span(ended - created)
    for name, value in (batch.get("metadata") or {}).items():
        yield f"metadata {name}", str(value)
