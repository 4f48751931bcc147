"""DraftCosts: how many drafts a step is worth, by what steps cost and by what drafts saved or lost so far. Pure.

A draft that is right saves a step, and each draft makes this step longer. The number that gives the most tokens a
second is chosen; it is often 0.

**Time.** A decode step has a cost by its tokens. Steps that read prompts are left out of these costs: on a GPU they run
eagerly, and everywhere they score fewer tokens. The host's time between two steps counts too, since a step with drafts
cannot be launched ahead (docs/adr/0058).

**Loss.** Costs and chances are estimates, and on a machine with other work they may be wrong. So the time that drafts
really saved or lost is kept as a balance, in steps. It begins at FIRST_BALANCE and grows by ALLOWED_LOSS a step. A step
gets no more drafts than the balance could pay for if all of them were wrong.
"""

from collections import deque
from collections.abc import Sequence as Many
from statistics import median

from ktqueue.engine.step_costs import StepCosts

LEAST_GAIN = 1.05  # times the tokens a second without drafts
FIRST_BALANCE, MOST_BALANCE = 1.0, 4.0  # steps
ALLOWED_LOSS = 0.01  # steps that drafts may lose for each step
MOST_SURPRISE = 1.0  # steps that are counted beyond the loss that was foreseen: a step may be slow for another reason
UNDRAFTED_EVERY = 32  # of so many steps with drafts in a row, the last has none, to learn what it costs
KEPT = 9  # last times between steps


class DraftCosts:
    """Chooses the number of drafts of a step, and learns from each step. `costs`: those of all steps."""

    def __init__(self, costs: StepCosts) -> None:
        self._all = costs
        self._decode = StepCosts(costs.most)
        self._between: deque[float] = deque(maxlen=KEPT)  # seconds from the end of a step to one without drafts
        self._before_drafts: deque[float] = deque(maxlen=KEPT)  # and to one with drafts
        self._balance = FIRST_BALANCE
        self._foreseen = 0.0  # steps that the drafts of the last step lose if all are wrong
        self._in_a_row = 0  # steps with drafts

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
    ) -> None:
        """Learn from a step of `tokens` tokens that took `seconds`.

        drafted, accepted: those of its tokens that were drafts, and right ones. between: seconds from the end of the
        step before to its beginning, without those for `making` drafts; None: the engine had no work.
        """
        alone = max(1, tokens - drafted)
        if decodes:
            self._decode.observe(tokens, seconds)
            if between is not None:
                (self._before_drafts if drafted else self._between).append(between)
        self._in_a_row = self._in_a_row + 1 if drafted else 0
        saved = 0.0
        if drafted:
            usual = (self._decode if decodes else self._all).seconds(alone) + self._seconds_between()
            taken = seconds + making + (self._seconds_between() if between is None else between)
            saved = usual * (alone + accepted) / alone - taken
            saved = max(-self._foreseen - MOST_SURPRISE, saved / max(usual, 1e-9))
        self._balance = min(MOST_BALANCE, self._balance + ALLOWED_LOSS + saved)

    def begin_again(self) -> None:
        """Forget what drafts lost, and keep the costs. For probes, whose drafts are wrong."""
        self._balance, self._in_a_row = FIRST_BALANCE, 0

    def _seconds_between(self) -> float:
        return median(self._between) if self._between else 0.0

    def _seconds_before_drafts(self) -> float:
        return median(self._before_drafts) if self._before_drafts else self._seconds_between()
