"""TokenLog: what each token of each request took, from the request's arrival until the token was published.

The times of a choice follow each other without a gap: FIRST_PARTS before the step of its first token, then for each
token `between` and the parts of its step. LAST_PARTS come after the step and overlap the next one, so only those of the
last token add to the time of a request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from ktqueue.core.codec import dumps
from ktqueue.profiling.records import SECONDS, STEP_PARTS, StepRecord, template
from ktqueue.profiling.writer import RecordWriter

FIRST_PARTS: Final = ("queue", "tokeniser_queue", "tokenise", "admit", "prefill")
"""Parts of the first token of a choice only."""
LAST_PARTS: Final = ("hand_over", "publish")
"""Parts after the step."""
_TOKEN = template(
    {"at": SECONDS, "request": "%s", "choice": "%d", "position": "%d", "between": SECONDS}
    | dict.fromkeys(LAST_PARTS, SECONDS)
)
_STEP = template({"step": "%d"} | dict.fromkeys(STEP_PARTS, SECONDS))
_FIRST = b"," + template({"arrived": SECONDS} | dict.fromkeys(FIRST_PARTS, SECONDS))
_SAME_STEP = b"{%s}\n" % template(
    {"at": SECONDS, "request": "%s", "choice": "%d", "position": "%d", "step": "%d", "same_step": "true"}
)


@dataclass(slots=True)
class _Request:
    """Times of one request in seconds of the monotonic clock. `waited`: in the queue, before `claimed`."""

    waited: float
    claimed: float
    positions: list[int]  # of each choice, the next
    tokenising: float = 0.0
    tokenised: float = 0.0
    added: float = 0.0
    ends: list[float | None] = field(default_factory=list)  # of each choice, the end of the step of its last token
    unpublished: list["_Token"] = field(default_factory=list)

    def moments(self, first_step: float) -> tuple[float, ...]:
        """When it arrived, and when each of FIRST_PARTS ended."""
        return self.claimed - self.waited, self.claimed, self.tokenising, self.tokenised, self.added, first_step


class _Token(NamedTuple):
    """Tokens that one step gave one choice; all but the first were forced by a grammar.

    received: when the step's caller had the result. before: the end of the step of the token before, the same one if
    that was a right draft; None: there is none.
    """

    step: StepRecord
    request_id: str
    request: _Request
    choice: int
    position: int
    tokens: int
    before: float | None
    received: float


@dataclass(frozen=True, slots=True)
class _Published:
    """Tokens that were published together, at the time `at`."""

    tokens: Sequence[_Token]
    at: float

    def lines(self, wall: float) -> bytes:
        """A JSON line for each token."""
        lines = []
        known: StepRecord | None = None
        parts = b""
        for step, request_id, request, choice, position, tokens, before, received in self.tokens:
            moments = step.moments
            if step is not known:
                known, parts = step, _STEP % (step.number, *moments.parts())
            name, at = dumps(request_id), moments.ended + wall
            places = range(position, position + tokens)
            if before == moments.ended:
                lines += [_SAME_STEP % (at, name, choice, place, step.number) for place in places]
                continue
            between = 0.0 if before is None else moments.began - before
            hand_over, publish = received - moments.ended, self.at - received
            text = _TOKEN % (at, name, choice, position, between, hand_over, publish)
            if before is None:
                since = request.moments(moments.began)
                text += _FIRST % (since[0] + wall, *(later - earlier for earlier, later in pairwise(since)))
            lines.append(b"{%s,%s}\n" % (text, parts))
            lines += [_SAME_STEP % (at, name, choice, place, step.number) for place in places[1:]]
        return b"".join(lines)


class TokenLog:
    """Times requests and their tokens. Used by one thread. Times are given in seconds of the monotonic clock."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self._requests: dict[str, _Request] = {}
        self._publishing: list[_Token] = []

    def claimed(self, request_id: str, now: float, *, waited: float, positions: Sequence[int]) -> None:
        """A request has been taken, after `waited` seconds in the queue. `positions`: the next one of each choice."""
        ends: list[float | None] = [None] * len(positions)
        self._requests[request_id] = _Request(waited, now, list(positions), ends=ends)

    def tokenising(self, request_id: str, now: float) -> None:
        """A thread begins to tokenise its prompt."""
        if request := self._requests.get(request_id):
            request.tokenising = now

    def tokenised(self, request_id: str, now: float) -> None:
        """Its prompt is tokenised."""
        if request := self._requests.get(request_id):
            request.tokenised = now

    def added(self, request_id: str, now: float) -> None:
        """It is passed to the engine."""
        if request := self._requests.get(request_id):
            request.added = now

    def token(self, step: StepRecord, request_id: str, choice: int, count: int, now: float) -> None:
        """A choice got `count` tokens in a step, whose result is here now."""
        request = self._requests.get(request_id)
        if request is None or not count:
            return
        position, before = request.positions[choice], request.ends[choice]
        request.positions[choice] += count
        request.ends[choice] = step.moments.ended
        request.unpublished.append(_Token(step, request_id, request, choice, position, count, before, now))

    def publish(self, request_id: str) -> None:
        """The tokens of a request so far are being published: see `published`."""
        if (request := self._requests.get(request_id)) and request.unpublished:
            self._publishing += request.unpublished
            request.unpublished = []

    def published(self) -> Callable[[float], None]:
        """What to call once all tokens that are now being published are out, with the time."""
        tokens, self._publishing = self._publishing, []

        def write(now: float) -> None:
            if tokens:
                self._writer.put("tokens", _Published(tokens, now), lines=sum(token.tokens for token in tokens))

        return write

    def ended(self, request_id: str) -> None:
        """No token of this request follows."""
        self._requests.pop(request_id, None)
