"""The page of the queue: sections for what is measured over Redis and HTTP, and for the kill loop."""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.tables import (
    Cell,
    Columns,
    Group,
    Row,
    bystanders,
    conditions,
    grouped,
    median_of,
    middle,
    numbered,
    pairs,
    rounds,
    section,
    shared,
    software,
    undisturbed,
    where,
)
from ktqueue.core.request import JobClass

NAMES = {"ktqueue": "ktqueue", "ktqueue up": "ktqueue, supervised", "streaq": "streaq", "saq": "SAQ",
         "taskiq": "taskiq-redis"}  # fmt: skip


def peers(result: dict[str, Any]) -> list[str]:
    """No-op jobs through each queue."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    present = {row["queue"] for row in result["figures"]}

    def measured(point: str, key: str, shape: str) -> Cell:
        return lambda queue: median_of(undisturbed(where(result, point=point, queue=queue)), key, shape)

    def recovered(point: str, waited: float) -> Cell:
        return lambda queue: recovery(where(result, point=point, queue=queue), waited)

    return section(
        "The queue alone",
        f"No-op jobs through one worker process with {result['slots']} slots, all queues on one private Redis in "
        f"turns; medians over rounds, of the kills median and extremes. {versions}. {bystanders(result)}",
        {
            "queue": NAMES.__getitem__,
            "submit to start p50": measured("latency", "p50_ms", "{:.2f} ms"),
            "p99": measured("latency", "p99_ms", "{:.2f} ms"),
            "jobs/s": measured("throughput", "jobs_per_second", "{:,.0f}"),
            "worker a job": measured("throughput", "worker_us", "{:.0f} us"),
            "Redis a job": measured("throughput", "redis_us", "{:.0f} us"),
            "submits/s": measured("throughput", "submitted_per_second", "{:,.0f}"),
            f"runs again after kill -9: lease of {result['lease_seconds']:g} s": recovered("recovery", 30.0),
            "defaults": recovered("recovery at defaults", result["waited_seconds"]),
        },
        [queue for queue in NAMES if queue in present],
        words=1,
    )


def recovery(figures: Sequence[Row], waited: float) -> str:
    """Seconds until a job ran again, over all kills, in one cell. `waited`: seconds after which a run gave up."""
    if not figures:
        return "-"
    seconds = sorted(row["seconds"] for row in figures if row["seconds"] is not None)
    parts = []
    if seconds:
        parts.append(f"{median(seconds):.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f})")
    twice = sum(row["twice"] for row in figures)
    never = len(figures) - len(seconds) - twice
    if twice:
        parts.append(f"ran twice while its worker lived: {twice} of {len(figures)}")
    if never:
        parts.append(f"not within {waited:g} s: {never} of {len(figures)}")
    return ", ".join(parts)


def streams(result: dict[str, Any]) -> list[str]:
    """Many readers of one gateway."""
    points = grouped(result, "streams", "rate", "heavy")
    return section(
        "Readers of one gateway",
        "SSE clients of one gateway process, fed through leases and Redis by a process that plays the workers, all on "
        "the same cores; from the beginning of a commit to the client's socket; medians over rounds. In the last two "
        f"rows one of the streams has events of {result['heavy_bytes']:,} bytes, and its client reads, or does not "
        f"until the end. {bystanders(result)} {result.get('undisturbed', '')}".rstrip(),
        {
            "streams": shared("{streams:,}"),
            "events/s each": shared("{rate:g}"),
            "heavy stream": lambda point: {"none": "-", "read": "read", "stalled": "not read"}[point[0]["heavy"]],
            "delivery p50": middle("p50_ms", "{:.1f} ms"),
            "p99": middle("p99_ms", "{:.1f} ms"),
            "longest": middle("max_ms", "{:.0f} ms"),
            "lost or twice": _missing_streams,
            "gateway an event": middle("gateway_us_per_event", "{:.1f} us"),
            "gateway, Redis, workers, clients: CPUs": _cpus,
            "MB per 1,000 clients": middle("mb_per_1000_clients", "{:.0f}"),
            "rounds": rounds,
        },
        sorted(points, key=lambda point: point[0]["heavy"] != "none"),
    )


def _missing_streams(point: Group) -> str:
    count, heavy = point[0]["streams"], point[0]["heavy"]
    missing = sum(count - (heavy == "stalled") - figure["complete_streams"] for figure in point)
    missing += sum(not figure["stalled"]["complete"] for figure in point if figure["stalled"])
    return f"{missing} of {count * len(point):,} streams"


def _cpus(point: Group) -> str:
    names = ("gateway", "redis", "workers", "clients")
    return ", ".join(f"{median(figure['cpus'][name] for figure in undisturbed(point)):.2f}" for name in names)


def depth(result: dict[str, Any]) -> list[str]:
    """A short and a deep queue."""
    return section(
        "A deep queue",
        f"One client's submits and claims with so many jobs before them, in turns; {result['turns']:,} a round, "
        f"prompts of {result['prompt_bytes']} bytes; medians over rounds. {bystanders(result)}",
        {
            "jobs waiting": shared("{depth:,}"),
            "submit p50": middle("submit_p50_ms", "{:.3f} ms"),
            "submit p99": middle("submit_p99_ms", "{:.3f} ms"),
            "claim p50": middle("claim_p50_ms", "{:.3f} ms"),
            "claim p99": middle("claim_p99_ms", "{:.3f} ms"),
            "memory of a job": middle("job_bytes", "{:,.0f} bytes"),
            "rounds": rounds,
        },
        grouped(result, "depth"),
    )


def fairness(result: dict[str, Any]) -> list[str]:
    """Interactive jobs beside batch jobs."""
    load = sorted(row["load_average"] for row in result["figures"])
    return section(
        "Interactive jobs beside a deep batch queue",
        f"One worker with {result['rows']} rows, {result['model']}; {result['interactive_per_second']:g} interactive "
        f"jobs a second of {result['tokens']['interactive']} tokens, batch jobs of {result['tokens']['batch']}; waits "
        "are from submission to the first token. A flood: three interactive jobs for each row, always. Load average "
        f"{load[0]} to {load[-1]} on the machine, which was shared. {software(result)}",
        FAIRNESS,
        numbered(result["figures"]),
    )


FAIRNESS: Columns = {
    "round": "{round}",
    "idle p50, p95": "{idle[p50_ms]:.1f}, {idle[p95_ms]:.1f} ms",
    "loaded p50, p95": "{loaded[p50_ms]:.1f}, {loaded[p95_ms]:.1f} ms",
    "p95 ratio": "{p95_loaded_over_idle:.2f}",
    "batch waiting": "{batch_queued[0]:,} to {batch_queued[1]:,}",
    "batch alone, beside": "{batch_tokens_per_second_alone:.0f}, {batch_tokens_per_second_beside:.0f} tok/s",
    "batch kept": "{batch_kept:.0%}",
    "batch's share in a flood": "{batch_share_in_a_flood:.1%}",
}
TENANTS: Columns = {
    "order of the queue": "{label}",
    "idle p50, p95": "{idle[p50_ms]:.1f}, {idle[p95_ms]:.1f} ms",
    "behind the backlog p50, p95": "{behind[p50_ms]:,.0f}, {behind[p95_ms]:,.0f} ms",
    "longest": "{behind[max_ms]:,.0f} ms",
    "tok/s kept": "{kept:.0%}",
    "preempted": "{preemptions:.0f}",
}
FLEET: Columns = {
    "workers": "{workers}", "workers that left": "{left}", "jobs/s": "{jobs_per_second:.0f}",
    "tok/s": "{tokens_per_second:.0f}", "lost or different": "{wrong}", "load average": "{load_average}",
}  # fmt: skip


def tenants(result: dict[str, Any]) -> list[str]:
    """A tenant behind the backlog of another."""
    load = sorted(row["load_average"] for row in result["figures"])
    return section(
        "One tenant behind the backlog of another",
        f"One worker with {result['rows']} rows, {result['model']}. A tenant sends {result['backlog']} requests of "
        f"{result['tokens']['long']} tokens at once, then another {result['short_per_second']:g} a second of "
        f"{result['tokens']['short']}, all interactive. Waits of the latter are from submission to the first token. "
        f"Load average {load[0]} to {load[-1]} on the machine, which was shared. {software(result)}",
        TENANTS,
        numbered(result["figures"]),
    )


def fleet(result: dict[str, Any]) -> list[str]:
    """One queue and several workers."""
    return section(
        "One queue, several workers",
        f"{result['jobs']} jobs of {result['tokens']} tokens at once; workers of {result['rows']} rows and one thread, "
        "all on the same cores, as are Redis and the gateway: what more workers than cores add is none of the speed. "
        "Lost or different: jobs without exactly one end, or with other tokens than a crew of one gave. In each second "
        f"row a worker is asked to leave every {result['pause']:g} s, hands its jobs back and starts again. "
        f"{software(result)}",
        FLEET,
        result["figures"],
    )


def chaos(result: dict[str, Any]) -> list[str]:
    """The kill loop."""
    plan = result["plan"]
    attacks = "; ".join(f"{count} times {kind}" for kind, count in result["attacks"].items())
    rows = {
        "jobs, tokens": f"{result['jobs']}, {result['tokens']}",
        "connections of their readers": f"{result['connections']}",
        "jobs whose worker was hit while they ran": f"{result['jobs_hit']}",
        **{name: f"{count}" for name, count in result["faults"].items()},
    }
    for job_class in JobClass:
        for kind, gap in result["gaps"][job_class].items():
            if gap["count"]:
                spread = f"{gap['p50_s']:.2f}, {gap['p99_s']:.2f}, {gap['max_s']:.2f} s of {gap['count']}"
                rows[f"silence of {job_class} streams over a {kind}: median, p99, longest"] = spread
    long = Counter(gap["class"] for gap in result["gaps_too_long"])
    rows[f"of these over a kill, longer than the lease and {result['gap_margin_s']:g} s"] = ", ".join(
        f"{long[job_class]} of {job_class} ones" for job_class in JobClass
    )
    rows["longest silence of all, whatever was done"] = f"{result['gaps']['longest of all']:.2f} s"
    return pairs(
        "Kill loop",
        f"{result['seconds']:.0f} s, {plan['workers']} workers of {plan['rows']} rows, {plan['clients']} clients, "
        f"a lease of {plan['lease_seconds']:g} s, seed {plan['seed']}. Done to them: {attacks}. A silence is counted "
        "where nothing else was done meanwhile to Redis, gateway, fork server or the job. Rows are short while workers "
        "are down, and batch jobs then wait until interactive ones have theirs. Each job's tokens are held against an "
        "undisturbed run. Load average {mean:.1f}, at most {max:.1f}. ".format_map(result["load_average"])
        + software(result),
        "",
        rows,
    )


def floods(result: dict[str, Any]) -> list[str]:
    """Chats while thousands of hostile sockets are open."""
    machine = result["machine"]

    def milliseconds(key: str) -> Cell:
        return lambda row: "none" if row[key] is None else f"{row[key]:,.0f} ms"

    return section(
        "A stranger's chat during a flood",
        f"{result['figures'][0]['sockets']:,} hostile sockets of one kind at a time, against what `ktqueue up` runs "
        f"with default settings; each one that the gateway closes is opened again, {result['reopen_per_second']:g} a "
        "second at most. The hostile process runs on the same cores, at the lowest priority. Figures are medians of "
        f"{result['chats']} chats, each over a new connection from an address of its own, before the flood and from "
        "8 s after all its sockets were opened. "
        f"{machine['cpu']}, {machine['cores']} cores, {result['conditions']}. {machine['taken']}.",
        {
            "hostile sockets": "{kind}", "from addresses": "{addresses}",
            "first token, nobody else there": milliseconds("idle_ms"),
            "during the flood": milliseconds("flooded_ms"), "longest": milliseconds("flooded_longest_ms"),
            "failed chats": "{failed_chats}", "/healthz, longest": milliseconds("probe_longest_ms"),
            "gateway's memory before": "{memory_before_mb:.0f} MB", "highest": "{memory_highest_mb:.0f} MB",
            "open at the end": "{open:,}",
        },
        result["figures"],
        words=2,
    )  # fmt: skip


def system(result: dict[str, Any]) -> list[str]:
    """The whole system on the built-in model."""
    figures = result["figures"]

    def milliseconds(part: str, key: str, digits: int = 1) -> str:
        return f"{median(figure[part][key] for figure in figures):.{digits}f} ms"

    alone, four = (median(figure["clients"][i]["tokens_per_second"] for figure in figures) for i in (0, 1))
    rows = {
        "submit to first token, p50": milliseconds("first_token", "p50_ms"),
        "submit to first token, p95": milliseconds("first_token", "p95_ms"),
        "between tokens of one stream, p50": milliseconds("first_token", "between_tokens_p50_ms"),
        "SSE delivery delay, 4 streams, p50": milliseconds("delivery", "p50_ms", 2),
        "SSE delivery delay, 4 streams, p99": milliseconds("delivery", "p99_ms", 2),
        "1 client": f"{alone:.0f} tok/s",
        "4 clients": f"{four:.0f} tok/s, {four / alone:.2f} times 1",
    }
    return pairs(
        "System",
        f"Redis, one gateway, one worker and the clients on the same cores, {result['model']}, "
        f"median of {len(figures)} rounds. {conditions(result)}",
        "figure",
        rows,
    )
