"""Shared steps: how the batch class and interactive sequences divide the steps of an engine. Pure.

With routed experts a step of a thousand rows takes thirty times as long as a step of one row, but a row in it costs
thirty times less. So both kinds of steps are wanted. A *shared* step is for all classes, as large as `longest_step`
allows. Between two of them there are *small* steps, which compute the interactive sequences alone, and batch tokens
only if these cost almost nothing. Small steps get `interactive_share` of the time.

Where experts are streamed, a step of thousands of tokens takes little longer than a step of hundreds. There the prompts
of the batch class wait until they fill a *prefill* step, in which only interactive sequences decode.

An interactive prompt that would fill a shared step or more is computed in one small step, because chunks would take far
longer. A shared step follows.

After the last interactive sequence no step is longer than `longest_step` for a while, since the next may arrive soon.

The costs know the tokens of a step and nothing of the host's work beside it. So the time from a shared step to the next
is measured, and where steps take longer than estimated, the following ones are made smaller.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from ktqueue.engine.step_costs import StepCosts

MOST_SMALL_STEPS = 24  # between two shared steps
BATCH_PART = 8  # the batch class gets at least one of so many tokens of a shared step
FREE = 1.1  # batch tokens that make a small step longer by at most this factor cost almost nothing
LONG_SECONDS = 0.1
AHEAD_SECONDS = 0.03  # a longer step is not launched during the step before: a few milliseconds gain too little
RECENT_SECONDS = 10.0  # for so long after an interactive sequence, steps stay short
PROMPT_TOKENS = 128  # of a short prompt, whose step others wait for also where there is no batch
PROMPT_STEPS = 2.0  # a shared step may take so many times the step of a short prompt
LEAST_SECONDS, MOST_SECONDS = 0.2, 0.4  # of the longest step, if it is not given
MOST_ERROR = 2.0  # estimates are not corrected beyond this factor
TRIAL_EVERY, TRIAL_LARGER = 16, 1.25  # one of so many shared steps is larger than the costs allow: they may be old
PREFILL_LONGER = 1.3  # a prefill step may last so many times a shared step, or MOST_SECONDS; a longer one is seldom
PREFILL_SPACING = 6  # shared steps between two such prefill steps
PREFILL_GAIN = 2.0  # tokens a second of a prefill step, by those of a shared step, from which it is worth having


class SharedSteps:
    """Decides which steps are shared, and how large steps may be.

    `longest_step`: seconds that a step may take while interactive sequences run; 0: any time, and every step is shared;
    None: PROMPT_STEPS times the step of a short prompt, from LEAST_SECONDS to MOST_SECONDS. `interactive_share`: part
    of the time for small steps, from 0 to below 1. `clock` gives seconds.
    """

    def __init__(
        self,
        costs: StepCosts,
        longest_step: float | None,
        interactive_share: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.enabled = longest_step is None or longest_step > 0
        self._costs = costs
        self._given = longest_step
        self._ratio = interactive_share / (1 - interactive_share)
        self._clock = clock
        self._small_steps = 0  # since the last shared step
        self._small_seconds = 0.0
        self._small_seconds_allowed = self._ratio * self.longest_step
        self._last_interactive = -RECENT_SECONDS
        self._shared_steps = 0
        self.since_prefill = PREFILL_SPACING
        """Shared steps since the last prefill step."""
        self._errors: deque[float] = deque(maxlen=9)  # of estimates: measured by estimated seconds
        self._error = 1.0
        self._running_step: tuple[float, float] | None = None  # a shared step's beginning, and its estimate

    @property
    def longest_step(self) -> float:
        """Seconds that a shared step may take."""
        if self._given is not None:
            return self._given
        return min(MOST_SECONDS, max(LEAST_SECONDS, PROMPT_STEPS * self._costs.seconds(PROMPT_TOKENS)))

    def is_due(self, interactive_tokens: int) -> bool:
        """Whether the next step is shared, if a small step would compute `interactive_tokens`."""
        if not self.enabled or self._small_steps >= MOST_SMALL_STEPS:
            return True
        seconds = self._costs.seconds(interactive_tokens)
        if seconds > self.longest_step:
            return self._small_steps > 0
        return self._small_seconds + seconds > self._small_seconds_allowed

    def most_tokens(self, interactive_rows: int) -> int:
        """Most tokens of a shared step in which `interactive_rows` decode. The batch class always gets some of them."""
        if not self.are_limited(interactive_rows > 0):
            return self._costs.most
        longest = max(self.longest_step, 2 * self._costs.seconds(max(1, interactive_rows)))
        tokens = self._costs.most_tokens(longest / self._error)
        if self._shared_steps % TRIAL_EVERY == TRIAL_EVERY - 1:
            tokens = min(self._costs.most, int(TRIAL_LARGER * tokens))
        return max(interactive_rows + 1, tokens)

    def are_limited(self, interactive: bool) -> bool:
        """Whether steps are kept short: if there are `interactive` sequences, or were a moment ago."""
        return self.enabled and (interactive or self._clock() - self._last_interactive < RECENT_SECONDS)

    def prefill_tokens(self, most: int) -> int:
        """Tokens of a prefill step beside shared steps of `most` tokens. 0: they are not worth having."""
        longest = max(MOST_SECONDS, PREFILL_LONGER * self.longest_step)
        tokens, shared = self._costs.most_tokens(longest), self._costs.seconds(most)
        gain = tokens * shared / max(1e-9, most * self._costs.seconds(tokens)) if tokens else 0.0
        return tokens if gain >= PREFILL_GAIN else 0

    def prefill_may_follow(self, tokens: int) -> bool:
        """Whether the next step may be a prefill step of `tokens` tokens."""
        is_long = self._costs.seconds(tokens) > PREFILL_LONGER * self.longest_step
        return self.since_prefill >= (PREFILL_SPACING if is_long else 1)

    def free_tokens(self, interactive_tokens: int) -> int:
        """How many batch tokens cost almost nothing in a small step of `interactive_tokens`."""
        allowed = self._costs.most_tokens(FREE * self._costs.seconds(interactive_tokens))
        return max(0, allowed - interactive_tokens)

    def may_launch_ahead(self, tokens: int) -> bool:
        """Whether a step is so short that requests which arrive may wait for it and for the step before."""
        return not self.enabled or self._costs.seconds(tokens) <= AHEAD_SECONDS

    def is_long(self, tokens: int) -> bool:
        """Whether a step is so long that launching it early gains little, while requests that arrive would wait."""
        return self.enabled and self._costs.seconds(tokens) > LONG_SECONDS

    def see(self, *, interactive: bool) -> None:
        """Note whether there are interactive sequences now."""
        if interactive:
            self._last_interactive = self._clock()

    def record(self, tokens: int, *, interactive: bool, is_shared: bool, is_prefill: bool = False) -> None:
        """Note that a step begins. `interactive`: whether there are interactive sequences, running or waiting."""
        now, seconds = self._clock(), self._costs.seconds(tokens)
        if self._running_step is not None:
            began, estimate = self._running_step
            self._errors.append((now - began) / estimate)
            self._error = min(MOST_ERROR, max(1.0, median(self._errors)))
        measured = interactive and is_shared and not is_prefill and seconds > 0
        self._running_step = (now, seconds) if measured else None
        self.see(interactive=interactive)
        if is_shared:
            self._shared_steps += 1
            self.since_prefill = 0 if is_prefill else self.since_prefill + 1
            self._small_steps, self._small_seconds = 0, 0.0
            self._small_seconds_allowed = self._ratio * seconds
        else:
            self._small_steps += 1
            self._small_seconds += seconds
