"""StreamingChoice: which share of the absent experts a step streams. What steps took decides; costs say what to try.

Steps are compared with those of like length: up to a power of two and more than half of it. The estimate for a share
that was tried is what its steps took; for others what `costs` say, times a guess of how far off they are. The share of
the least estimate is taken, so one is tried only while it promises more than all that are known, and nothing is tried
any more once none does. Knows no tensor.
"""

from dataclasses import dataclass, field, replace

from ktqueue.operators.gpu.experts.streaming_costs import StreamingCosts

LEVELS = 16
SHARES = tuple(level / LEVELS for level in range(LEVELS + 1))
CAUTION = 1.15  # a split between CPU and copies that was never tried must promise so much more: both disturb each other
MOST_TRIED = 6  # shares for one length, before only those are taken that were tried
BELIEVED = 2  # runs of a share: in the first, kernels are compiled and copies found
NEWEST = 0.3  # weight of the newest step
AGAIN, NEAR = 32, 1.25  # so many steps after its last one, a share is tried again that took up to so much more


@dataclass(slots=True)
class _Tried:
    """factor: what steps took beside what the first costs say, by which those of like length are compared; runs: their
    number; last: the youngest."""

    factor: float
    runs: int = 0
    last: int = 0


@dataclass(slots=True)
class _Length:
    """Steps of one length, and the shares that were tried in them."""

    steps: int = 0
    tried: dict[float, _Tried] = field(default_factory=dict)


class StreamingChoice:
    """For a model of so many `layers` with routed experts. `always`: something is streamed in every step."""

    def __init__(self, costs: StreamingCosts, layers: int, *, always: bool) -> None:
        self._costs = costs
        self._first = replace(costs)  # `costs` learn, and what was measured must not move with them
        self._layers = layers
        self._shares = SHARES[1:] if always else SHARES
        self._lengths: dict[int, _Length] = {}

    def share(self, tokens: int) -> float:
        """For a step of so many tokens, from 0 (nothing is streamed) to 1."""
        length = self._length(tokens)
        shares = self._shares
        if len(length.tried) >= MOST_TRIED:
            shares = tuple(share for share in shares if share == 1 or share in length.tried)
        estimates = {share: self._estimate(length, tokens, share) for share in shares}
        best = min(reversed(shares), key=estimates.__getitem__)  # of equals the one that leaves the CPU alone most
        near = [
            share
            for share, one in length.tried.items()
            if length.steps - one.last >= AGAIN and estimates[share] <= NEAR * estimates[best]
        ]
        return min(near, key=lambda share: length.tried[share].last) if near else best

    def learn(self, tokens: int, share: float, seconds: float) -> None:
        """Take in what a whole step took that streamed `share`."""
        length = self._length(tokens)
        length.steps += 1
        factor = seconds / self._seconds(self._first, tokens, share)
        one = length.tried.setdefault(share, _Tried(factor))
        one.runs += 1
        one.last = length.steps
        if one.runs <= BELIEVED:
            one.factor = min(one.factor, factor)
        else:
            one.factor += NEWEST * (min(factor, 2 * one.factor) - one.factor)

    def _length(self, tokens: int) -> _Length:
        return self._lengths.setdefault((tokens - 1).bit_length(), _Length())

    def _seconds(self, costs: StreamingCosts, tokens: int, share: float) -> float:
        return max(1e-9, self._layers * costs.seconds(tokens, share))

    def _estimate(self, length: _Length, tokens: int, share: float) -> float:
        """A share with too few runs is still expected to be as good as was guessed, if its runs were not better."""
        one = length.tried.get(share)
        known = None if one is None else one.factor * self._seconds(self._first, tokens, share)
        if one is not None and known is not None and one.runs >= BELIEVED:
            return known
        guess = self._guess(length, tokens, share) * self._seconds(self._costs, tokens, share)
        return guess if known is None else min(guess, known)

    def _guess(self, length: _Length, tokens: int, share: float) -> float:
        """How far off the costs are. Streaming all or nothing: not. A split: as far as the nearest one that was tried,
        or, before there is one, further than the better of the other two."""
        if share in (0, 1):
            return 1.0
        off = {
            at: one.factor * self._seconds(self._first, tokens, at) / self._seconds(self._costs, tokens, at)
            for at, one in length.tried.items()
            if one.runs >= BELIEVED
        }
        splits = [at for at in off if 0 < at < 1]
        if splits:
            return max(1.0, off[min(splits, key=lambda at: abs(at - share))])
        return CAUTION * max(1.0, min(off.values(), default=1.0))
