"""What the batch class loses to interactive steps beside its own, and what it can bear. Pure. See docs/adr/0072.

Steps that overlap read the same host memory, so the step of the batch class takes longer than alone. Where that costs
too much, tokens of interactive sequences *ride* for a while: they are computed in the overlapped step. Prompts ride
only if that is not enough, since one read of an expert serves many of their tokens, and first tokens matter most.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from statistics import median_low

log = logging.getLogger(__name__)

LOST_TO_TOKENS, LOST_TO_PROMPTS = 0.25, 0.38  # of its time that the batch class may lose, by what runs beside it
SECONDS_TO_TOKENS, SECONDS_TO_PROMPTS = 3.0, 6.0  # that it may lose at once; prompts come in bursts
NEARLY_ALL = 0.9  # of what may be lost at once
KEPT = 9  # last steps whose time is known
ALIKE = 2  # steps are about as large if one has at most so many times the tokens of the other
PATIENCE = 4  # steps of unknown sizes, in which prompts may have steps beside them, before one is measured alone
MEASURED_SECONDS = 120.0  # for so long it is known how long a step takes alone


class Beside(IntEnum):
    """What interactive sequences compute beside an overlapped step. The rest *rides*: it is computed in that step."""

    NOTHING = 0
    PROMPTS = 1
    ALL = 2


class StepsAlone:
    """How long overlapped steps take beside which nothing runs. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: deque[tuple[int, float, float]] = deque(maxlen=KEPT)  # tokens, seconds, and when it was done

    def observe(self, tokens: int, seconds: float) -> None:
        """Note that a step of `tokens` tokens took `seconds`."""
        self._kept.append((tokens, seconds, self._clock()))

    def seconds(self, tokens: int, *, unknown: float) -> float:
        """What a step of about so many tokens takes, by the last three. `unknown`: if there is none."""
        last = [seconds for _, seconds, _ in self._alike(tokens)][-3:]
        return median_low(last) if last else unknown  # of two the faster one, since the first of a size may compile

    def is_known(self, tokens: int) -> bool:
        """Whether two steps of about so many tokens were measured, the last one not long ago."""
        alike = self._alike(tokens)
        return len(alike) > 1 and self._clock() - alike[-1][2] < MEASURED_SECONDS

    def _alike(self, tokens: int) -> list[tuple[int, float, float]]:
        return [one for one in self._kept if one[0] <= ALIKE * tokens and tokens <= ALIKE * one[0]]


class Allowance:
    """Seconds that may be lost: `part` of the time, from 0 to 1, and up to `most` at once. What is spent is given again
    only when nearly all of it has been saved. `clock` gives seconds."""

    def __init__(self, part: float, most: float, clock: Callable[[], float]) -> None:
        self._part = part
        self._most = most
        self._clock = clock
        self._left = most  # at the moment `_noted`
        self._noted = clock()
        self._was_spent = False

    def spend(self, seconds: float) -> bool:
        """Note that `seconds` were lost. Returns whether the last of what may be lost was among them."""
        was_spent = self.is_spent
        self._left = max(-self._most, self._now_left() - seconds)
        self._noted = self._clock()
        self._was_spent = was_spent or self._left < 0
        return self._was_spent and not was_spent

    @property
    def is_spent(self) -> bool:
        """Whether no more may be lost."""
        return self._was_spent and self._now_left() < NEARLY_ALL * self._most

    def _now_left(self) -> float:
        return min(self._most, self._left + self._part * (self._clock() - self._noted))


class BatchLoss:
    """How much time the batch class loses to steps beside its own, and what it can bear.

    It may lose more time to prompts than to tokens: these can ride without being late. `least`: part of its time that
    it may lose to both. `clock` gives seconds.
    """

    def __init__(self, least: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._alone = StepsAlone(clock)
        self._tokens = 1  # of the last overlapped step
        self._unknown = 0  # steps since the last one of a size that is known
        self._for_tokens = Allowance(max(LOST_TO_TOKENS, least), SECONDS_TO_TOKENS, clock)
        self._for_prompts = Allowance(max(LOST_TO_PROMPTS, least), SECONDS_TO_PROMPTS, clock)

    def note(self, tokens: int, seconds: float, *, is_alone: bool) -> None:
        """Note that an overlapped step of `tokens` tokens took `seconds`. is_alone: nothing ran beside it."""
        self._tokens = tokens
        if is_alone:
            self._alone.observe(tokens, seconds)
        self._unknown = 0 if self._alone.is_known(tokens) else self._unknown + 1
        lost = max(0.0, seconds - self._alone.seconds(tokens, unknown=seconds))
        for what, allowance in (("tokens", self._for_tokens), ("prompts", self._for_prompts)):
            if allowance.spend(lost):
                log.info("interactive %s are computed with batch jobs for a while, which lost too much time", what)

    @property
    def borne(self) -> Beside:
        """What may be computed beside the next overlapped step. Only prompts, or nothing, if its size is not known."""
        if self._for_prompts.is_spent or self._unknown > PATIENCE:
            return Beside.NOTHING
        is_known = self._alone.is_known(self._tokens)
        return Beside.ALL if is_known and not self._for_tokens.is_spent else Beside.PROMPTS
