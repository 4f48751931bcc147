"""Names in narrow columns: they are cut where no two of them look the same."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement


@lru_cache(32)  # every cell of a column asks for all of them
def short_names(names: frozenset[str], width: int) -> dict[str, str]:
    """Each name in at most `width` characters: cut at the end or in the middle, from a difference on, or numbered."""
    distinct = sorted(names)
    common = 0  # characters at the beginning that all have
    while all(name[: common + 1] == distinct[0][: common + 1] for name in distinct) and common < len(distinct[0]):
        common += 1
    for tail in range(width // 2 + 1):
        short = {name: _with_gap(name, width, tail) for name in distinct}
        if len(set(short.values())) == len(distinct):
            return short
    short = {name: name if len(name) <= width else _end("…" + name[common:], width) for name in distinct}
    if len(set(short.values())) == len(distinct):
        return short
    return {name: _end(name, width - len(f"{place}")) + f"{place}" for place, name in enumerate(distinct, 1)}


def _with_gap(name: str, width: int, tail: int) -> str:
    return name if len(name) <= width else name[: max(0, width - tail - 1)] + "…" + name[len(name) - tail :]


def _end(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


@dataclass(frozen=True, slots=True)
class ShortName:
    """A cell of a table: a name that differs from the others of its `column` in any width."""

    name: str
    column: frozenset[str]

    def __rich_measure__(self, console: "Console", options: "ConsoleOptions") -> "Measurement":
        from rich.measure import Measurement

        return Measurement(1, len(self.name))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        shown = short_names(self.column, options.max_width)[self.name]
        yield Text(shown, no_wrap=True, overflow="ellipsis")
