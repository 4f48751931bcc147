"""Tables of the queue alone, of many readers of one gateway, and of a deep queue."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.cpu_table import LIMIT, software

Figures = dict[str, Any]
QUEUES = ("ktqueue", "ktqueue up", "streaq", "saq", "taskiq")
NAMES = {"ktqueue up": "ktqueue, supervised", "saq": "SAQ", "taskiq": "taskiq-redis"}


def queue(result: Figures) -> list[str]:
    """No-op jobs through each queue."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    head = ("queue", "submit to start p50", "p99", "jobs/s", "worker a job", "Redis a job", "submits/s",
            "runs again after kill -9: lease of "f"{result['lease_seconds']:g} s", "defaults")  # fmt: skip
    lines = [
        "### The queue alone",
        f"No-op jobs through one worker process with {result['slots']} slots, all queues on one private Redis in "
        f"turns; medians over rounds, of the kills median and extremes. {versions}. {_conditions(result)}",
        "",
        f"| {' | '.join(head)} |",
        f"|{' --- |'}{' ---: |' * (len(head) - 1)}",
    ]
    present = {one["queue"] for one in result["figures"]}
    return [*lines, *(_queue_line(result, name) for name in QUEUES if name in present)]


def _queue_line(result: Figures, name: str) -> str:
    latency = counted(_points(result, point="latency", queue=name))
    throughput = counted(_points(result, point="throughput", queue=name))
    cells = [
        NAMES.get(name, name),
        _middle(latency, "p50_ms", "{:.2f} ms"),
        _middle(latency, "p99_ms", "{:.2f} ms"),
        _middle(throughput, "jobs_per_second", "{:,.0f}"),
        _middle(throughput, "worker_us", "{:.0f} us"),
        _middle(throughput, "redis_us", "{:.0f} us"),
        _middle(throughput, "submitted_per_second", "{:,.0f}"),
        _recovery(_points(result, point="recovery", queue=name), 30.0),
        _recovery(_points(result, point="recovery at defaults", queue=name), result["waited_seconds"]),
    ]
    return f"| {' | '.join(cells)} |"


def _recovery(figures: Sequence[Figures], waited: float) -> str:
    """Seconds of each kill in one cell."""
    if not figures:
        return "-"
    seconds = sorted(one["seconds"] for one in figures if one["seconds"] is not None)
    told = []
    if seconds:
        told.append(f"{median(seconds):.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f})")
    twice = sum(one["twice"] for one in figures)
    never = len(figures) - len(seconds) - twice
    if twice:
        told.append(f"ran twice while its worker lived: {twice} of {len(figures)}")
    if never:
        told.append(f"not within {waited:g} s: {never} of {len(figures)}")
    return ", ".join(told)


def streams(result: Figures) -> list[str]:
    """Readers of one gateway."""
    head = ("streams", "events/s each", "heavy stream", "delivery p50", "p99", "longest", "lost or twice",
            "gateway an event", "gateway, Redis, workers, clients: CPUs", "MB per 1,000 clients", "rounds")  # fmt: skip
    lines = [
        "### Readers of one gateway",
        "SSE clients of one gateway process, fed through leases and Redis by a process that plays the workers, all on "
        "the same cores; from the beginning of a commit to the client's socket; medians over rounds. In the last two "
        f"rows one of the streams has events of {result['heavy_bytes']:,} bytes, and its client reads, or does not "
        f"until the end. {_conditions(result)} {result.get('undisturbed', '')}".rstrip(),
        "",
        f"| {' | '.join(head)} |",
        f"|{' ---: |' * len(head)}",
    ]
    places = sorted(
        {(one["heavy"] != "none", one["streams"], one["rate"], one["heavy"]) for one in result["figures"]},
    )
    return [*lines, *(_stream_line(result, *place[1:]) for place in places)]


def _stream_line(result: Figures, count: int, rate: float, heavy: str) -> str:
    every = _points(result, streams=count, rate=rate, heavy=heavy)
    figures = counted(every)
    readers = count - (heavy == "stalled")
    missing = sum(readers - one["complete_streams"] for one in every)
    stalled = [one["stalled"] for one in every if one["stalled"]]
    if stalled:
        missing += sum(not one["complete"] for one in stalled)
    cpus = [median(one["cpus"][name] for one in figures) for name in ("gateway", "redis", "workers", "clients")]
    cells = [
        f"{count:,}",
        f"{rate:g}",
        {"none": "-", "read": "read", "stalled": "not read"}[heavy],
        _middle(figures, "p50_ms", "{:.1f} ms"),
        _middle(figures, "p99_ms", "{:.1f} ms"),
        _middle(figures, "max_ms", "{:.0f} ms"),
        f"{missing} of {count * len(every):,} streams",
        _middle(figures, "gateway_us_per_event", "{:.1f} us"),
        ", ".join(f"{one:.2f}" for one in cpus),
        _middle(figures, "mb_per_1000_clients", "{:.0f}"),
        _rounds(every),
    ]
    return f"| {' | '.join(cells)} |"


def depth(result: Figures) -> list[str]:
    """Two depths of a queue."""
    depths = sorted({one["depth"] for one in result["figures"]})
    head = ("jobs waiting", "submit p50", "p99", "claim p50", "p99", "memory of a job", "rounds")
    lines = [
        "### A deep queue",
        f"One client's submits and claims with so many jobs before them, in turns; {result['turns']:,} a round, "
        f"prompts of {result['prompt_bytes']} bytes; medians over rounds. {_conditions(result)}",
        "",
        f"| {' | '.join(head)} |",
        f"|{' ---: |' * len(head)}",
    ]
    for one in depths:
        every = _points(result, depth=one)
        figures = counted(every)
        cells = [
            f"{one:,}",
            *(
                _middle(figures, f"{call}_{part}_ms", "{:.3f} ms")
                for call in ("submit", "claim")
                for part in ("p50", "p99")
            ),
            _middle(figures, "job_bytes", "{:,.0f} bytes"),
            _rounds(every),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def counted(figures: Sequence[Figures]) -> list[Figures]:
    """The undisturbed ones; all, where there are none."""
    return [one for one in figures if one["others"] <= LIMIT] or list(figures)


def _points(result: Figures, **wanted: Any) -> list[Figures]:
    return [one for one in result["figures"] if all(one[key] == value for key, value in wanted.items())]


def _middle(figures: Sequence[Figures], key: str, shape: str) -> str:
    return shape.format(median(one[key] for one in figures)) if figures else "-"


def _rounds(figures: Sequence[Figures]) -> str:
    quiet = [one for one in figures if one["others"] <= LIMIT]
    return f"{len(quiet)}" if quiet else f"{len(figures)}, disturbed"


def _conditions(result: Figures) -> str:
    """How busy the machine was."""
    load = sorted(one["load_average"] for one in result["figures"])
    others = sorted(one["others"] for one in result["figures"])
    return (
        f"Others took {median(others):.2f} CPUs in the median ({others[0]:.2f} to {others[-1]:.2f}), load average "
        f"{load[0]} to {load[-1]} while measuring. {software(result)}"
    )
