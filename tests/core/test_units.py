"""Byte sizes are parsed and formatted."""

import pytest

from ktqueue.core.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4096 b", 4096),
        ("1k", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        (" 1.5 GiB ", 3 << 29),
        ("500MB", 500_000_000),
        ("8gib", 8 << 30),
        ("1.5 TiB", 3 << 39),
        ("9" * 30, 10**30 - 1),
    ],
)
def test_byte_sizes_are_parsed(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "b", "-1", -1, "1.2.3", "1 PiB", "1.5", "many", None, True, 1.5j, "1e3", "."])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)


def test_byte_sizes_are_formatted() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "5120.0 GiB",
    ]
