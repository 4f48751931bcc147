"""How fast a batch runs, over its last minute."""

import time
from collections import deque

SECONDS = 60.0


class Speed:
    """Lines and tokens that were done at times of the monotonic clock."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=128)

    def add(self, lines: int, tokens: int) -> None:
        """Note the sums up to now."""
        now = time.monotonic()
        self._seen.append((now, lines, tokens))
        while len(self._seen) > 2 and self._seen[0][0] < now - SECONDS:
            self._seen.popleft()

    def tokens_per_second(self) -> float | None:
        """Tokens of answers a second, or None while that is not known."""
        seconds, _, tokens = self._difference()
        return tokens / seconds if seconds else None

    def seconds_left(self, lines: int) -> float | None:
        """Seconds until `lines` more are done, or None while that is not known."""
        seconds, done, _ = self._difference()
        return lines * seconds / done if done else None

    def _difference(self) -> tuple[float, int, int]:
        if len(self._seen) < 2:
            return 0.0, 0, 0
        first, last = self._seen[0], self._seen[-1]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]
