"""Entries of a crontab: when a chore is due, and which chore. Pure.

An entry has five fields: minute, hour, day of the month, month, and day of the week with Sunday as 0 or 7. Each is `*`,
`*/STEP`, `FROM-TO` or a number. The chore and its arguments follow. If both days are given, both must match; cron runs
when either matches.
"""

import re
from collections.abc import Collection

from ktqueue.core.errors import ConfigError

FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 7))
LONGEST_MONTHS = (0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)  # days, by the number of the month


def parse_entry(entry: str, chores: Collection[str]) -> tuple[dict[str, set[int]], str, list[str]]:
    """Parse an entry. Returns the fields for arq's `cron`, the chore and its arguments.

    In the fields Monday is 0, and a field that always matches is missing. Raises ConfigError.
    """
    words = entry.split()
    if len(words) < 6:
        raise _fault(entry, "five fields and a chore are required")
    if words[5] not in chores:
        raise _fault(entry, f"unknown chore {words[5]!r}; the chores are {', '.join(sorted(chores))}")
    when: dict[str, set[int]] = {}
    for (name, low, high), text in zip(FIELDS, words, strict=False):
        values = _values(entry, name, text, low, high)
        if name == "weekday":
            values = {(day - 1) % 7 for day in values}
        if text != "*":
            when[name] = values
    longest = max(LONGEST_MONTHS[month] for month in when.get("month", range(1, 13)))
    if min(when.get("day", (1,))) > longest:  # arq would search for such a day until the year 10000
        raise _fault(entry, "no month has such a day")
    if "minute" not in when:
        when["minute"] = set(range(60))
    return when, words[5], words[6:]


def _values(entry: str, name: str, text: str, low: int, high: int) -> set[int]:
    match = re.fullmatch(r"(?:\*|(\d+)(?:-(\d+))?)(?:/(\d+))?", text)
    if match is None:
        raise _fault(entry, f"{name} must be `*`, `*/STEP`, `FROM-TO` or a number, got {text!r}")
    first = low if match[1] is None else int(match[1])
    last = int(match[2]) if match[2] else first if match[1] and not match[3] else high
    values = set(range(first, last + 1, int(match[3] or 1) or high + 1))
    if not values or not low <= first <= last <= high or match[3] == "0":
        raise _fault(entry, f"{name} must be from {low} to {high}, got {text!r}")
    return values


def _fault(entry: str, reason: str) -> ConfigError:
    return ConfigError(f"control.crontab: {entry!r}: {reason}", param="control.crontab", value=entry)
