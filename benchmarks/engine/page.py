"""The page of the CPU's engine: sections for the files cpu-*.json, experts-*.json, endurance-*.json and
simulated-*.json."""

from statistics import median
from typing import Any

from benchmarks.tables import DISTURBED, Columns, Row, conditions, rate, section, software, where

OURS, SAMPLED = "ktqueue", "ktqueue sampled"
LLAMA = ("llama.cpp repack", "llama.cpp no-repack")


def compare(result: dict[str, Any]) -> list[str]:
    """Decode and prefill of one model, beside llama.cpp on the same file."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    beside = f" Beside it {versions} in both of its expert paths; the better one of a round counts." if versions else ""
    points = sorted({figure["rows"] for figure in result["figures"]}, key=lambda rows: rows or 1 << 20)
    text = (
        f"Decode of {result['tokens']} tokens a row after prompts of {result['prompt_tokens']}, and a prompt of "
        f"{result['prefill']} alone (prefill); {result['threads']} threads; medians of undisturbed rounds."
        f"{beside} {conditions(result)}"
    )
    return section(result["model"], text, _COMPARE, [_point(result, rows) for rows in points]) + _host(result)


_COMPARE: Columns = {
    "rows": "{rows}", "tok/s": "{ours}", "step": "{step}", "llama.cpp: repacked": "{repacked}",
    "not repacked": "{plain}", "ours to theirs (best steps)": "{ratio}", "distinct experts a layer": "{experts}",
    "a step reads": "{reads}", "GB/s ours, theirs": "{speeds}", "probe": "{probe:.0f}", "rounds": "{rounds}",
}  # fmt: skip


def _rounds_of(result: Row, rows: int) -> tuple[list[dict[str, Row]], bool]:
    """The rounds of a point that count, each by peer, and whether they were undisturbed."""
    rounds: dict[int, dict[str, Row]] = {}
    for figure in where(result, rows=rows):
        rounds.setdefault(figure["round"], {})[figure["peer"]] = figure
    quiet = [peers for peers in rounds.values() if all(row["others"] <= DISTURBED for row in peers.values())]
    return quiet or list(rounds.values()), bool(quiet)


def _point(result: Row, rows: int) -> Row:
    rounds, quiet = _rounds_of(result, rows)

    def middle(peer: str, key: str) -> float | None:
        values = [peers[peer][key] for peers in rounds if peer in peers]
        return median(values) if values else None

    theirs = [peer for peer in LLAMA if peer in rounds[0]]
    ratio = "-"
    if OURS in rounds[0] and theirs:
        each = [r[OURS]["tokens_per_second"] / max(r[peer]["tokens_per_second"] for peer in theirs) for r in rounds]
        ours, best = (
            min(r[peer]["fastest_step_ms"] for r in rounds for peer in peers) for peers in ([OURS], theirs)
        )  # fmt: skip
        ratio = f"{median(each):.2f} ({best / ours:.2f})"
    size = result["step_bytes"].get(str(rows))
    steps = [middle(peer, "step_ms") for peer in (OURS, *LLAMA)]
    theirs_step = min((step for step in steps[1:] if step), default=None)
    speeds = [f"{size / step / 1e6:.1f}" if size and step else "-" for step in (steps[0], theirs_step)]
    repacked, plain = (rate(middle(peer, "tokens_per_second")) for peer in LLAMA)
    return {
        "rows": rows or "prefill",
        "ours": rate(middle(OURS, "tokens_per_second")),
        "step": f"{steps[0]:.2f} ms" if steps[0] else "-",
        "repacked": repacked,
        "plain": plain,
        "ratio": ratio,
        "experts": f"{result['distinct_experts'][str(rows)]:.1f} of {result['experts_of_layer']}" if rows else "-",
        "reads": f"{size / 1e6:.0f} MB" if size else "-",
        "speeds": ", ".join(speeds),
        "probe": median(row["bandwidth_gb_s"] for peers in rounds for row in peers.values()),
        "rounds": f"{len(rounds)}" if quiet else f"{len(rounds)}, disturbed",
    }


def _host(result: Row) -> list[str]:
    """The part of a step that is outside the model, and the speed with sampling."""
    parts = []
    for rows in sorted({row["rows"] for row in result["figures"] if row["peer"] == OURS and row["rows"]}):
        rounds, _ = _rounds_of(result, rows)
        share = median(peers[OURS]["host_share"] for peers in rounds)
        speeds = [peers[SAMPLED]["tokens_per_second"] for peers in rounds if SAMPLED in peers]
        sampled = f", sampled {rate(median(speeds))} tok/s" if speeds else ""
        parts.append(f"{rows} rows {share:.1%}{sampled}")
    return ["", f"Host outside the forward: {'; '.join(parts)}."] if parts else []


def experts(result: dict[str, Any]) -> list[str]:
    """Expert layers alone, from a file of `ktqueue bench experts --json`."""
    machine = result["machine"]
    memory = next(level for level in machine["bandwidths"] if level["level"] == "DRAM")["all_threads"]
    peaks = ", ".join(
        f"{peak['arithmetic']} {peak['isa']} {peak['all_threads'] / 1e9:,.0f} GFLOP/s"
        for peak in machine["peaks"]
        if peak["isa"] in ("avx512", "amx") and peak["arithmetic"] != "fp32"
    )
    return section(
        f"Expert layers, {machine['cpu']}, {machine['threads']} threads",
        'Routed experts of one layer in Qwen3-30B-A3B\'s shape (2048, 768, 8 of 128 at random; with "each" so many '
        "rows for each of 8), weights from DRAM. "
        f"Before the points the machine gave {memory / 1e9:.0f} GB/s and {peaks}; load average "
        f"{result['load_before']:.2f} before and {result['load_after']:.2f} after. Shares are of what was "
        "probed beside each point; where those probes disagree, the row has a `?`. "
        f"{result['taken'][:10]}. `ktqueue bench experts --json FILE`, formats and tokens as in the rows.",
        {
            "format": "{quant}",
            "isa": "{isa}",
            "tokens": lambda point: f"{point['tokens']}{'' if point['routed'] else ' each'}",
            "layer": lambda point: f"{1e6 * point['seconds']:,.0f} us",
            "weights read": lambda point: f"{point['bytes_per_second'] / 1e9:.1f} GB/s",
            "of DRAM": lambda point: f"{point['bandwidth_share']:.0%}{' ?' if point['disturbed'] else ''}",
            "GFLOP/s": lambda point: f"{point['operations_per_second'] / 1e9:,.0f}",
            "of peak": lambda point: f"{point['peak_share']:.0%}",
        },
        result["points"],
        words=2,
    )


def endurance(result: dict[str, Any]) -> list[str]:
    """Many requests through one engine."""
    notes = result["notes"]
    return section(
        f"{notes[-1]['requests']:,} requests through one engine, {result['device']}",
        "Requests of random shapes; what the process held each time that the engine was empty. Device: all that is "
        f"taken of its memory. {result['seconds']:.0f} s. {software(result)}",
        {
            "requests": "{requests:,}", "steps": "{steps:,}", "tokens": "{tokens:,}",
            "preemptions": "{preemptions:,}", "finished, aborted, failed": "{finished}, {aborted}, {failed}",
            "pages missing": "{missing_pages}", "device": "{device_mb:.0f} MB", "host": "{host_mb:.0f} MB",
            "threads": "{threads}", "open files": "{files}",
        },
        notes,
    )  # fmt: skip


def simulated_backlog(result: dict[str, Any]) -> list[str]:
    """Ways to share the engine between a batch and chats, in virtual time."""

    def both(name: str) -> str:
        return f"{{{name}_p50_ms:.0f}}, {{{name}_p95_ms:.0f}} ms"

    m = result["machine"]
    return section(
        "A backlog beside chats, simulated",
        "A simulation: the real engine and scheduler on a virtual clock, with a runner that computes nothing. Steps "
        "take what they took on an H200's host with experts of Qwen3-30B-A3B in host memory, where a profile of commit "
        f"5143b90b was made. A step beside an overlapped one is assumed to have {result['cpu_rate']:.0%} of its speed, "
        f"and that one {result['bus_rate']:.0%} meanwhile. Alone, an overlapped step is assumed to take the "
        f"time of another of its size, times {result['longer']:g}. {result.get('note', '')} "
        "Prompts alone beside: the batch's "
        f"steps compute all other tokens of chats. {result['rows']:,} rows; {result['line_tokens']} tokens after "
        f"prompts of {result['prompt_tokens']} in the batch, {result['chat_tokens']} after as many in a chat; "
        f"{result['seconds']:.0f} virtual seconds a row, after the batch ran alone. Alone it has "
        f"{result['batch_alone_tokens_per_second']:,.0f} tok/s. Commit {m['commit']}, {m['taken']}. "
        f"`{result['command']}`",
        {
            "arrivals": "{arrivals}", "chats a second": "{rate:g}", "way": "{way}",
            "batch tok/s": "{batch_tokens_per_second:.0f}", "of alone": "{share_of_alone:.0%}",
            "first token p50, p95": both("first_token"), "between tokens p50, p95": both("between_tokens"),
        },
        result["figures"],
    )  # fmt: skip


def simulated_drafts(result: dict[str, Any]) -> list[str]:
    """What drafts of a small model cost and gain, in virtual time."""
    m = result["machine"]
    return section(
        "Drafts of a small model, simulated",
        "A simulation: the real engine on a virtual clock, with a model and a draft model that compute nothing. Steps "
        "take what they took on an H200 with all experts of Qwen3-30B-A3B on the GPU, or on its host's CPU. A pass of "
        "a draft model takes 0.9 ms or more, and reading 2,048 tokens is assumed to take 10 ms. Each row has "
        f"{result['requests']} requests one after another, of {result['answer_tokens']} tokens. Gain in tokens a "
        "second: of the first requests after a start, of all, and of the last. Right: the part of such drafts, after "
        f"right ones. {result.get('note', '')} Commit {m['commit']}, {m['taken']}. `{result['command']}`",
        {
            "experts on the": "{experts}", "rows": "{rows}", "prompt": "{prompt_tokens}", "right": "{right:.0%}",
            "first": "{first_gain:+.1%}", "all": "{gain:+.1%}", "last": "{last_gain:+.1%}", "steps": "{steps}",
            "right of drafts": "{accepted} of {drafted}",
        },
        result["figures"],
    )  # fmt: skip
