"""The table of `benchmarks.endurance`."""

from typing import Any

from benchmarks import cpu_table


def make(result: dict[str, Any]) -> list[str]:
    """Lines of Markdown, with a heading and the conditions."""
    notes = result["notes"]
    lines = [
        f"### {notes[-1]['requests']:,} requests through one engine, {result['device']}",
        "Requests of random shapes; what the process held each time that the engine was empty. Device: all that is "
        f"taken of its memory. {result['seconds']:.0f} s. {cpu_table.software(result)}",
        "",
        "| requests | steps | tokens | preemptions | finished, aborted, failed | pages missing | device | host "
        "| threads | open files |",
        "|" + " ---: |" * 10,
    ]
    return lines + [
        f"| {one['requests']:,} | {one['steps']:,} | {one['tokens']:,} | {one['preemptions']:,} | "
        f"{one['finished']}, {one['aborted']}, {one['failed']} | {one['missing_pages']} | {one['device_mb']:.0f} MB | "
        f"{one['host_mb']:.0f} MB | {one['threads']} | {one['files']} |"
        for one in notes
    ]
