"""DraftCosts: how many drafts a step is worth, by what steps cost and by what drafts saved or lost so far. Pure.

A draft that is right saves a step, and each draft makes this step longer. The number that gives the most tokens a
second is chosen; it is often 0.

**Time.** A decode step has a cost by its tokens. Steps that read prompts are left out of these costs: on a GPU they run
eagerly, and everywhere they score fewer tokens. The host's time between two steps counts too, since a step with drafts
cannot be launched ahead (docs/adr/0058).

**Loss.** Costs and chances are estimates, and on a machine with other work they may be wrong. So the time that drafts
really saved or lost is kept as a balance, in steps. It begins at FIRST_BALANCE and grows by ALLOWED_LOSS a step. A step
gets no more drafts than the balance could pay for if all of them were wrong. The step that follows drafts is not
launched ahead either, which is part of their loss. Tokens that a draft model has to read first are paid before they are
read: by what drafts saved, or by ALLOWED_LOSS, which is kept for them while a sequence waits for it.
"""

from collections import deque
from collections.abc import Sequence as Many
from statistics import median

from ktqueue.engine.step_costs import StepCosts

LEAST_GAIN = 1.05  # times the tokens a second without drafts
FIRST_BALANCE = 1.0  # steps
FIRST_READING = 2.0  # steps, so that a short prompt is read at once
MOST_READING = 0.25  # of the time that the rest of an answer takes, to read what comes before it
MOST_ALLOWED, MOST_SAVED = 4.0, 32.0  # of the balance, by allowed losses alone and by what drafts saved; steps
ALLOWED_LOSS = 0.01  # steps that drafts may lose for each step
MOST_SURPRISE = 1.0  # steps that are counted beyond the loss that was foreseen: a step may be slow for another reason
UNDRAFTED_EVERY = 32  # of so many steps with drafts in a row, the last has none, to learn what it costs
KEPT = 9  # last times between steps


class DraftCosts:
    """Chooses the number of drafts of a step, and learns from each step. `costs`: those of all steps."""

    def __init__(self, costs: StepCosts) -> None:
        self._all = costs
        self._decode = StepCosts(costs.most)
        # Seconds from the end of a step to one without drafts, where neither has any, and to one with drafts.
        self._between: deque[float] = deque(maxlen=KEPT)
        self._before_drafts: deque[float] = deque(maxlen=KEPT)
        self._balance = FIRST_BALANCE
        self._kept = FIRST_READING  # for reading known tokens; steps. Less than 0 if it took longer
        self._asked: float | None = None  # steps of the least reading that was refused since the last step
        self._foreseen = 0.0  # steps that the drafts of the last step lose if all are wrong
        self._in_a_row = 0  # steps with drafts
        self._usual = 0.0  # seconds that the last step with drafts would have taken without them

    def best(self, tokens: int, chances: Many[float], *, decodes: bool, making: Many[float] = ()) -> int:
        """How many drafts to add to a step of `tokens` tokens.

        chances: that each draft is right, the likeliest first. making: seconds to make the first draft, the first two
        and so on; without them none. `decodes`: whether each row computes one token. Without costs it is 0.
        """
        costs = self._decode if decodes else self._all
        if not chances or not costs.points or self._in_a_row >= UNDRAFTED_EVERY - 1:
            return 0
        between, seconds = self._seconds_between(), costs.seconds(tokens)
        usual, drafted = seconds + between, self._seconds_before_drafts()
        best, expected, best_rate = 0, float(tokens), LEAST_GAIN * tokens / usual
        self._foreseen = 0.0
        for count, chance in enumerate(chances, 1):
            expected += chance
            seconds = max(seconds, costs.seconds(tokens + count))  # old costs may be too low
            whole = seconds + drafted + (making[count - 1] if making else 0.0)
            if whole - usual > self._balance * usual:
                break
            if expected / whole > best_rate:
                best, best_rate = count, expected / whole
                self._foreseen = max(0.0, (whole - usual) / usual)
        return best

    def may_read(self, tokens: int, seconds: float, own: float, rest: int, *, decodes: bool) -> bool:
        """Whether a draft model may read known tokens for `seconds` before a step of `tokens` tokens.

        own: the part of these seconds that is for a sequence, of whose answer `rest` tokens are left at most. If what
        is kept does not suffice, more is kept.
        """
        usual = (self._decode if decodes else self._all).seconds(tokens) + self._seconds_between()
        if usual <= 0.0:
            return True
        if own > MOST_READING * rest * usual / tokens:
            return False
        steps = min(MOST_SAVED, seconds / usual)  # more is tried too, but then nothing for long
        if steps <= self._kept + max(0.0, self._balance - MOST_ALLOWED):
            return True
        self._asked = steps if self._asked is None else min(self._asked, steps)
        return False

    def learn(
        self,
        tokens: int,
        drafted: int,
        accepted: int,
        seconds: float,
        between: float | None,
        *,
        decodes: bool,
        making: float = 0.0,
        reading: float = 0.0,
    ) -> None:
        """Learn from a step of `tokens` tokens that took `seconds`.

        drafted, accepted: those of its tokens that were drafts, and right ones. between: seconds from the end of the
        step before to its beginning, without those for `making` drafts and for `reading` known tokens before; None: the
        engine had no work.
        """
        alone = max(1, tokens - drafted)
        follows_drafts = self._in_a_row > 0
        if decodes:
            self._decode.observe(tokens, seconds)
            if between is not None and (drafted or not follows_drafts):
                (self._before_drafts if drafted else self._between).append(between)
        self._in_a_row = self._in_a_row + 1 if drafted else 0
        saved, before = 0.0, self._seconds_between()
        if drafted or making:
            self._usual = (self._decode if decodes else self._all).seconds(alone) + before
            saved = (
                self._usual * (alone + accepted) / alone - seconds - making - (before if between is None else between)
            )
        elif follows_drafts and between is not None:
            saved = min(0.0, before - between)
        saved = max(-self._foreseen - MOST_SURPRISE, saved / max(self._usual, 1e-9))
        self._balance = min(MOST_SAVED, self._balance + saved)
        read = reading / max(self._usual, 1e-9)
        self._kept -= read
        of_savings = min(max(0.0, -self._kept), max(0.0, self._balance - MOST_ALLOWED))
        self._kept += of_savings
        self._balance -= of_savings
        if self._kept < (self._asked or 0.0):
            self._kept += ALLOWED_LOSS
        else:
            self._balance = max(self._balance, min(MOST_ALLOWED, self._balance + ALLOWED_LOSS))
        self._asked = None

    def begin_again(self) -> None:
        """Forget what drafts lost, and keep the costs. For probes, whose drafts are wrong."""
        self._balance, self._kept, self._in_a_row = FIRST_BALANCE, FIRST_READING, 0

    def _seconds_between(self) -> float:
        return median(self._between) if self._between else 0.0

    def _seconds_before_drafts(self) -> float:
        return median(self._before_drafts) if self._before_drafts else self._seconds_between()
