"""The tables of benchmarks/README.md, from the files in results/: what stands between its two marks is generated."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def write() -> None:
    """Put the current figures into the README."""
    page = FOLDER / "README.md"
    text = page.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{render()}\n{END}{tail}")


def render() -> str:
    """All tables as Markdown."""
    makers: dict[str, Callable[[dict[str, Any]], list[str]]] = {
        "engine": _engine,
        "system": _system,
        "seeded": _seeded,
    }
    parts = []
    for name, make in makers.items():
        path = FOLDER / "results" / f"{name}.json"
        if path.exists():
            parts.append("\n".join(make(json.loads(path.read_text()))))
    return "\n\n".join(parts)


def _head(result: dict[str, Any]) -> str:
    m = result["machine"]
    load = sorted(one["load_average"] for one in result["figures"] if "load_average" in one)
    memory = sorted(one["bandwidth_gb_s"] for one in result["figures"] if "bandwidth_gb_s" in one)
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['isa']}, {m['memory_gib']} GiB; "
        f"memory read {memory[0]} to {memory[-1]} GB/s and load average {load[0]} to {load[-1]} while measuring; "
        f"torch {m['packages']['torch']}, Python {m['python']}; commit {m['commit']}, {m['taken']}. "
        f"`{result['command']}`"
    )


def _engine(result: dict[str, Any]) -> list[str]:
    figures = result["figures"]
    rows = sorted({one["rows"] for one in figures})

    def pick(peer: str, count: int) -> list[dict[str, Any]]:
        return [one for one in figures if one["peer"] == peer and one["rows"] == count]

    def rate(peer: str, count: int) -> float:
        return median(one["tokens_per_second"] for one in pick(peer, count)) if pick(peer, count) else 0.0

    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    beside = f"Beside it {versions}, the better of its two expert paths. " if versions else ""
    prompts = result["prompt_tokens"]
    head = ("rows", "ktqueue greedy", "ktqueue sampled", "llama.cpp", "ours to theirs", "step",
            "host outside the forward (greedy, sampled)", "distinct experts a layer", "weights read")  # fmt: skip
    lines = [
        "### Engine",
        f"Decode of `{result['model']}`, prompts of {prompts[0]} to {prompts[-1]} tokens, "
        f"{result['tokens']} tokens a row, {result['threads']} threads; "
        f"tokens a second over all rows, median of {result['rounds']} turns. "
        f"{beside}{_head(result)}",
        "",
        f"| {' | '.join(head)} |",
        f"|{' ---: |' * len(head)}",
    ]
    for count in rows:
        own, drawn = rate("ktqueue", count), rate("ktqueue sampled", count)
        theirs = max(rate("llama.cpp repack", count), rate("llama.cpp no-repack", count))
        step = median(one["step_ms"] for one in pick("ktqueue", count))
        share = [median(one["host_share"] for one in pick(name, count)) for name in ("ktqueue", "ktqueue sampled")]
        experts = result["experts"][str(count)]
        speed = experts["weight_bytes_per_step"] / (step / 1e3) / 1e9
        lines.append(
            f"| {count} | {own:.0f} | {drawn:.0f} | {f'{theirs:.0f}' if theirs else '-'} | "
            f"{f'{own / theirs:.2f}' if theirs else '-'} | {step:.1f} ms | {share[0]:.0%}, {share[1]:.0%} | "
            f"{experts['distinct_experts']:.1f} of {experts['experts_of_layer']:.0f} | {speed:.1f} GB/s |"
        )
    gain = rate("ktqueue", rows[-1]) / rate("ktqueue", rows[0])
    lines += ["", f"{rows[-1]} rows give {gain:.1f} times the tokens of {rows[0]}."]
    return lines


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
        f"median of {len(figures)} rounds. {_head(result)}",
        "",
        "| what | figure |",
        "| --- | ---: |",
        *(f"| {name} | {value} |" for name, value in rows),
    ]


def _seeded(result: dict[str, Any]) -> list[str]:
    layers = result["dense layers"].values()
    batches = sorted({rows for one in layers for rows in one["batches_that_differ"]})
    worst = max(one["largest_difference"] for one in layers)
    told = f"batches of {', '.join(map(str, batches))} rows (by {worst:.1g} at most)" if batches else "no batch size"
    runs = [(name, one) for name, one in result.items() if isinstance(one, dict) and "requests" in one]
    return [
        "### Seeded requests",
        "Does a seeded sample (temperature 0.8, top_p 0.95) of the demo model change with its company? Requests whose "
        "token ids differ from the run beside which they stand, alone where none is named. Where float rounding "
        f"depends on the batch at all: torch's dense layers, in {told}; our attention and experts, nowhere. "
        "`python -m benchmarks.seeded_reproducibility > benchmarks/results/seeded.json`",
        "",
        "| run | requests | different |",
        "| --- | ---: | ---: |",
        *(f"| {name} | {one['requests']} | {one['different']} |" for name, one in runs),
    ]


if __name__ == "__main__":
    write()
