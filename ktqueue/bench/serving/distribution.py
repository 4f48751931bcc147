"""Times in bounded memory: their mean, spread and percentiles."""

import math
from collections import Counter
from collections.abc import Iterable

PRECISION = 0.002  # of percentiles, as a share of the value
_SCALE = 1.0 / math.log1p(PRECISION)
_LEAST = 1e-7  # seconds: less counts as nothing


class Distribution:
    """Counts times, in seconds, in buckets whose bounds differ by PRECISION."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._sum_of_squares = 0.0
        self._least = math.inf
        self._most = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Add one time."""
        self.count += 1
        self._sum += seconds
        self._sum_of_squares += seconds * seconds
        self._least = min(self._least, seconds)
        self._most = max(self._most, seconds)
        self._buckets[math.floor(math.log(max(seconds, _LEAST)) * _SCALE)] += 1

    def extend(self, times: Iterable[float]) -> None:
        """Add several times."""
        for seconds in times:
            self.add(seconds)

    @property
    def mean(self) -> float:
        """Mean in seconds; NaN if there is no time."""
        return self._sum / self.count if self.count else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation in seconds; NaN if there is no time."""
        if not self.count:
            return math.nan
        return math.sqrt(max(self._sum_of_squares / self.count - self.mean**2, 0.0))

    def percentile(self, percent: float) -> float:
        """The time that `percent` of the times do not exceed, within PRECISION; NaN if there is no time."""
        rank, seen = max(1, math.ceil(self.count * percent / 100)), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                middle = math.exp((bucket + 0.5) / _SCALE)
                return min(max(middle, self._least), self._most)
        return math.nan
