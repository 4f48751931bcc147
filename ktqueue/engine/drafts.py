"""Drafts: tokens that a sequence may get next, which a step verifies beside the last token. See docs/adr/0059.

The noise of a token depends on seed and position alone. So a draft is right exactly if it is the token that the step
would have drawn. The step computes the logits after the last token and after each draft. The tokens are drawn as
always, one after another, as long as the draft before is right. What wrong drafts wrote to the cache is overwritten.

**Number.** A draft that is right saves a step, and each draft makes this step longer. The costs of steps and the
chances of drafts say which number gives the most tokens a second; it is often 0.

**Loss.** Both are estimates, and on a machine with other work they may be wrong. So the time that drafts really saved
or lost is counted, and once they have lost a few steps, they may lose no more than 1 % of the time.
"""

from ktqueue.engine.lookup import LONGEST, Lookup
from ktqueue.engine.rows import Rows
from ktqueue.engine.sequence import Sequence
from ktqueue.engine.step_costs import StepCosts
from ktqueue.engine.step_plan import StepPlan

RATE_BY_TOKEN = 0.1  # of a match beyond its first token, before any was seen: a longer match is right more often
LEAST_GAIN = 1.05  # times the tokens a second without drafts; costs and chances are estimates
CREDIT = 4.0  # steps that drafts may have lost before they stop
ALLOWED_LOSS = 0.01  # steps that they may lose for each step
MOST_LOSS = 2.0  # steps that one step with drafts is counted as, at most: it may have been slow for another reason
UNDRAFTED_EVERY = 32  # one of so many steps has no drafts, to learn what it costs
MOST_OF_A_STEP = 64  # drafts of all sequences, since each needs logits


class Drafts:
    """Adds drafts to planned steps, at most `most` for each sequence, and accepts the right ones.

    drafted, accepted: drafts so far.
    """

    def __init__(self, rows: Rows, costs: StepCosts, most: int) -> None:
        self.drafted = self.accepted = 0
        self._rows = rows
        self._costs = costs
        self._most = most
        self._balance = CREDIT
        self._steps = 0  # that could have had drafts
        self._drafted_now = self._accepted_now = 0  # in the step that is planned
        self._rates = [RATE_BY_TOKEN * max(0, matched - 1) for matched in range(LONGEST + 1)]

    def add(self, plan: StepPlan, room: int) -> None:
        """Add at most `room` drafts to a step, if that raises the tokens computed in a second.

        They take no pages that another running sequence may need next.
        """
        lookups: list[tuple[Sequence, Lookup]] = []
        chances: list[tuple[float, int]] = []
        for sequence, count in plan.rows.items():
            if count != 1 or not _may_have_drafts(sequence):
                continue
            if sequence.lookup is None:
                sequence.lookup = Lookup(sequence.tokens, sequence.length, self._rates)
            sequence.lookup.update(sequence.length)
            left = sequence.request.max_tokens - sequence.generated - 1  # beside the token that the row gives anyway
            chances += [(chance, len(lookups)) for chance in sequence.lookup.chances(min(self._most, left))]
            lookups.append((sequence, sequence.lookup))
        chances.sort(key=lambda chance: -chance[0])
        counts = [0] * len(lookups)
        for _, place in chances[: self._best(plan.tokens, chances[: min(room, MOST_OF_A_STEP)])]:
            counts[place] += 1
        self._drafted_now = self._accepted_now = 0
        for (sequence, lookup), wanted in zip(lookups, counts, strict=True):
            count = min(wanted, self._rows.room_beside_others(sequence) - 1)
            if count > 0 and self._rows.allocate(sequence, 1 + count, plan):
                plan.add_drafts(sequence, lookup.drafts(count))
                self._drafted_now += count
        self.drafted += self._drafted_now

    def accept(self, plan: StepPlan, sequence: Sequence, number: int) -> bool:
        """Whether draft `number` of a sequence is right, from 0, and all before it. It is computed then.

        Call it for one draft after another, once the sequence has the token in the place of the draft.
        """
        drafts = plan.drafts[sequence]
        if drafts[number : number + 1] != [sequence.tokens.item(sequence.length - 1)]:
            drafts.clear()
            return False
        self.accepted += 1
        self._accepted_now += 1
        self._rows.commit(sequence, 1)
        return True

    def learn(self, tokens: int, seconds: float) -> None:
        """Note how long a step of `tokens` tokens took, drafts included. Call it after `accept`."""
        alone = max(1, tokens - self._drafted_now)
        usual = self._costs.seconds(alone)
        saved = usual * (alone + self._accepted_now) / alone - seconds if self._drafted_now else 0.0
        self._balance = min(CREDIT, self._balance + ALLOWED_LOSS + max(-MOST_LOSS, saved / max(usual, 1e-9)))

    def _best(self, tokens: int, chances: list[tuple[float, int]]) -> int:
        """How many drafts, the likeliest first, to add to a step of `tokens` tokens. Without costs none."""
        if not chances or not self._costs.points or self._balance < 0:
            return 0
        self._steps += 1
        if self._steps % UNDRAFTED_EVERY == 0:
            return 0
        best, expected, seconds = 0, float(tokens), self._costs.seconds(tokens)
        best_rate = LEAST_GAIN * tokens / seconds
        for count, (chance, _) in enumerate(chances, 1):
            expected += chance
            seconds = max(seconds, self._costs.seconds(tokens + count))  # old costs may be too low
            if expected / seconds > best_rate:
                best, best_rate = count, expected / seconds
        return best


def _may_have_drafts(sequence: Sequence) -> bool:
    """Whether the row decodes, and nothing but logits and noise decides its next tokens."""
    return (
        sequence.remaining == 1
        and sequence.length > len(sequence.request.prompt)
        and not sequence.forks
        and sequence.edits is None
        and sequence.matcher is None
        and sequence.request.sampling.logprobs is None
    )
