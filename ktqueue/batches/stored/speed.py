"""How fast a batch runs, over its last minute, and how long it still needs."""

import time
from collections import deque
from dataclasses import replace

from ktqueue.batches.line_runner import InFlight, LineRunner
from ktqueue.batches.stored.execution import Execution
from ktqueue.broker.batches import BatchSpeed

SECONDS, LOOK_SECONDS = 60.0, 2.0
NOTHING = InFlight()


class Speed:
    """Lines that have ended, and tokens of all answers so far, at times of one clock."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=128)
        self._in_flight = NOTHING

    async def look(self, execution: Execution, runner: LineRunner) -> None:
        """Note how far the lines are, if that was not done just now. Raises Unavailable."""
        now = time.monotonic()
        if not self._seen or now - self._seen[-1][0] >= LOOK_SECONDS:
            lines, tokens = execution.ended
            self.add(now, lines, tokens, await runner.in_flight())

    def add(self, now: float, lines: int, tokens: int, in_flight: InFlight = NOTHING) -> None:
        """Note the sums up to now: `lines` have ended with `tokens` tokens, others are in flight."""
        self._in_flight = in_flight
        least = self._seen[-1][2] if self._seen else 0  # answers that are stored just now may be missed
        self._seen.append((now, lines, max(least, tokens + in_flight.tokens)))
        while len(self._seen) > 2 and self._seen[1][0] < now - SECONDS:
            self._seen.popleft()

    def measured(self, total: int) -> BatchSpeed:
        """The tokens of answers a second, the time until all `total` lines have ended, and what is in flight."""
        if len(self._seen) < 2:
            return BatchSpeed()
        flight = self._in_flight
        found = BatchSpeed(None, None, flight.running, flight.waiting, flight.held_by or None)
        (first, lines_before, tokens_before), (last, lines, tokens) = self._seen[0], self._seen[-1]
        seconds = last - first
        if seconds > 0 and tokens > tokens_before:
            made = tokens - tokens_before
            expected = self._tokens_of_a_line(lines, tokens)
            left = None if expected is None else max(0.0, (total - lines) * expected - self._in_flight.tokens)
            seconds_left = None if left is None else left * seconds / made
            return replace(found, tokens_per_second=made / seconds, seconds_left=seconds_left)
        if seconds > 0 and lines > lines_before:  # answers without tokens
            return replace(found, seconds_left=(total - lines) * seconds / (lines - lines_before))
        return found

    def _tokens_of_a_line(self, lines: int, tokens: int) -> float | None:
        """The mean tokens of an answer: those so far for each line that has ended, but not more than allowed.

        If each token is the last one with the same chance, this is the likeliest mean, whatever is in flight. Lines
        that have ended first are short ones, so their own mean would be too low.
        """
        most = self._in_flight.most_tokens
        if not lines:
            return most
        return tokens / lines if most is None else min(tokens / lines, most)
