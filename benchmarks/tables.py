"""The pages of benchmarks/figures, from the files in results/."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import (
    accuracy_tables,
    broker_tables,
    chaos_table,
    cpu_table,
    crew_table,
    endurance_table,
    experts_table,
    fairness_table,
    floods_table,
    gpu_table,
)

FOLDER = Path(__file__).parent
Maker = Callable[[dict[str, Any]], list[str]]


def write() -> None:
    """Make the pages anew."""
    for name, (title, makers) in _pages().items():
        parts = [f"# {title}\nMade by `python -m benchmarks.tables`; how they are taken: [benchmarks](../README.md)."]
        for pattern, make in makers.items():
            paths = sorted((FOLDER / "results").glob(f"{pattern}.json"))
            parts += ["\n".join(make(json.loads(path.read_text()))) for path in paths]
        (FOLDER / "figures" / f"{name}.md").write_text("\n\n".join(parts) + "\n")


def _pages() -> dict[str, tuple[str, dict[str, Maker]]]:
    """A page's title, and who makes the tables of which results."""
    return {
        "cpu": ("The CPU's engine", {"cpu-*": cpu_table.make, "experts-*": experts_table.make, "system": _system}),
        "gpu": (
            "A GPU's engine",
            {
                "gpu*": gpu_table.make,
                "profile*": gpu_table.profile,
                "attention*": gpu_table.attention,
                "dense-*": gpu_table.dense,
                "served-*": gpu_table.served,
                "endurance-*": endurance_table.make,
            },
        ),
        "quality": (
            "How near to the model",
            {
                "accuracy": accuracy_tables.accuracy,
                "perplexity": accuracy_tables.perplexity,
                "deferral": accuracy_tables.deferral,
                "seeded": _seeded,
            },
        ),
        "floods": ("Hostile sockets", {"floods": floods_table.make}),
        "queue": (
            "The queue",
            {
                "queue": broker_tables.queue,
                "streams": broker_tables.streams,
                "depth": broker_tables.depth,
                "chaos": chaos_table.make,
                "fairness": fairness_table.make,
                "crew": crew_table.make,
            },
        ),
    }


def _system(result: dict[str, Any]) -> list[str]:
    figures = result["figures"]

    def middle(*path: str) -> float:
        values = []
        for one in figures:
            value: Any = one
            for key in path:
                value = value[key]
            values.append(float(value))
        return median(values)

    alone, four = (median(one["clients"][i]["tokens_per_second"] for one in figures) for i in (0, 1))
    rows = [
        ("submit to first token, p50", f"{middle('first_token', 'p50_ms'):.1f} ms"),
        ("submit to first token, p95", f"{middle('first_token', 'p95_ms'):.1f} ms"),
        ("between tokens of one stream, p50", f"{middle('first_token', 'between_tokens_p50_ms'):.1f} ms"),
        ("SSE delivery delay, 4 streams, p50", f"{middle('delivery', 'p50_ms'):.2f} ms"),
        ("SSE delivery delay, 4 streams, p99", f"{middle('delivery', 'p99_ms'):.2f} ms"),
        ("1 client", f"{alone:.0f} tok/s"),
        ("4 clients", f"{four:.0f} tok/s, {four / alone:.2f} times 1"),
    ]
    return [
        "### System",
        f"Redis, one gateway, one worker and the clients on the same cores, {result['model']}, "
        f"median of {len(figures)} rounds. {cpu_table.conditions(result)}",
        "",
        "| what | figure |",
        "| --- | ---: |",
        *(f"| {name} | {value} |" for name, value in rows),
    ]


def _seeded(result: dict[str, Any]) -> list[str]:
    layers = [one for one in result["dense layers"].values() if one["batches_that_differ"]]
    told = "nowhere"
    if layers:
        batches = sorted({rows for one in layers for rows in one["batches_that_differ"]})
        worst = max(one["largest_difference"] for one in layers)
        told = f"in torch's dense layers, batches of {', '.join(map(str, batches))} rows (by {worst:.1g} at most)"
    runs = [(name, one) for name, one in result.items() if isinstance(one, dict) and "requests" in one]
    return [
        "### Seeded requests",
        "Does a seeded sample (temperature 0.8, top_p 0.95) of the demo model change with its company? Requests whose "
        "token ids differ from the run beside which they stand, alone where none is named. Float rounding depends on "
        f"the batch: {told}. "
        "`python -m benchmarks.seeded_reproducibility > benchmarks/results/seeded.json`",
        "",
        "| run | requests | different |",
        "| --- | ---: | ---: |",
        *(f"| {name} | {one['requests']} | {one['different']} |" for name, one in runs),
    ]


if __name__ == "__main__":
    write()
