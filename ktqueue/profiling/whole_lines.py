"""Says whether a line of a profile is whole: the files may be torn, damaged or another program's."""

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, Final

from ktqueue.profiling.records import EXPERT_FIELDS, STEP_PARTS
from ktqueue.profiling.token_log import FIRST_PARTS, LAST_PARTS

_MOST = 1e18  # of any number, so that sums are finite
_LAST_SECOND = 253402300799  # of the year 9999
_Numbers = Callable[[Mapping[str, Any]], tuple[float, ...]]

_NUMBERS: Final[Mapping[str, _Numbers]] = {
    "steps": itemgetter("at", "seconds", *STEP_PARTS, "rows", "tokens", "prompt_tokens", "pages_used"),
    "tokens": itemgetter("at", "choice", "position", "between", *STEP_PARTS, *LAST_PARTS),
    "same_step": itemgetter("at", "choice", "position"),
    "requests": itemgetter("at", "seconds", "first", "status"),
    "routing": itemgetter("at", "steps"),
    "process": itemgetter("at", "at"),
}
"""The numbers that each line of a kind has. Tokens of the same step as the one before have fewer."""
_MORE: Final[Mapping[str, _Numbers]] = {
    "arrived": itemgetter("arrived", *FIRST_PARTS),
    "dropped": itemgetter("dropped", "dropped"),
}
"""The numbers of lines that have this field."""
_EXPERTS: Final = frozenset(EXPERT_FIELDS)
_EXPERT_NUMBERS: Final[_Numbers] = itemgetter(*EXPERT_FIELDS)


def is_whole_head(head: Mapping[str, Any]) -> bool:
    """Whether the numbers among the facts of a process can be used."""
    try:
        return bool(0 <= head["started"] <= _LAST_SECOND and 0 <= (head.get("memory_bandwidth") or 0) < _MOST)
    except (KeyError, TypeError):
        return False


def is_whole(line: Mapping[str, Any], kind: str) -> bool:
    """Whether a line has all fields of its kind, with numbers and texts where they belong."""
    try:
        numbers = _NUMBERS["same_step" if "same_step" in line else kind](line)
        for name, more in _MORE.items():
            if name in line:
                numbers += more(line)
        if kind == "steps" and not _EXPERTS.isdisjoint(line):
            numbers += _EXPERT_NUMBERS(line)
        elif kind == "routing":
            numbers += tuple(number for layer in line["uses"] for number in layer)
        texts = _texts(line, kind)
    except (KeyError, TypeError):
        return False
    least = 0 if kind == "routing" else -_MOST
    return _are_numbers(numbers, least) and line["at"] <= _LAST_SECOND and all(isinstance(text, str) for text in texts)


def _texts(line: Mapping[str, Any], kind: str) -> tuple[Any, ...]:
    if kind == "tokens":
        return (line["request"],)
    return (line["path"], line["request_id"], *line["requests"]) if kind == "requests" else ()


def _are_numbers(values: tuple[Any, ...], least: float) -> bool:
    try:
        return bool(least <= min(values) and max(values) < _MOST)
    except TypeError:
        return False
