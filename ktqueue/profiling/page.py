"""A profile as one page of plots. It needs no network and no script."""

import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Final

from ktqueue.core.expert_work import ExpertUses
from ktqueue.profiling.folder import Line, ProcessProfile
from ktqueue.profiling.plots import COLOURS, Curve, bars, curves, heat, stacked
from ktqueue.profiling.records import STEP_PARTS
from ktqueue.profiling.request_times import RequestTimes
from ktqueue.profiling.summary import Bucket, Part, buckets, percentile, request_parts

MOST_POINTS, STEPS_PER_POINT = 240, 8  # most points of a curve, and least steps of one on average
GAP_BARS = 60
STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c1c1c; --dim: #666; --grid: #ddd; --paper: #fff; --heat: #b3400a }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --dim: #a0a0a0; --grid: #3a3a3a; --paper: #161616; --heat: #ff9d5c }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1040px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid var(--grid);
  padding-top: 1rem }
p { color: var(--dim) } figure { margin: 1.5rem 0 } figcaption { margin-bottom: .3rem }
svg { width: 100%; height: auto; display: block } svg text { font-size: 12px; fill: var(--dim) }
.grid { stroke: var(--grid) } .cell { fill: var(--heat) }
.line { fill: none; stroke-width: 1.5; stroke-linecap: round; stroke-linejoin: round }
.key { margin-left: 1rem; color: var(--dim); font-size: .9em; white-space: nowrap }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .tables { overflow-x: auto }
th, td { text-align: right; padding: .15rem .8rem; border-bottom: 1px solid var(--grid) }
th { color: var(--dim); font-weight: 600 } th:first-child, td:first-child { text-align: left; padding-left: 0 }
"""


def page(processes: Sequence[ProcessProfile], requests: Sequence[RequestTimes]) -> str:
    """The HTML document."""
    sections = [_process(process) for process in processes if process.steps]
    if requests:
        sections.append(_requests(requests))
    if not sections:
        sections.append("<p>There are no steps and no tokens in this profile.</p>\n")
    title = f"ktqueue profile: {', '.join(sorted({str(p.head['model']) for p in processes if 'model' in p.head}))}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{''.join(sections)}</body></html>\n"
    )


def _process(process: ProcessProfile) -> str:
    head, steps = process.head, process.steps
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(head.get("started", 0.0)))
    facts = [head.get("cpu"), head.get("gpu"), f"threads: {head.get('threads')}", began, f"{len(steps):,} steps"]
    if bandwidth := head.get("memory_bandwidth"):
        facts.append(f"memory {bandwidth / 1e9:.1f} GB/s by a probe at the start")
    facts += process.losses
    x, groups = _groups(steps)
    plots = [
        curves(
            "Time of steps",
            "seconds",
            "ms",
            [
                Curve("95th percentile", x, [1e3 * _of(group, "seconds", 0.95) for group in groups], COLOURS[1]),
                Curve("median", x, [1e3 * _of(group, "seconds", 0.5) for group in groups], COLOURS[0]),
            ],
        ),
        stacked(
            "Parts of steps",
            "seconds",
            "ms, mean",
            [
                Curve(part, x, [1e3 * _mean(group, part) for group in groups], colour)
                for part, colour in zip(STEP_PARTS, COLOURS, strict=False)
                if any(step[part] for step in steps)
            ],
        ),
        curves("Rows", "seconds", "rows, mean", [Curve("rows", x, [_mean(g, "rows") for g in groups], COLOURS[2])]),
    ]
    if any(step.get("cpu_bytes") for step in steps):
        plots.append(_bandwidths(x, groups, bandwidth))
    if process.routing:
        counts = _of_one_shape([line["uses"] for line in process.routing])  # [times, layers, experts]
        uses = [[sum(cell) for cell in zip(*layers, strict=True)] for layers in zip(*counts, strict=True)]
        plots.append(heat("How often each expert was chosen", "expert", "layer", uses))
    return (
        f"<h2>{escape(process.title)}</h2><p>{escape(', '.join(str(fact) for fact in facts if fact))}</p>\n"
        f'<div class="tables">{_buckets(buckets(process))}</div>\n{"".join(plots)}'
    )


def _bandwidths(x: Sequence[float], groups: Sequence[Sequence[Line]], bandwidth: float | None) -> str:
    read = [
        sum(step.get("cpu_bytes", 0) for step in group) / seconds
        if (seconds := sum(step.get("cpu_seconds", 0.0) for step in group))
        else math.nan
        for group in groups
    ]
    shown = [Curve("experts on the CPU", x, [rate / 1e9 for rate in read], COLOURS[0])]
    if bandwidth:
        shown.append(Curve("memory, by the probe", [x[0], x[-1]], [bandwidth / 1e9] * 2, COLOURS[5]))
    return curves("Weights of experts that are read", "seconds", "GB/s", shown)


def _requests(requests: Sequence[RequestTimes]) -> str:
    gaps = sorted(1e3 * (b - a) for times in requests for a, b in pairwise(times.token_ends))
    tokens = sum(times.tokens for times in requests)
    plots = ""
    if gaps:
        end = percentile(gaps, 0.99) or 1.0
        edges = [end * place / GAP_BARS for place in range(GAP_BARS + 1)]
        counts = [0.0] * GAP_BARS
        for gap in gaps:
            if gap < end:
                counts[int(gap / end * GAP_BARS)] += 1
        plots = bars(f"Time between two tokens (99 % of {len(gaps):,})", "ms", "tokens", edges, counts)
    parts = [part for part in request_parts(requests) if part.share >= 0.0005]
    return (
        f"<h2>Requests</h2><p>{len(requests):,} requests, {tokens:,} tokens. Each part is the sum over a request's "
        f'tokens.</p>\n<div class="tables">{_parts(parts)}</div>\n{plots}'
    )


def _buckets(found: Iterable[Bucket]) -> str:
    heads = ("rows", "steps", "tokens/s", "median ms", "p95 ms", "MB a step", "GB/s", "memory", "least ms")
    rows = [
        (
            bucket.rows,
            f"{bucket.steps:,}",
            f"{bucket.tokens_per_second:,.1f}",
            f"{1e3 * bucket.median:,.3f}",
            f"{1e3 * bucket.p95:,.3f}",
            f"{bucket.expert_bytes / bucket.steps / 1e6:,.2f}" if bucket.expert_bytes else "",
            f"{bucket.expert_bandwidth / 1e9:,.2f}" if bucket.expert_bytes else "",
            f"{bucket.expert_bandwidth / bucket.bandwidth:.0%}" if bucket.bandwidth and bucket.expert_bytes else "",
            f"{1e3 * bucket.floor:,.3f}" if bucket.floor is not None else "",
        )
        for bucket in found
    ]
    return _table(heads, rows)


def _parts(parts: Iterable[Part]) -> str:
    rows = [(p.name, f"{1e3 * p.median:,.3f}", f"{1e3 * p.p95:,.3f}", f"{p.share:.1%}") for p in parts]
    return _table(("part", "median ms", "p95 ms", "share"), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line('th', heads)}{''.join(line('td', row) for row in rows)}</table>"


def _groups(steps: Sequence[Line]) -> tuple[list[float], list[list[Line]]]:
    """Equal spans of time, in seconds since the first step, and the steps that run in each."""
    begin, end = min(step["at"] for step in steps), max(step["at"] for step in steps)
    count = max(1, min(MOST_POINTS, len(steps) // STEPS_PER_POINT))
    width = (end - begin) / count or 1.0
    groups: list[list[Line]] = [[] for _ in range(count)]
    for step in steps:
        first, last = (int((at - begin) / width) for at in (step["at"], step["at"] + step["seconds"]))
        for group in groups[min(first, count - 1) : last + 1]:
            group.append(step)
    return [width * place for place in range(count)], groups


def _of_one_shape(counts: Sequence[ExpertUses]) -> list[ExpertUses]:
    """Those with as many layers and experts as the last."""
    return [uses for uses in counts if list(map(len, uses)) == list(map(len, counts[-1]))]


def _of(steps: Sequence[Line], name: str, part: float) -> float:
    return percentile(sorted(step[name] for step in steps), part) if steps else math.nan


def _mean(steps: Sequence[Line], name: str) -> float:
    return float(sum(step[name] for step in steps)) / len(steps) if steps else 0.0
