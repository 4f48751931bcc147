"""The table of `benchmarks.crew`."""

from typing import Any

from benchmarks import cpu_table


def make(result: dict[str, Any]) -> list[str]:
    """Lines of Markdown, with a heading and the conditions."""
    return [
        "### One queue, several workers",
        f"{result['jobs']} jobs of {result['tokens']} tokens at once; workers of {result['rows']} rows and one thread, "
        "all on the same cores, as are Redis and the gateway: what more workers than cores add is none of the speed. "
        "Lost or different: jobs without exactly one end, or with other tokens than a crew of one gave. In each second "
        f"row a worker is told to leave every {result['pause']:g} s, gives its jobs back and comes again. "
        f"{cpu_table.software(result)}",
        "",
        *rows(result),
    ]


def rows(result: dict[str, Any]) -> list[str]:
    """The table alone."""
    lines = [
        "| workers | workers that left | jobs/s | tok/s | lost or different | load average |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {one['workers']} | {one['left']} | {one['jobs_per_second']:.0f} | {one['tokens_per_second']:.0f} "
        f"| {one['wrong']} | {one['load_average']} |"
        for one in result["figures"]
    ]
    return lines
