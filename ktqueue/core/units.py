"""Byte sizes as people write them."""

import re
from fractions import Fraction

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def parse_bytes(value: int | str) -> int:
    """Return the bytes of `"8GiB"`, `"500MB"`, `"4096"` or an int. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]i?)?b?\s*", str(value).lower())
    if match is None:
        raise ValueError(f"not a byte size: {value!r}")
    count = Fraction(match[1]) * _UNITS[match[2] or ""]
    if not match[2] and count.denominator != 1:
        raise ValueError(f"not a whole number of bytes: {value!r}")
    return int(count)


def format_bytes(count: float) -> str:
    """Write bytes as a short text such as `"1.5 GiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
