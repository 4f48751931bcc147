"""Lines of the crontab."""

from typing import Any

import pytest

from ktqueue.core.errors import ConfigError
from ktqueue.workers.arq.crontab import parse_entry

CHORES = ("batches", "retention", "batch")
EVERY = set(range(60))


@pytest.mark.parametrize(
    ("entry", "when", "rest"),
    [
        ("* * * * * batches", {"minute": EVERY}, ("batches", [])),
        ("17 3 * * * retention", {"minute": {17}, "hour": {3}}, ("retention", [])),
        ("*/30 8-9 1 12 * batches", {"minute": {0, 30}, "hour": {8, 9}, "day": {1}, "month": {12}}, ("batches", [])),
        ("0 0 * * 0 batch a.jsonl demo", {"minute": {0}, "hour": {0}, "weekday": {6}}, ("batch", ["a.jsonl", "demo"])),
        ("5/25 * * * 1-5 batches", {"minute": {5, 30, 55}, "weekday": {0, 1, 2, 3, 4}}, ("batches", [])),
        ("0 * * * 7 batches", {"minute": {0}, "weekday": {6}}, ("batches", [])),
    ],
)  # fmt: skip
def test_lines_of_the_crontab_are_parsed(entry: str, when: dict[str, Any], rest: Any) -> None:
    assert parse_entry(entry, CHORES) == (when, *rest)


@pytest.mark.parametrize(
    "entry",
    ["", "* * * * batches", "60 * * * * batches", "* 24 * * * batches", "* * 0 * * batches", "*/0 * * * * batches",
     "5-1 * * * * batches", "x * * * * batches", "* * * * 8 batches", "* * * * * sweep",
     "1,2 * * * * batches", "0 0 30-31 2 * batches"],
)  # fmt: skip
def test_a_wrong_line_of_the_crontab_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"control\.crontab"):
        parse_entry(entry, CHORES)
