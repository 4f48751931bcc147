"""The table of `benchmarks.floods`."""

from typing import Any

HEAD = ("hostile sockets", "from addresses", "first token, nobody else there", "during the flood", "longest",
        "failed chats", "/healthz, longest", "gateway's memory before", "highest", "open at the end")  # fmt: skip


def make(result: dict[str, Any]) -> list[str]:
    """Lines of Markdown."""
    machine = result["machine"]
    lines = [
        "### A stranger's chat during a flood",
        f"{result['figures'][0]['sockets']:,} hostile sockets of one kind at a time, against what `ktqueue up` runs "
        f"with default settings; each one that the gateway closes is opened again, {result['reopen_per_second']:g} a "
        "second at most. The hostile process runs on the same cores, at the lowest priority. Figures are medians of "
        f"{result['chats']} chats, each over a new connection from an address of its own, before the flood and from "
        "8 s after all its sockets were opened. "
        f"{machine['cpu']}, {machine['cores']} cores, {result['conditions']}. {machine['taken']}.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{' --- |' * 2}{' ---: |' * (len(HEAD) - 2)}",
    ]
    return [*lines, *(_line(one) for one in result["figures"])]


def _line(one: dict[str, Any]) -> str:
    cells = [
        one["kind"],
        str(one["addresses"]),
        _time(one["idle_ms"]),
        _time(one["flooded_ms"]),
        _time(one["flooded_longest_ms"]),
        str(one["failed_chats"]),
        _time(one["probe_longest_ms"]),
        f"{one['memory_before_mb']:.0f} MB",
        f"{one['memory_highest_mb']:.0f} MB",
        f"{one['open']:,}",
    ]
    return f"| {' | '.join(cells)} |"


def _time(milliseconds: float | None) -> str:
    return "none" if milliseconds is None else f"{milliseconds:,.0f} ms"
