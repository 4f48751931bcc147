"""The table of expert layers, from a file that `ktqueue bench experts --json` wrote."""

from typing import Any


def make(result: dict[str, Any]) -> list[str]:
    """Markdown lines: one row a point, shares of the limits that were probed beside it."""
    machine = result["machine"]
    memory = next(one for one in machine["bandwidths"] if one["level"] == "DRAM")["all_threads"]
    peaks = ", ".join(
        f"{one['arithmetic']} {one['isa']} {one['all_threads'] / 1e9:,.0f} GFLOP/s"
        for one in machine["peaks"]
        if one["isa"] in ("avx512", "amx") and one["arithmetic"] != "fp32"
    )
    loads = f"load average {result['load_before']:.2f} before and {result['load_after']:.2f} after"
    lines = [
        f"### Expert layers, {machine['cpu']}, {machine['threads']} threads",
        'Routed experts of one layer in Qwen3-30B-A3B\'s shape (2048, 768, 8 of 128 at random; with "each" so many '
        "rows for each of 8), weights from DRAM. "
        f"Before the points the machine gave {memory / 1e9:.0f} GB/s and {peaks}; {loads}. Shares are of what was "
        "probed beside each point; where those probes disagree, the row has a `?`. "
        f"{result['taken'][:10]}. `ktqueue bench experts --json FILE`, formats and tokens as in the rows.",
        "",
        "| format | isa | tokens | layer | weights read | of DRAM | GFLOP/s | of peak |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in result["points"]:
        mark = " ?" if one["disturbed"] else ""
        tokens = f"{one['tokens']}{'' if one['routed'] else ' each'}"
        lines.append(
            f"| {one['quant']} | {one['isa']} | {tokens} | {1e6 * one['seconds']:,.0f} us "
            f"| {one['bytes_per_second'] / 1e9:.1f} GB/s | {100 * one['bandwidth_share']:.0f} %{mark} "
            f"| {one['operations_per_second'] / 1e9:,.0f} | {100 * one['peak_share']:.0f} % |"
        )
    return lines
