"""Rates: counters that only grow, as tokens a second over the last seconds. Knows no engine."""

from collections import deque
from collections.abc import Mapping

COUNTERS = ("generation_tokens", "prompt_tokens")
WINDOW_SECONDS = 5.0


class Rates:
    """Fed with a worker's figures at every beat; a beat longer apart than the window is a window of its own."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, float]]] = deque()

    def of(self, now: float, stats: Mapping[str, float]) -> dict[str, float]:
        """`COUNTER_per_second` for each of COUNTERS, at `now` (seconds of any clock that only grows)."""
        self._samples.append((now, {name: stats.get(name, 0.0) for name in COUNTERS}))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_SECONDS:
            self._samples.popleft()
        begin, before = self._samples[0]
        seconds = now - begin
        latest = self._samples[-1][1]
        return {f"{name}_per_second": (latest[name] - before[name]) / seconds if seconds else 0.0 for name in COUNTERS}
