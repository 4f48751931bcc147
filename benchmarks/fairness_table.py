"""The table of `benchmarks.fairness`."""

from typing import Any

from benchmarks import cpu_table


def make(result: dict[str, Any]) -> list[str]:
    """Lines of Markdown, with a heading and the conditions."""
    load = sorted(one["load_average"] for one in result["figures"])
    return [
        "### Interactive jobs beside a deep batch queue",
        f"One worker with {result['rows']} rows, {result['model']}; {result['interactive_per_second']:g} interactive "
        f"jobs a second of {result['tokens']['interactive']} tokens, batch jobs of {result['tokens']['batch']}; waits "
        "are from submission to the first token. A flood: three interactive jobs for each row, always. Load average "
        f"{load[0]} to {load[-1]} on the machine, which was shared. {cpu_table.software(result)}",
        "",
        *rows(result),
    ]


def rows(result: dict[str, Any]) -> list[str]:
    """The table alone."""
    lines = [
        "| round | idle p50, p95 | loaded p50, p95 | p95 ratio | batch waiting | batch alone, beside | batch kept "
        "| batch's share in a flood |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for turn, one in enumerate(result["figures"]):
        idle, loaded = one["idle"], one["loaded"]
        lines.append(
            f"| {turn + 1} | {idle['p50_ms']:.1f}, {idle['p95_ms']:.1f} ms "
            f"| {loaded['p50_ms']:.1f}, {loaded['p95_ms']:.1f} ms | {one['p95_loaded_over_idle']:.2f} "
            f"| {one['batch_queued'][0]:,} to {one['batch_queued'][1]:,} "
            f"| {one['batch_tokens_per_second_alone']:.0f}, {one['batch_tokens_per_second_beside']:.0f} tok/s "
            f"| {one['batch_kept']:.0%} | {one['batch_share_in_a_flood']:.1%} |"
        )
    return lines
