"""One line of a crontab: when a chore is due, and which. Pure.

Five fields (minute, hour, day of the month, month, day of the week with Sunday as 0 or 7), each `*`, `*/STEP`,
`FROM-TO` or a number; then the chore and its arguments. Unlike cron's, both days must fit where both are given.
"""

import re
from collections.abc import Collection

from ktqueue.core.errors import ConfigError

FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 7))
LONGEST_MONTHS = (0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)  # days, by the number of the month


def parse_entry(entry: str, chores: Collection[str]) -> tuple[dict[str, set[int]], str, list[str]]:
    """What arq's `cron` takes (Monday is 0 there; what is always so is left out), the chore, its arguments.

    Raises ConfigError.
    """
    words = entry.split()
    if len(words) < 6:
        raise _fault(entry, "five fields and a chore are needed")
    if words[5] not in chores:
        raise _fault(entry, f"no chore {words[5]!r}; there are {', '.join(sorted(chores))}")
    when: dict[str, set[int]] = {}
    for (name, low, high), text in zip(FIELDS, words, strict=False):
        values = _values(entry, name, text, low, high)
        if name == "weekday":
            values = {(day - 1) % 7 for day in values}
        if text != "*":
            when[name] = values
    longest = max(LONGEST_MONTHS[month] for month in when.get("month", range(1, 13)))
    if min(when.get("day", (1,))) > longest:  # arq would look for such a day until the year 10000
        raise _fault(entry, "there is no such day")
    if "minute" not in when:
        when["minute"] = set(range(60))
    return when, words[5], words[6:]


def _values(entry: str, name: str, text: str, low: int, high: int) -> set[int]:
    match = re.fullmatch(r"(?:\*|(\d+)(?:-(\d+))?)(?:/(\d+))?", text)
    if match is None:
        raise _fault(entry, f"{name} is {text!r}")
    first = low if match[1] is None else int(match[1])
    last = int(match[2]) if match[2] else first if match[1] and not match[3] else high
    values = set(range(first, last + 1, int(match[3] or 1) or high + 1))
    if not values or not low <= first <= last <= high or match[3] == "0":
        raise _fault(entry, f"{name} must be from {low} to {high}, got {text!r}")
    return values


def _fault(entry: str, reason: str) -> ConfigError:
    return ConfigError(f"control.crontab: {entry!r}: {reason}", param="control.crontab", value=entry)
