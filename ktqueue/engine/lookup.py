"""Prompt lookup: what followed the last tokens of a sequence when they occurred in it before.

Answers that quote, correct or extend a text repeat parts of it. Each pair of tokens is indexed, and the earlier places
of a pair form a chain, so a token costs the same however long the sequence is. Pure.
"""

import numpy as np
from numpy.typing import NDArray

SHORTEST, LONGEST = 2, 8  # tokens of a match that are told apart; a longer match counts as the longest
PLACES = 8  # of a pair that are compared, the last ones
LEARNING = 1 / 8  # part that one token has in the rates of its sequence
COMMON_LEARNING = 1 / 32  # and in those that later sequences begin with
LEAST_CHANCE = 0.05  # less likely tokens are not drafted


class Lookup:
    """The tokens `tokens[:length]` of one sequence, which `update` extends, and the longest earlier match of their end.

    tokens: [capacity] int32, filled by the sequence. rates: how often the next token was that of a match, by the tokens
    of the match, [LONGEST + 1]; all sequences share them, and each begins with a copy.
    """

    def __init__(self, tokens: NDArray[np.int32], length: int, rates: list[float]) -> None:
        self._tokens = tokens
        self._length = length
        self._common = rates
        self._rates = rates.copy()
        self._matched = 0  # tokens of the match; 0: there is none
        self._source = 0  # position of the token that followed the match
        self._previous = np.zeros(len(tokens), dtype=np.int32)  # where the pair that ends here ended before; 0: nowhere
        known = tokens[:length].astype(np.int64)
        pairs = known[:-1] << 32 | known[1:]
        order = np.argsort(pairs, kind="stable")
        repeated = pairs[order[1:]] == pairs[order[:-1]]
        self._previous[order[1:][repeated] + 1] = order[:-1][repeated] + 1
        self._last = dict(zip(pairs.tolist(), range(1, length), strict=True))
        self._find()

    def update(self, length: int) -> None:
        """Add the tokens up to `length`, and learn from them how often matches are right."""
        for position in range(self._length, length):
            token = self._tokens.item(position)
            is_right = self._matched > 0 and self._tokens.item(self._source) == token
            if self._matched:
                for rates, learning in ((self._rates, LEARNING), (self._common, COMMON_LEARNING)):
                    rates[self._matched] += learning * (is_right - rates[self._matched])
            pair = self._tokens.item(position - 1) << 32 | token
            self._previous[position] = self._last.get(pair, 0)
            self._last[pair] = position
            self._length = position + 1
            if is_right:
                self._source += 1
                self._matched = min(LONGEST, self._matched + 1)
            else:
                self._find()

    def chances(self, most: int) -> list[float]:
        """How likely each of the next `most` drafted tokens is right, together with all before it."""
        chance, chances = 1.0, []
        for ahead in range(most if self._matched else 0):
            chance *= self._rates[min(LONGEST, self._matched + ahead)]
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return chances

    def drafts(self, count: int) -> list[int]:
        """The `count` tokens that followed the match. Where it reaches the end, its tokens repeat."""
        period = self._length - self._source
        tokens: list[int] = self._tokens[self._source : min(self._source + count, self._length)].tolist()
        while len(tokens) < count:
            tokens.append(tokens[-period])
        return tokens

    def _find(self) -> None:
        """Find the longest match among the last places of the last pair, of equal ones the last."""
        self._matched, end = 0, self._length - 1
        place = self._previous.item(end)
        for _ in range(PLACES):
            if not place or self._matched == LONGEST:
                break
            matched = SHORTEST
            while matched < min(LONGEST, place + 1) and (
                self._tokens.item(place - matched) == self._tokens.item(end - matched)
            ):
                matched += 1
            if matched > self._matched:
                self._matched, self._source = matched, place + 1
            place = self._previous.item(place)
