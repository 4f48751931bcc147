"""Journal events to choices: the new text and logprobs of each choice, in the order of its job's journal.

Text that waits for a slow client is joined to one delta. Logprobs wait for text, since a chunk with logprobs alone
would be an empty delta. This module knows no HTTP and no JSON.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from ktqueue.core.events import FinishReason, PositionLogprobs, TokenEvent, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Position:
    """One generated token with its logprobs. `token` is its text, `offset` the position of that text, in characters."""

    token: str
    offset: int
    logprobs: PositionLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of a choice that is new since its last delta."""

    index: int
    first: bool
    text: str
    positions: tuple[Position, ...]
    finish_reason: FinishReason | None


def token_text(token: TokenLogprob) -> str:
    """The text of a single token. Half a character becomes the replacement character."""
    return token.token_bytes.decode("utf-8", errors="replace")


class Choice:
    """One choice of a response: takes events and makes deltas."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.started = False
        self._text: list[str] = []
        self._positions: list[Position] = []
        self._finish: FinishReason | None = None
        # Incremental, so that the texts of tokens that share a character add up to the exact text.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def absorb(self, event: TokenEvent) -> None:
        """Add one event of this choice."""
        if event.text:
            self._text.append(event.text)
        remaining = len(event.logprobs) if event.finish_reason is not None else 0
        for position in event.logprobs:
            remaining -= 1  # the last token also gets the replacement of an unfinished character
            token = self._decoder.decode(position.chosen.token_bytes, final=remaining == 0)
            self._positions.append(Position(token, self._offset, position))
            self._offset += len(token)
        if event.finish_reason is not None:
            self._finish = event.finish_reason

    def delta(self) -> Delta | None:
        """The new part, or None if there is nothing to show yet."""
        if not self._text and self._finish is None:
            return None
        delta = Delta(self.index, not self.started, "".join(self._text), tuple(self._positions), self._finish)
        self.started = True
        self._text.clear()
        self._positions.clear()
        self._finish = None
        return delta


class Choices:
    """All choices of one HTTP response: `n` for each of its jobs, with the index job * n + choice."""

    def __init__(self, jobs: int, n: int) -> None:
        self._n = n
        self._choices = [Choice(index) for index in range(jobs * n)]
        self._usage: dict[int, Usage] = {}

    def absorb(self, events: Iterable[tuple[int, TokenEvent]]) -> list[Delta]:
        """Add (place of the job, event) pairs. Returns one delta for each changed choice, oldest first."""
        touched: dict[int, Choice] = {}
        for place, event in events:
            if event.index < self._n:
                choice = self._choices[place * self._n + event.index]
                choice.absorb(event)
                touched[choice.index] = choice
            if event.usage is not None:
                self._usage[place] = event.usage
        deltas = (choice.delta() for choice in touched.values())
        return [delta for delta in deltas if delta is not None]

    def whole(self, events: Iterable[tuple[int, TokenEvent]]) -> list[Delta]:
        """Every choice, made from all events of all jobs, in the order of their indices."""
        deltas = {delta.index: delta for delta in self.absorb(events)}
        empty = (Delta(choice.index, True, "", (), None) for choice in self._choices)
        return [deltas.get(delta.index, delta) for delta in empty]

    def usage(self) -> Usage:
        """Token counts over all jobs that have ended, with the timings if there is only one job."""
        counts = self._usage.values()
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in counts),
            completion_tokens=sum(usage.completion_tokens for usage in counts),
            cached_tokens=sum(usage.cached_tokens for usage in counts),
            timings=next(iter(counts)).timings if len(counts) == 1 else None,
        )
