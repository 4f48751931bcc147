"""Markdown tables of figures, and the sentences about the conditions under which figures were measured.

A column is a heading and a format string over the keys of a row, or a function of the row.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

DISTURBED = 0.1  # CPUs that other processes used: figures above it count only where no round is below it

Row = Mapping[str, Any]
Group = Sequence[Row]  # figures of one point, one of each round
Cell = Callable[[Any], str]
Columns = Mapping[str, str | Cell]


def table(columns: Columns, rows: Iterable[Any], *, words: int = 0) -> list[str]:
    """A Markdown table, with "-" where a row lacks a key. The first `words` columns are aligned left, others right."""
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * words}{' ---: |' * (len(columns) - words)}"]
    return lines + [f"| {' | '.join(_text(cell, row) for cell in columns.values())} |" for row in rows]


def _text(cell: str | Cell, row: Any) -> str:
    try:
        return cell.format_map(row) if isinstance(cell, str) else cell(row)
    except KeyError:
        return "-"


def section(title: str, text: str, columns: Columns, rows: Iterable[Any], *, words: int = 0) -> list[str]:
    """A section of a page: a heading, a paragraph and a table."""
    return [f"### {title}", text, "", *table(columns, rows, words=words)]


def own_section(result: Row) -> list[str]:
    """The section of a result that was taken once: the file itself has its text and its columns."""
    own = result["section"]
    return section(own["title"], own["text"], own["columns"], result["figures"], words=own["words"])


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


def grouped(result: Row, *keys: str) -> list[Group]:
    """The figures in groups with equal values of `keys`, ordered by these."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for figure in result["figures"]:
        groups.setdefault(tuple(figure[key] for key in keys), []).append(figure)
    return [groups[values] for values in sorted(groups)]


def middle(key: str, shape: str) -> Cell:
    """A column of groups: the median of one key over the rounds that count."""
    return lambda group: median_of(undisturbed(group), key, shape)


def shared(shape: str) -> Cell:
    """A column of groups: what all figures of a group have in common."""
    return lambda group: shape.format_map(group[0])


def median_of(figures: Sequence[Row], key: str, shape: str) -> str:
    """The median of one key, formatted; "-" without figures."""
    return shape.format(median(figure[key] for figure in figures)) if figures else "-"


def rounds(figures: Sequence[Row]) -> str:
    """How many rounds count, and whether they were disturbed."""
    quiet = sum(figure["others"] <= DISTURBED for figure in figures)
    return f"{quiet}" if quiet else f"{len(figures)}, disturbed"


def rate(value: float | None) -> str:
    """Tokens a second with three digits; "-" for None."""
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def pairs(title: str, text: str, heading: str, rows: Mapping[str, str]) -> list[str]:
    """A section whose table has two columns: what, and its figure."""
    return section(title, text, {"what": lambda row: row[0], heading: lambda row: row[1]}, rows.items(), words=1)


def numbered(figures: Iterable[Row]) -> list[Row]:
    """The rows with their `round`, counted from 1."""
    return [{"round": number, **row} for number, row in enumerate(figures, 1)]
