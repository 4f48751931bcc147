"""The tables of `ktqueue bench serve`, from a result as it is written to a file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktqueue.cli.terminal.console import escaped, plain_text, results, table
from ktqueue.cli.terminal.failures import UsageFault

if TYPE_CHECKING:
    from rich.console import Console

Result = Mapping[str, Any]
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL", "client_queue_time": "client queue"}
RATES = {
    "output_throughput": "output tok/s",
    "total_token_throughput": "total tok/s",
    "request_throughput": "requests/s",
    "request_goodput": "goodput requests/s",
}
LOAD = (
    "dataset_name", "num_prompts", "request_rate", "burstiness", "max_concurrency", "trace_speed", "random_input_len",
    "random_output_len", "random_prefix_len", "random_range_ratio", "ignore_eos", "extra_body",
)  # fmt: skip
"""What two runs must have in common so that their ratios mean anything."""
SHORTEST_WITH_PEAK = 3.0  # seconds, since the peak is that of a second
BUSY_CLIENT = 0.8  # of a core: with more, this process may be the limit


def read_result(path: Path) -> Result:
    """Read a result that `--json` or `vllm bench serve --save-result` wrote. Raises UsageFault, OSError."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageFault(f"--compare: {path}: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("output_throughput"), int | float):
        raise UsageFault(f"--compare: {path}: has no output_throughput, so it is not a result of bench serve")
    return value


def show_figures(result: Result, metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    """Show latencies, throughput, and what failed."""
    console = results()
    console.print(f"[bold]{_safe(result['model_id'])}[/] at {_safe(result['url'])}\n", soft_wrap=True)
    heads = ("ms", "mean", "median", *(f"p{percent:g}" for percent in percentiles))
    rows = [(NAMES[metric], *(_number(result[f"{head}_{metric}_ms"]) for head in heads[1:])) for metric in metrics]
    console.print(table(heads, rows, right=heads[1:]))
    console.print()
    listing = table(("throughput", "mean", "peak"), right=("mean", "peak"))
    for key, name in RATES.items():
        if result.get(key) is not None:
            has_peak = key == "output_throughput" and result["duration"] >= SHORTEST_WITH_PEAK
            peak = result["max_output_tokens_per_s"] if has_peak else None
            listing.add_row(name, _number(result[key]), _number(peak) if peak is not None else "")
    console.print(listing)
    console.print()
    _show_requests(console, result)


def _show_requests(console: "Console", result: Result) -> None:
    completed, ended = result["completed"], result["completed"] + result["failed"]
    parts = [f"{completed} of {ended} requests completed in {result['duration']:,.1f} s"]
    parts.append(f"at most {result['max_concurrent_requests']} at once")
    if completed:
        tokens = result["total_input_tokens"] / completed, result["total_output_tokens"] / completed
        parts.append(f"{tokens[0]:,.1f} tokens in and {tokens[1]:,.1f} out on average")
    console.print(", ".join(parts), soft_wrap=True)
    if result["interrupted"]:
        console.print(f"interrupted: {result['interrupted']} running requests are not counted", soft_wrap=True)
    for kind, failure in result["failures"].items():
        console.print(
            f"[bold red]failed[/] {failure['count']} x {_safe(kind)}: {_safe(failure['message'])}", soft_wrap=True
        )
    if result["requests_without_usage"]:
        console.print(
            f"{result['requests_without_usage']} answers had no usage, so chunks were counted as tokens", soft_wrap=True
        )
    if result["client_cpu"] > BUSY_CLIENT:
        console.print(f"this client used {result['client_cpu']:.0%} of a core, so it may be the limit", soft_wrap=True)


def show_comparison(result: Result, earlier: Result, path: Path | None) -> None:
    """Show the figures that both results have, how many times the earlier ones these are, and how the loads differ."""
    console = results()
    listing = table(("", "now", "before", "ratio"), right=("now", "before", "ratio"))
    for key, value in result.items():
        before = earlier.get(key)
        if (key in RATES or key.endswith("_ms")) and not key.startswith("std") and value and before:
            name = RATES.get(key) or _metric_name(key)
            listing.add_row(name, _number(value), _number(before), f"{value / before:.2f} x")
    console.print(f"\nbefore: {_safe(str(path))}", soft_wrap=True)
    console.print(listing)
    differing = [name for name in LOAD if name in earlier and earlier[name] != result.get(name)]
    if differing:
        values = ", ".join(f"{name} {result.get(name)} (before {earlier[name]})" for name in differing)
        console.print(f"the loads differ: {_safe(values)}", soft_wrap=True)


def _metric_name(key: str) -> str:
    """`p95_ttft_ms` as people write it."""
    statistic, _, metric = key.removesuffix("_ms").partition("_")
    return f"{statistic} {NAMES.get(metric, metric)} ms"


def _number(value: float | None) -> str:
    """Write a number with four digits or all before the point; a dash for none."""
    if value is None:
        return "-"
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2}f}"


def _safe(text: str) -> str:
    """Text of a server without control characters and markup."""
    return escaped(" ".join(plain_text(text).split()))
