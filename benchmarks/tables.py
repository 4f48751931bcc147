"""Markdown tables of figures, and the sentences about the conditions under which figures were measured.

A column is a heading and a format string over the keys of a row, or a function of the row.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

DISTURBED = 0.1  # CPUs that other processes used: figures above it count only where no round is below it

Row = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Any], str]]


def table(columns: Columns, rows: Iterable[Any], *, words: int = 0) -> list[str]:
    """A Markdown table. The first `words` columns are aligned left, all others right."""
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * words}{' ---: |' * (len(columns) - words)}"]
    for row in rows:
        cells = [cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def software(result: Row) -> str:
    """The machine, the versions and the command of a result."""
    m = result["machine"]
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['isa']}, {m['memory_gib']} GiB; torch {m['packages']['torch']}, "
        f"Python {m['python']}; commit {m['commit']}, {m['taken']}. `{result['command']}`"
    )


def conditions(result: Row) -> str:
    """Memory bandwidth and load during the measurement, then `software`."""
    load = _sorted(result["figures"], "load_average")
    memory = _sorted(result["figures"], "bandwidth_gb_s")
    return (
        f"Memory read {memory[0]} to {memory[-1]} GB/s, load average {load[0]} to {load[-1]} while measuring. "
        f"{software(result)}"
    )


def bystanders(result: Row) -> str:
    """CPUs that other processes used during the measurement, then `software`."""
    load, others = (_sorted(result["figures"], key) for key in ("load_average", "others"))
    return (
        f"Others took {median(others):.2f} CPUs in the median ({others[0]:.2f} to {others[-1]:.2f}), load average "
        f"{load[0]} to {load[-1]} while measuring. {software(result)}"
    )


def undisturbed(figures: Sequence[Row]) -> list[Row]:
    """The figures that no other process disturbed; all figures if each of them was disturbed."""
    return [figure for figure in figures if figure["others"] <= DISTURBED] or list(figures)


def _sorted(figures: Sequence[Row], key: str) -> list[Any]:
    return sorted(figure[key] for figure in figures if key in figure)


def where(result: Row, **wanted: Any) -> list[Row]:
    """The figures whose keys have the wanted values."""
    return [row for row in result["figures"] if all(row[key] == value for key, value in wanted.items())]


def median_of(figures: Sequence[Row], key: str, shape: str) -> str:
    """The median of one key, formatted; "-" without figures."""
    return shape.format(median(figure[key] for figure in figures)) if figures else "-"


def rounds(figures: Sequence[Row]) -> str:
    """How many rounds count, and whether they were disturbed."""
    quiet = sum(figure["others"] <= DISTURBED for figure in figures)
    return f"{quiet}" if quiet else f"{len(figures)}, disturbed"


def percent(value: float | None) -> str:
    """A share in percent; "-" for None."""
    return "-" if value is None else f"{value:.0%}"


def rate(value: float | None) -> str:
    """Tokens a second with three digits; "-" for None."""
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def pairs(heading: str, rows: Mapping[str, str]) -> list[str]:
    """A table of two columns: what, and its figure."""
    return table({"what": lambda pair: pair[0], heading: lambda pair: pair[1]}, rows.items(), words=1)


def numbered(figures: Iterable[Row]) -> list[Row]:
    """The rows with their `round`, counted from 1."""
    return [{"round": number, **row} for number, row in enumerate(figures, 1)]
