"""Drafts: tokens that a sequence may get next, which a step verifies beside the last token. See docs/adr/0059.

The noise of a token depends on seed and position alone. So a draft is right exactly if it is the token that the step
would have drawn. The step computes the logits after the last token and after each draft. The tokens are drawn as
always, one after another, as long as the draft before is right. What wrong drafts wrote to the cache is overwritten.
"""

from collections import Counter

from ktqueue.engine.draft_costs import DraftCosts
from ktqueue.engine.draft_model import MOST_OF_A_STEP, DraftModel
from ktqueue.engine.lookup import LONGEST, Lookup
from ktqueue.engine.rows import Rows
from ktqueue.engine.sequence import Sequence
from ktqueue.engine.step_costs import StepCosts
from ktqueue.engine.step_plan import StepPlan

RATE_BY_TOKEN = 0.1  # of a match beyond its first token, before any was seen: a longer match is right more often


class Drafts:
    """Adds drafts to planned steps, at most `most` for each sequence, and accepts the right ones.

    model: makes the drafts; None: they are looked up in the sequence. drafted, accepted: drafts so far. probed: so many
    drafts are added to each row whatever they cost and are; 0: only those that raise the tokens computed in a second.
    """

    def __init__(self, rows: Rows, costs: StepCosts, most: int, model: DraftModel | None = None) -> None:
        self.drafted = self.accepted = self.probed = 0
        self.costs = DraftCosts(costs)
        self._step_costs = costs
        self._rows = rows
        self._most = most
        self._model = model
        self._drafted_now = self._accepted_now = 0  # in the step that is planned
        self._last_ended: float | None = None  # when the step before ended; None: the engine had no work since
        self._rates = [RATE_BY_TOKEN * max(0, matched - 1) for matched in range(LONGEST + 1)]

    def add(self, plan: StepPlan, room: int) -> None:
        """Add at most `room` drafts to a step, if that raises the tokens computed in a second.

        They take no pages that another running sequence may need next.
        """
        self._drafted_now = self._accepted_now = 0
        counts: dict[Sequence, int] = {}
        for sequence, wanted in self._wanted(plan, room).items():
            count = min(wanted, self._rows.room_beside_others(sequence) - 1)
            if count > 0 and self._rows.allocate(sequence, 1 + count, plan):
                counts[sequence] = count
        for sequence, drafts in self._make(counts).items():
            if sequence in plan.rows and (drafts := self._with_states(sequence, drafts)):
                plan.add_drafts(sequence, drafts)
                self._drafted_now += len(drafts)
        self.drafted += self._drafted_now

    def are_wanted(self, plan: StepPlan) -> bool:
        """Whether `add` would add drafts to this step, which has none, if there were room."""
        return bool(self._wanted(plan, MOST_OF_A_STEP))

    def may_be_wanted(self, plan: StepPlan) -> bool:
        """Whether drafts will probably be added to this step. Each of its rows gets its token in the step before.

        Call it while that step runs. It assumes that the tokens of that step are those which matches foretell.
        """
        return bool(self._wanted(plan, MOST_OF_A_STEP, ahead=1))

    def accept(self, plan: StepPlan, sequence: Sequence, number: int) -> bool:
        """Whether the token after draft `number` of a sequence, from 0, is now the next one.

        Call it for one draft after another, once the sequence has the token in the place of the draft. If the draft is
        right, and all before it, it is computed. The token after it may be known too, if a grammar forced it.
        """
        drafts = plan.drafts[sequence]
        is_right = drafts[number : number + 1] == [sequence.tokens.item(sequence.num_computed_tokens)]
        if self._model is not None and drafts and not self.probed:  # probes are no text, and tell nothing
            self._model.learn(sequence, is_right=is_right)
        states = self._rows.states
        if not is_right:
            drafts.clear()
            if states is not None:
                states.drop_drafts(sequence)
            return False
        self.accepted += 1
        self._accepted_now += 1
        if states is not None:
            states.accept_draft(sequence)
        self._rows.commit(sequence, 1)
        return sequence.remaining == 0

    def learn(self, plan: StepPlan, began: float, ended: float, *, has_more: bool) -> None:
        """Note when a step began and ended, in seconds, and whether the next follows at once.

        Call it after `accept`.
        """
        drafted, accepted = self._drafted_now, self._accepted_now
        decodes = plan.tokens == len(plan.rows) + drafted
        making, reading = self._model.take_seconds() if self._model is not None else (0.0, 0.0)
        between = None if self._last_ended is None else max(0.0, began - self._last_ended - making - reading)
        self.costs.learn(
            plan.tokens, drafted, accepted, ended - began, between, decodes=decodes, making=making, reading=reading
        )
        if self._model is not None and not drafted:
            self._model.recover(plan.rows)
        self._last_ended = ended if has_more else None
        self._drafted_now = self._accepted_now = 0

    def close(self) -> None:
        """Release what the draft model has on a device."""
        if self._model is not None:
            self._model.close()

    def _wanted(self, plan: StepPlan, room: int, ahead: int = 0) -> dict[Sequence, int]:
        """How many drafts to add to each row of a step; rows without drafts are left out.

        ahead: tokens that each row gets before the step. Those of a match are assumed to be what it foretells.
        """
        chances: list[tuple[float, Sequence]] = []
        if self._rows.states is not None and plan.tokens != len(plan.rows):
            return {}  # with states, rows continue others only where each has one token
        decodes, reading = plan.tokens == len(plan.rows), 0.0
        for sequence, count in plan.rows.items():
            if count != 1 or not _may_have_drafts(sequence, ahead):
                continue
            rest = sequence.request.max_tokens - sequence.generated - ahead
            if self._model is not None and not self.probed:
                own = self._model.reading_seconds(sequence, ahead, self._step_costs)
                if own and not self.costs.may_read(plan.tokens, reading + own, own, rest, decodes=decodes):
                    continue
                reading += own
            most = min(self._most, rest - 1)  # one token comes anyway
            if self.probed:
                chances += [(1.0, sequence)] * min(self.probed, most)
            else:
                chances += [(chance, sequence) for chance in self._chances(sequence, most, ahead)]
        chances.sort(key=lambda chance: -chance[0])
        chances = chances[: min(room, MOST_OF_A_STEP)]
        wanted = [sequence for _, sequence in chances]
        if self.probed:
            return dict(Counter(wanted))
        making = [] if self._model is None else self._making_seconds(self._model, wanted)
        best = self.costs.best(plan.tokens, [chance for chance, _ in chances], decodes=decodes, making=making)
        return dict(Counter(wanted[:best]))

    @staticmethod
    def _making_seconds(model: DraftModel, wanted: list[Sequence]) -> list[float]:
        """Seconds to make the first of these drafts, the first two and so on. Each pass adds one to some rows."""
        counts, rows = Counter[Sequence](), Counter[int]()  # drafts of a sequence; rows of a pass
        whole, seconds = 0.0, []
        most = 1 + len(set(wanted))
        passes = [[0.0, *(model.pass_seconds(number, ahead) for number in range(1, most))] for ahead in (0, 1)]
        for sequence in wanted:
            ahead, taken = counts[sequence], rows[counts[sequence]]
            whole += passes[min(1, ahead)][taken + 1] - passes[min(1, ahead)][taken]
            counts[sequence] += 1
            rows[ahead] += 1
            seconds.append(whole)
        return seconds

    def _make(self, counts: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        """So many drafts of each sequence, or fewer if the grammar does not allow them."""
        if self._model is None:
            return {sequence: self._lookup(sequence).drafts(count) for sequence, count in counts.items()}
        found = self._model.drafts(counts)
        for sequence, drafts in found.items():
            if sequence.matcher is not None:
                del drafts[sequence.matcher.count_allowed(drafts) :]
        return found

    def _with_states(self, sequence: Sequence, drafts: list[int]) -> list[int]:
        """The first of these drafts, for which the model has slots of states, if it needs them."""
        states = self._rows.states
        return drafts if states is None else drafts[: states.plan_drafts(sequence, len(drafts))]

    def _chances(self, sequence: Sequence, most: int, ahead: int) -> list[float]:
        """The chances of `most` drafts after the next `ahead` tokens, as far as the grammar allows them."""
        if self._model is not None:
            return self._model.chances(sequence, most, ahead)
        lookup = self._lookup(sequence)
        found = lookup.chances(most + ahead)
        if found and not ahead and sequence.matcher is not None:  # else its state is not known yet
            return found[: sequence.matcher.count_allowed(lookup.drafts(len(found)))]
        return found[ahead:]

    def _lookup(self, sequence: Sequence) -> Lookup:
        """The lookup of a sequence, with all its tokens."""
        if sequence.lookup is None:
            sequence.lookup = Lookup(sequence.tokens, sequence.length, self._rates)
        sequence.lookup.update(sequence.length)
        return sequence.lookup


def _may_have_drafts(sequence: Sequence, ahead: int) -> bool:
    """Whether the row decodes once it has `ahead` more tokens, and only logits and noise decide its next tokens."""
    return (
        sequence.remaining == 1 - ahead
        and sequence.length + ahead > len(sequence.request.prompt)
        and not sequence.forks
        and sequence.edits is None
        and sequence.request.sampling.logprobs is None
    )
