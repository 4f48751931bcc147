"""The table of the kill loop, from results/chaos.json."""

from collections import Counter
from typing import Any

from benchmarks import cpu_table
from ktqueue.core.request import JobClass


def make(result: dict[str, Any]) -> list[str]:
    """As Markdown lines."""
    plan = result["plan"]
    blows = "; ".join(f"{count} times {kind}" for kind, count in result["blows"].items())
    load = "{mean:.1f}, at most {max:.1f}".format_map(result["load_average"])
    rows: list[tuple[str, str]] = [
        ("jobs, tokens", f"{result['jobs']}, {result['tokens']}"),
        ("connections of their readers", f"{result['connections']}"),
        ("jobs whose worker was hit while they ran", f"{result['jobs_hit']}"),
        *((name, f"{count}") for name, count in result["faults"].items()),
    ]
    for job_class in JobClass:
        for kind, gap in result["gaps"][job_class].items():
            if gap["count"]:
                spread = f"{gap['p50_s']:.2f}, {gap['p99_s']:.2f}, {gap['max_s']:.2f} s of {gap['count']}"
                rows.append((f"silence of {job_class} streams over a {kind}: median, p99, longest", spread))
    too_long = Counter(gap["class"] for gap in result["gaps_too_long"])
    told = ", ".join(f"{too_long[job_class]} of {job_class} ones" for job_class in JobClass)
    rows.append((f"of these over a kill, longer than the lease and {result['gap_margin_s']:g} s", told))
    rows.append(("longest silence of all, whatever was done", f"{result['gaps']['longest of all']:.2f} s"))
    return [
        "### Kill loop",
        f"{result['seconds']:.0f} s, {plan['workers']} workers of {plan['rows']} rows, {plan['clients']} clients, "
        f"a lease of {plan['lease_seconds']:g} s, seed {plan['seed']}. Done to them: {blows}. A silence is counted "
        "where nothing else was done meanwhile to Redis, gateway, fork server or the job. Rows are short while workers "
        "are down, and batch jobs then wait until interactive ones have theirs. Each job's tokens are held against an "
        f"undisturbed run. Load average {load}. {cpu_table.software(result)}",
        "",
        "| what | |",
        "| --- | ---: |",
        *(f"| {name} | {value} |" for name, value in rows),
    ]
