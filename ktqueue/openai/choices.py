"""Journal events to choices: what each choice has said so far, in the order its job's journal tells it.

Text that waits for a slow client runs together into one delta. Logprobs wait for text: a chunk with
logprobs alone would be an empty delta. Pure; knows no HTTP and no JSON.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from ktqueue.core.events import FinishReason, PositionLogprobs, TokenEvent, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Position:
    """One generated token with its logprobs. `token` is the text it completes; `offset` where that begins."""

    token: str
    offset: int
    logprobs: PositionLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice said since it was last asked."""

    index: int
    first: bool
    text: str
    positions: tuple[Position, ...]
    finish_reason: FinishReason | None


def alone(token: TokenLogprob) -> str:
    """The text of one token seen alone; half a character shows as the replacement character."""
    return token.token_bytes.decode("utf-8", errors="replace")


class Choice:
    """One choice of a response, absorbing events and giving deltas."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.started = False
        self._text: list[str] = []
        self._positions: list[Position] = []
        self._finish: FinishReason | None = None
        # Incremental, so that the tokens of one character run together to exactly the text.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def absorb(self, event: TokenEvent) -> None:
        """Take one event of this choice."""
        if event.text:
            self._text.append(event.text)
        left = len(event.logprobs) if event.finish_reason is not None else 0
        for position in event.logprobs:
            left -= 1  # the last token of all takes on what half a character became at its end
            token = self._decoder.decode(position.chosen.token_bytes, final=left == 0)
            self._positions.append(Position(token, self._offset, position))
            self._offset += len(token)
        if event.finish_reason is not None:
            self._finish = event.finish_reason

    def delta(self) -> Delta | None:
        """What is new, or None if nothing can be shown yet."""
        if not self._text and self._finish is None:
            return None
        delta = Delta(self.index, not self.started, "".join(self._text), tuple(self._positions), self._finish)
        self.started = True
        self._text.clear()
        self._positions.clear()
        self._finish = None
        return delta


class Choices:
    """All choices of one HTTP response: `n` for each of its jobs, numbered job * n + choice."""

    def __init__(self, jobs: int, n: int) -> None:
        self._n = n
        self._choices = [Choice(index) for index in range(jobs * n)]
        self._usage: dict[int, Usage] = {}

    def absorb(self, events: Iterable[tuple[int, TokenEvent]]) -> list[Delta]:
        """Take (place of the job, event) pairs; what they made sayable, each choice once, oldest first."""
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
        """Every choice from all events of all jobs, in the order of their indices."""
        given = {delta.index: delta for delta in self.absorb(events)}
        return [given.get(one.index, Delta(one.index, True, "", (), None)) for one in self._choices]

    def usage(self) -> Usage:
        """Token counts over all jobs that have ended."""
        counts = self._usage.values()
        return Usage(
            prompt_tokens=sum(one.prompt_tokens for one in counts),
            completion_tokens=sum(one.completion_tokens for one in counts),
            cached_tokens=sum(one.cached_tokens for one in counts),
        )
