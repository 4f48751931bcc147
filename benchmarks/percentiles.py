"""Percentiles of measured times."""

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of the values are (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]


def percentiles(milliseconds: Sequence[float], *percents: int, prefix: str = "") -> dict[str, float]:
    """Several of them, for a result: `p50_ms` and so on, after `prefix`."""
    return {f"{prefix}p{percent}_ms": percentile(milliseconds, percent) for percent in percents}
