"""What a step costs: how long steps of each size took, by measurement. Pure.

Sizes are numbers of tokens. Steps of about the same size share a group, whose last few times are kept. The medians of
the groups are the points of a curve. So one slow step, such as the first, changes little.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from statistics import median

KEPT = 5  # last steps of a group
FAR_MORE = 1.5
RETRY_SECONDS = 60.0  # after which a larger size is tried again: it may have been slow for a moment
AS_FAST = 0.95  # a size is as fast as another that computes at most so much fewer tokens a second

Point = tuple[float, float]
"""Tokens and seconds."""


class StepCosts:
    """Seconds of a step by its number of tokens, up to `most`. Without observations every step costs nothing. `clock`
    gives seconds."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._observed: dict[int, float] = {}  # when the groups were observed last, by their places
        self._ends = _group_ends(most)
        self._groups: list[deque[Point]] = [deque(maxlen=KEPT) for _ in self._ends]
        self._middles: dict[int, Point] = {}  # of the groups that were observed, by their places
        self.points: list[Point] = []

    def clear(self) -> None:
        """Forget all observations."""
        for group in self._groups:
            group.clear()
        self._middles, self.points, self._observed = {}, [], {}

    def observe(self, tokens: int, seconds: float) -> None:
        """Add the time of a step of `tokens` tokens, at least one."""
        place = min(bisect_left(self._ends, tokens), len(self._ends) - 1)
        self._groups[place].append((tokens, seconds))
        self._observed[place] = self._clock()
        self._middles[place] = _middle(self._groups[place])
        self.points = [self._middles[place] for place in sorted(self._middles)]

    def seconds(self, tokens: int) -> float:
        """Estimate the time of a step. A step larger than all that were observed costs in proportion."""
        points = self.points
        if not points:
            return 0.0
        place = bisect_left(points, (tokens, 0.0))
        if place == 0:
            return points[0][1]
        if place == len(points):
            last, seconds = points[-1]
            return seconds * tokens / last
        (low, fast), (high, slow) = points[place - 1], points[place]
        return fast + (slow - fast) * (tokens - low) / (high - low)

    def most_tokens(self, seconds: float) -> int:
        """The largest step that takes at most `seconds`. 0 if the smallest that was observed took longer."""
        points = self.points
        if not points:
            return self.most
        place = next((place for place in range(len(points) - 1, -1, -1) if points[place][1] <= seconds), None)
        if place is None:
            return 0
        low, fast = points[place]
        if place == len(points) - 1:
            return min(self.most, int(low * seconds / fast)) if fast > 0.0 else self.most
        high, slow = points[place + 1]
        return int(low + (seconds - fast) / (slow - fast) * (high - low))

    def gains_by_filling(self, tokens: int, more: int, full: int) -> bool:
        """Whether `more` tokens beside `tokens` cost far more each than in a step that is filled up to `full`."""
        now = (self.seconds(tokens + more) - self.seconds(tokens)) / more
        filled = (self.seconds(full) - self.seconds(tokens)) / (full - tokens)
        return now > FAR_MORE * filled

    def best_tokens(self) -> int:
        """The smallest step that computes about as many tokens a second as any.

        While the largest step that was observed is the fastest, larger ones may be faster still. The next larger size
        is tried again if it was not observed for RETRY_SECONDS.
        """
        places = sorted(self._middles)
        rates = [tokens / max(seconds, 1e-9) for tokens, seconds in self.points]
        if not rates:
            return self.most
        fast = next(number for number, rate in enumerate(rates) if rate >= AS_FAST * max(rates))
        if fast == len(rates) - 1:
            return self.most
        is_old = self._clock() - self._observed[places[fast + 1]] > RETRY_SECONDS
        return int(self.points[fast + is_old][0])


def _group_ends(most: int) -> list[int]:
    """The largest size of each group: 1, 2, 3, 4, 6, 8, 12, 16 and so on."""
    ends = [1, 2, 3, 4]
    while ends[-1] < most:
        ends.append(2 * ends[-2])
    return ends


def _middle(group: deque[Point]) -> Point:
    seconds = [seconds for _, seconds in group]
    # Of two the faster one, since the first step of a size may compile.
    return median(tokens for tokens, _ in group), min(seconds) if len(seconds) == 2 else median(seconds)
