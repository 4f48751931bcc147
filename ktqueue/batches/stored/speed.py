"""How fast a batch runs, over its last minute."""

from collections import deque
from itertools import pairwise

from ktqueue.broker.batches import BatchSpeed

SECONDS = 60.0


class Speed:
    """Lines and tokens that were done at times of one clock, from the beginning of the run."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=128)

    def add(self, now: float, lines: int, tokens: int) -> None:
        """Note the sums up to now. The first ones are those with which the run begins."""
        self._seen.append((now, lines, tokens))
        while len(self._seen) > 2 and self._seen[1][0] < now - SECONDS:
            self._seen.popleft()

    def measured(self, now: float, total: int) -> BatchSpeed:
        """The tokens of answers a second, and the time until all lines are done, of which there are `total`.

        Lines that run together may end together, so a pause counts only if it is longer than those between the others.
        """
        if len(self._seen) < 2:
            return BatchSpeed()
        (first, lines_before, tokens_before), (last, lines, tokens) = self._seen[0], self._seen[-1]
        longest = max(later[0] - earlier[0] for earlier, later in pairwise(self._seen))
        seconds = last - first + max(0.0, now - last - longest)
        if seconds <= 0 or lines == lines_before:
            return BatchSpeed()
        return BatchSpeed((tokens - tokens_before) / seconds, (total - lines) * seconds / (lines - lines_before))
