"""Turns: how the batch class shares steps with interactive sequences. Pure.

With routed experts a step of a thousand rows takes thirty times as long as a step of one row, but a row in it costs
thirty times less. Mixed steps would slow down every token of a chat. So while interactive sequences run, the batch
class takes turns. Most steps are *small*: they compute the interactive sequences, and batch tokens only if these cost
almost nothing. One step in 25 is a *turn* of the batch class: it computes as much as `longest_step` allows. So more
than 95 % of the gaps between an interactive sequence's tokens are as short as without the batch class.

After the last interactive sequence no step is longer than `longest_step` for a while, since the next may arrive soon.
"""

import time
from collections.abc import Callable

from ktqueue.engine.step_costs import StepCosts

SMALL_STEPS = 24  # between two turns
FREE = 1.1  # batch tokens that make a small step longer by at most this factor cost almost nothing
LONG_SECONDS = 0.1
RECENT_SECONDS = 10.0  # for so long after an interactive sequence, steps stay short


class Turns:
    """Decides when the batch class takes its turn, and how large steps may be.

    `longest_step`: seconds that a step may take while interactive sequences run; 0: any time, and the batch class takes
    part in every step. The batch class gets at least one `share`-th of the time. `clock` gives seconds.
    """

    def __init__(
        self, costs: StepCosts, *, longest_step: float, share: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._costs = costs
        self._longest_step = longest_step
        self._share = share
        self._clock = clock
        self._small_steps = 0  # since the batch class took its last turn
        self._small_seconds = 0.0
        self._last_interactive = -RECENT_SECONDS

    def is_due(self, batch_tokens: int) -> bool:
        """Whether the batch class, which wants `batch_tokens`, takes its turn in the next step."""
        if not self._longest_step or self._small_steps >= SMALL_STEPS:
            return True
        turn = min(self._longest_step, self._costs.seconds(batch_tokens))
        return self._small_seconds > self._share * turn

    def most_tokens(self, interactive_tokens: int) -> int:
        """Most tokens of a turn beside `interactive_tokens`. The batch class always gets some of them."""
        recent = self._clock() - self._last_interactive < RECENT_SECONDS
        if not self._longest_step or not (interactive_tokens or recent):
            return self._costs.most
        longest = max(self._longest_step, 2 * self._costs.seconds(max(1, interactive_tokens)))
        return max(interactive_tokens + 1, self._costs.most_tokens(longest))

    def free_tokens(self, interactive_tokens: int) -> int:
        """How many batch tokens cost almost nothing in a small step of `interactive_tokens`."""
        allowed = self._costs.most_tokens(FREE * self._costs.seconds(interactive_tokens))
        return max(0, allowed - interactive_tokens)

    def is_long(self, tokens: int) -> bool:
        """Whether a step is so long that launching it early gains little, while requests that arrive would wait."""
        return self._longest_step > 0 and self._costs.seconds(tokens) > LONG_SECONDS

    def record(self, tokens: int, *, interactive: bool, is_turn: bool) -> None:
        """Note that a step begins. `interactive`: whether there are interactive sequences, running or waiting."""
        if interactive:
            self._last_interactive = self._clock()
        if is_turn:
            self._small_steps, self._small_seconds = 0, 0.0
        else:
            self._small_steps += 1
            self._small_seconds += self._costs.seconds(tokens)
