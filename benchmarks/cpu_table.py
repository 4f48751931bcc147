"""The table of one model's decode and prefill beside llama.cpp, from its file in results/.

A round of a point is disturbed if processes that were not measured took more than `LIMIT` CPUs during any of its
figures. Disturbed rounds do not count, unless all of a point's are: then all do, and the point is marked.
"""

from statistics import median
from typing import Any

LIMIT = 0.1
OURS, SAMPLED = "ktqueue", "ktqueue sampled"
THEIRS = ("llama.cpp repack", "llama.cpp no-repack")
Figures = dict[str, dict[str, float]]  # of one point in one round, by peer


def make(result: dict[str, Any]) -> list[str]:
    """The lines of the table."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    beside = f" Beside it {versions} in both of its expert paths; the better one of a round counts." if versions else ""
    head = ("rows", "tok/s", "step", "llama.cpp: repacked", "not repacked", "ours to theirs (best steps)",
            "distinct experts a layer", "a step reads", "GB/s ours, theirs", "probe", "rounds")  # fmt: skip
    lines = [
        f"### {result['model']}",
        f"Decode of {result['tokens']} tokens a row after prompts of {result['prompt_tokens']}, and a prompt of "
        f"{result['prefill']} alone (prefill); {result['threads']} threads; medians of undisturbed rounds."
        f"{beside} {conditions(result)}",
        "",
        f"| {' | '.join(head)} |",
        f"|{' ---: |' * len(head)}",
    ]
    points = sorted({one["rows"] for one in result["figures"]}, key=lambda rows: rows or 1 << 20)
    lines += [_line(result, rows) for rows in points]
    return [*lines, *_host(result)]


def conditions(result: dict[str, Any]) -> str:
    """What the memory gave and how busy the machine was, and `software`, as a sentence."""
    load = sorted(one["load_average"] for one in result["figures"] if "load_average" in one)
    memory = sorted(one["bandwidth_gb_s"] for one in result["figures"] if "bandwidth_gb_s" in one)
    return (
        f"Memory read {memory[0]} to {memory[-1]} GB/s, load average {load[0]} to {load[-1]} while measuring. "
        f"{software(result)}"
    )


def software(result: dict[str, Any]) -> str:
    """The machine, the versions and the command."""
    m = result["machine"]
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['isa']}, {m['memory_gib']} GiB; torch {m['packages']['torch']}, "
        f"Python {m['python']}; commit {m['commit']}, {m['taken']}. `{result['command']}`"
    )


def rounds_of(result: dict[str, Any], rows: int) -> tuple[list[Figures], bool]:
    """The rounds of a point that count, and whether they are undisturbed."""
    rounds: dict[int, Figures] = {}
    for one in result["figures"]:
        if one["rows"] == rows:
            rounds.setdefault(one["round"], {})[one["peer"]] = one
    quiet = [one for one in rounds.values() if all(figure["others"] <= LIMIT for figure in one.values())]
    return quiet or list(rounds.values()), bool(quiet)


def _line(result: dict[str, Any], rows: int) -> str:
    rounds, quiet = rounds_of(result, rows)

    def middle(peer: str, key: str) -> float | None:
        values = [one[peer][key] for one in rounds if peer in one]
        return median(values) if values else None

    def fastest(*peers: str) -> float:
        return min(one[peer]["fastest_step_ms"] for one in rounds for peer in peers)

    peers = rounds[0].keys()
    ratio = best = "-"
    if OURS in peers and len(peers) > 1:
        theirs = [peer for peer in THEIRS if peer in peers]
        each = [one[OURS]["tokens_per_second"] / max(one[p]["tokens_per_second"] for p in theirs) for one in rounds]
        ratio, best = f"{median(each):.2f}", f"{fastest(*theirs) / fastest(OURS):.2f}"
    size = result["step_bytes"].get(str(rows))
    slow = [middle(peer, "step_ms") for peer in (OURS, *THEIRS)]
    theirs_step = min((step for step in slow[1:] if step), default=None)
    speeds = [f"{size / step / 1e6:.1f}" if size and step else "-" for step in (slow[0], theirs_step)]
    probe = median(figure["bandwidth_gb_s"] for one in rounds for figure in one.values())
    experts = f"{result['distinct_experts'][str(rows)]:.1f} of {result['experts_of_layer']}" if rows else "-"
    cells = [
        str(rows) if rows else "prefill",
        _number(middle(OURS, "tokens_per_second")),
        f"{slow[0]:.2f} ms" if slow[0] else "-",
        *(_number(middle(peer, "tokens_per_second")) for peer in THEIRS),
        f"{ratio} ({best})" if ratio != "-" else "-",
        experts,
        f"{size / 1e6:.0f} MB" if size else "-",
        ", ".join(speeds),
        f"{probe:.0f}",
        f"{len(rounds)}" if quiet else f"{len(rounds)}, disturbed",
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _host(result: dict[str, Any]) -> list[str]:
    """What of a step is not the model, and what sampling costs."""
    told = []
    for rows in sorted({one["rows"] for one in result["figures"] if one["peer"] == OURS and one["rows"]}):
        rounds, _ = rounds_of(result, rows)
        share = median(one[OURS]["host_share"] for one in rounds)
        drawn = [one[SAMPLED]["tokens_per_second"] for one in rounds if SAMPLED in one]
        sampled = f", sampled {_number(median(drawn))} tok/s" if drawn else ""
        told.append(f"{rows} rows {share:.1%}{sampled}")
    return ["", f"Host outside the forward: {'; '.join(told)}."] if told else []
