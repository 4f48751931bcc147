"""Continuous batching: decides before each step which sequences run, on how many tokens, in which pages.

A *waiting* sequence has no pages. A *running* sequence has pages and computes tokens in (almost) every step. New
sequences join between two steps, and finished ones leave, so the batch never has to drain.

**A step.** `schedule` fills a token budget (`max_num_batched_tokens`) in three rounds. First every running sequence
that decodes gets one token. Then running sequences with several tokens to compute, such as a prompt, get a chunk
(*prefill*). The rest of the budget goes to waiting sequences. So a long prompt never delays the tokens of others: it is
computed in chunks beside them. While interactive sequences run, the batch class takes part in some steps only
(`shared_steps.py`); its sequences keep their rows and pages meanwhile.

**Order.** Each round goes by rank (`rows.py`).

**States, angles.** With linear attention a sequence also has a state (`states.py`). With longrope, one that grows
beyond the original length is restarted with other rotary angles, as in transformers.

This module knows nothing of sampling or tensors.
"""

from collections.abc import Collection, Iterator, Mapping

from ktqueue.core.request import JobClass
from ktqueue.engine.drafts import Drafts
from ktqueue.engine.rows import Rows
from ktqueue.engine.sequence import Sequence, SequenceStatus
from ktqueue.engine.shared_steps import BATCH_PART, SharedSteps
from ktqueue.engine.step_costs import StepCosts
from ktqueue.engine.step_plan import StepPlan

MAX_PROMPT_ROWS = 256
GATHERING_ROWS = 8  # batch prompts wait for others while less than one of so many rows is free
MOST_GATHERING_STEPS = 16
PREFILL_PART = 4  # prompts that fill less than one of so many parts of a prefill step get none
LEAST_OVERLAPPED = 128  # tokens of an overlapped step: it streams all experts
MOST_BESIDE = 512  # tokens of a step beside it, in which the CPU computes all experts
MOST_BESIDE_ROWS = 32  # left to requests that arrive during an overlapped step, or an eighth of all rows
_INTERACTIVE, _BATCH, _ALL = (JobClass.INTERACTIVE,), (JobClass.BATCH,), tuple(JobClass)


class Scheduler:
    """Plans steps of at most `max_num_batched_tokens` tokens for the sequences of `rows`.

    `shared` tells which steps are for all classes, and `costs` how long steps take. `max_prompt_rows` limits the rows
    of logits that a step computes for log probabilities of prompts, and so the memory that they take.
    `original_length`: see KVLayout. `drafts`: None for an engine that never drafts.
    """

    def __init__(
        self,
        rows: Rows,
        shared: SharedSteps,
        costs: StepCosts,
        *,
        max_num_batched_tokens: int,
        max_prompt_rows: int = MAX_PROMPT_ROWS,
        original_length: int = 0,
        drafts: Drafts | None = None,
    ) -> None:
        self._overlapped_steps = 0
        self._left_out: dict[Sequence, int] = {}  # the last overlapped step that left a running batch sequence out
        self._gathering_steps = 0  # for which batch prompts have waited for others
        self._step_held_by = ""  # see `rows_held_by`, without the limits of rows
        self.rows_left_out = 0  # batch rows that the last step left out because of interactive sequences
        self._rows = rows
        self._shared = shared
        self._costs = costs
        self._token_budget = max_num_batched_tokens
        self._max_prompt_rows = max_prompt_rows
        self._original_length = original_length
        self._drafts = drafts

    def schedule(self) -> StepPlan:
        """Plan a step: decode rows, then prefill chunks, then waiting sequences, and drafts in what is left."""
        if self._original_length:
            for sequence in [
                running for running in self._rows.running if running.rotary_offset != running.needed_offset
            ]:
                self._rows.restart(sequence)
        self._rows.sort()
        plan, budget = StepPlan(is_shared=self._is_shared()), 0
        for classes, budget in self._budgets(plan):
            self._fill(plan, classes, budget)
        self._rows.end_admission()
        if self._drafts is not None:
            self._drafts.add(plan, max(0, budget - plan.tokens))
        return plan

    @property
    def rows_held_by(self) -> str:
        """What keeps batch sequences from more rows; '' if those that wait join the next steps. See EngineStats."""
        rows = self._rows
        if rows.rows_taken >= rows.rows_wanted:
            return "rows" if rows.rows_wanted == rows.max_num_seqs else "costs"
        return self._step_held_by

    @property
    def may_overlap(self) -> bool:
        """Whether to compute batch rows in a step of their own now, and interactive ones in others at the same time."""
        rows = self._rows
        if not rows.has(JobClass.BATCH) or not self._shared.are_limited(rows.has(JobClass.INTERACTIVE)):
            return False
        tokens = sum(max(1, sequence.remaining) for sequence in self._running_of(_BATCH))
        return tokens + rows.waiting_tokens(JobClass.BATCH, rows.rows_wanted - rows.rows_taken) >= LEAST_OVERLAPPED

    def plan_beside(self, *, tokens: bool, prompts: bool) -> StepPlan:
        """Plan a step of the interactive class beside an overlapped step. `tokens`: sequences that decode join it;
        `prompts`: short ones do."""
        self._rows.sort()
        plan = StepPlan(is_shared=False)
        least, longest = 1 if tokens else 2, MOST_BESIDE if prompts else 1
        if least <= longest:
            self._fill(plan, _INTERACTIVE, min(MOST_BESIDE, self._token_budget), least, longest)
        self._rows.end_admission()
        return plan

    def plan_overlapped(self) -> StepPlan:
        """Plan a step that others overlap: of the batch class, and of interactive prompts and tokens that ride.

        Its sequences keep their rows until it is done, so it leaves some out, which requests that arrive can take.
        Those that are left out take turns.
        """
        self._shared.see(interactive=self._rows.has(JobClass.INTERACTIVE))
        self._rows.sort()
        most_rows = self._rows.max_num_seqs
        plan = StepPlan(most_rows=max(1, most_rows - min(MOST_BESIDE_ROWS, most_rows // BATCH_PART)))
        self._fill(plan, _INTERACTIVE, self._token_budget - self._token_budget // BATCH_PART)
        self._fill(plan, _BATCH, self._token_budget, left_out=self._left_out)
        self._overlapped_steps += 1
        now = [sequence for sequence in self._running_of(_BATCH) if sequence not in plan.rows]
        before = {sequence: step for sequence, step in self._left_out.items() if sequence in plan.rows}
        self._left_out = before | dict.fromkeys(now, self._overlapped_steps)
        self._rows.end_admission()
        return plan

    def begin(self, plan: StepPlan) -> None:
        """Note that this step begins."""
        rows = len(self._rows.running)
        interactive = self._rows.has(JobClass.INTERACTIVE)
        if not interactive or plan.is_shared:  # other steps are not for the batch class
            waits = self._rows.waiting_tokens(JobClass.BATCH, 1) > 0
            held_by = "pages" if plan.lacks_pages else "interactive" if interactive else ""
            self._step_held_by = held_by if waits else ""
        self.rows_left_out = max(0, rows - len(plan.rows)) if interactive else 0
        self._shared.record(plan.tokens, interactive=interactive, is_shared=plan.is_shared, is_prefill=plan.is_prefill)

    def plan_next_step(self, *, may_repeat: bool = False) -> StepPlan | None:
        """Plan the step after the current one, assuming that each running sequence gets one token now.

        The plan is valid if the version of the rows grows only by the rows that end now, `plan.ending`. Returns None
        if the next step will be another one, or if it needs more pages than are available. Call it after `commit`. The
        sequences keep the pages that they are given here, because each needs its page in any case. `may_repeat`: see
        States.plan.
        """
        self._rows.sort()
        plan = StepPlan(is_shared=self._is_shared())
        if not all(self._prepare_rows(plan, classes, budget) for classes, budget in self._budgets(plan)):
            return None
        if plan.is_prefill or not plan.rows:
            return None
        missing = sum(
            sequence.num_computed_tokens // self._rows.page_size == sequence.page_count for sequence in plan.rows
        )
        if missing > self._rows.pages.available:
            return None
        for sequence in plan.rows:
            self._rows.allocate(sequence, 1, plan, may_repeat=may_repeat)
        return plan

    def shrink(self, plan: StepPlan) -> bool:
        """Preempt the half of the planned rows that ranks lower. Returns False if the plan had only one row.

        The step that failed may have overwritten states, so with states the other half begins again too.
        """
        ranked = sorted(plan.rows, key=self._rows.rank)
        half = (len(ranked) + 1) // 2
        for victim in ranked[0 if self._rows.states and len(ranked) > 1 else half :]:
            self._rows.preempt(victim, plan)
        while (
            len(plan.rows) < half and (first := self._rows.first_waiting(_ALL)) and not self._rows.can_never_run(first)
        ):
            if not self._rows.admit(first, plan, self._token_budget):
                break
            self._plan_row(first, plan, self._token_budget)
        self._rows.end_admission()
        return len(ranked) > 1

    def may_launch_ahead(self, plan: StepPlan) -> bool:
        """Whether the step is so short that a request which arrives before it begins may wait for its end too."""
        return self._shared.may_launch_ahead(plan.tokens)

    def is_long(self, plan: StepPlan) -> bool:
        """Whether a request that arrives during this step would wait too long for the next."""
        return self._shared.is_long(plan.tokens)

    def _is_shared(self) -> bool:
        """Whether the next step is for all classes."""
        if not self._shared.enabled or not self._both_classes():
            return True
        running = self._running_of(_INTERACTIVE)
        tokens = sum(max(1, sequence.remaining) for sequence in running)
        tokens += self._rows.waiting_tokens(JobClass.INTERACTIVE, self._rows.max_num_seqs - len(running))
        return self._shared.is_due(min(tokens, self._token_budget))

    def _both_classes(self) -> bool:
        return self._rows.has(JobClass.INTERACTIVE) and self._rows.has(JobClass.BATCH)

    def _budgets(self, plan: StepPlan) -> Iterator[tuple[Collection[JobClass], int]]:
        """Classes that the step is filled with, one after the other, and how many tokens it has then at most."""
        is_limited = self._shared.are_limited(self._rows.has(JobClass.INTERACTIVE))
        if not is_limited or not self._rows.has(JobClass.BATCH):
            yield _ALL, self._token_budget
            return
        running = self._rows.running_of
        interactive, batch = running[JobClass.INTERACTIVE], running[JobClass.BATCH]
        most = min(self._token_budget, self._shared.most_tokens(interactive))
        prefill = min(self._token_budget, self._shared.prefill_tokens(most))
        if plan.is_shared:
            kept = min(max(1, most // BATCH_PART), max(1, batch), most - interactive)
            yield _INTERACTIVE, most - kept
            self._plan_prefill(plan, prefill)
            yield _BATCH, prefill if plan.is_prefill else most
        else:
            yield _INTERACTIVE, self._token_budget
            plan.holds_prompts = prefill > 0
            yield _BATCH, min(self._token_budget, plan.tokens + self._shared.free_tokens(plan.tokens))

    def _fill(
        self,
        plan: StepPlan,
        classes: Collection[JobClass],
        budget: int,
        least: int = 1,
        longest: int | None = None,
        left_out: Mapping[Sequence, int] | None = None,
    ) -> None:
        """Plan rows of these classes until the step has `budget` tokens. least, longest: tokens that a sequence of the
        step has to compute, now or later; None: any number. left_out: the last step that did not compute a sequence.
        The latest come first."""
        running = self._running_of(classes)
        if in_flight := self._rows.in_flight:
            running = [sequence for sequence in running if sequence not in in_flight]
        if longest is not None:
            running = [sequence for sequence in running if least <= sequence.remaining <= longest]
        if left_out:
            running.sort(key=lambda sequence: left_out.get(sequence, 0), reverse=True)
        for sequence in running:
            if plan.is_prefill and sequence.request.job_class is JobClass.BATCH:
                break
            decodes = sequence.length - sequence.num_computed_tokens == 1
            if not decodes or plan.is_full(budget) or sequence.status is not SequenceStatus.RUNNING:
                continue  # it may have been preempted for a row before
            if self._rows.allocate(sequence, 1, plan):
                plan.add(sequence, 1)
        for sequence in running:
            if plan.is_full(budget):
                break
            if sequence.remaining > 1:
                self._plan_row(sequence, plan, budget)
        for sequence in plan.can_never_run:
            self._rows.remove(sequence)
        if _BATCH[0] in classes and (plan.holds_prompts or self._gathers(plan, budget)):
            classes = [job_class for job_class in classes if job_class not in _BATCH]
        while not plan.is_full(budget) and (waiting := self._rows.first_waiting(classes)):
            if longest is not None and waiting.length > longest:
                break
            if not self._rows.admit(waiting, plan, budget):
                break
            self._plan_row(waiting, plan, budget)

    def _plan_prefill(self, plan: StepPlan, budget: int) -> None:
        """Decide whether a shared step is a prefill step of `budget` tokens, and if not, whether prompts wait for one.

        They wait until they fill it, but not while an eighth of the rows is free, nor for more than
        MOST_GATHERING_STEPS. Few prompts, for which no more time is left, join other steps.
        """
        rows, room = self._rows, budget - plan.tokens
        free = rows.rows_wanted - rows.rows_taken
        tokens = rows.waiting_tokens(JobClass.BATCH, free) if room > 0 else 0
        if not tokens:
            return
        waited = GATHERING_ROWS * free >= rows.rows_wanted or self._shared.since_prefill >= MOST_GATHERING_STEPS
        is_due = tokens >= room or (waited and PREFILL_PART * tokens >= room)
        plan.is_prefill = is_due and self._shared.prefill_may_follow(budget)
        plan.holds_prompts = not plan.is_prefill and (is_due or not waited)

    def _gathers(self, plan: StepPlan, budget: int) -> bool:
        """Whether waiting batch prompts should wait for more of them, since a full step computes them faster.

        Where experts are streamed for a step, a thousand prompt tokens cost nearly as much as eight thousand. So they
        wait until they fill a step, an eighth of the rows is free, or MOST_GATHERING_STEPS have passed.
        """
        rows, room = self._rows, budget - plan.tokens
        free = rows.rows_wanted - rows.rows_taken
        is_limited = self._shared.are_limited(rows.has(JobClass.INTERACTIVE))
        tokens = 0 if is_limited else rows.waiting_tokens(JobClass.BATCH, free)
        gathers = (
            0 < tokens < room
            and GATHERING_ROWS * free < rows.rows_wanted
            and self._gathering_steps < MOST_GATHERING_STEPS
            and self._costs.gains_by_filling(plan.tokens, tokens, budget)
        )
        self._gathering_steps = self._gathering_steps + 1 if gathers else 0
        return gathers

    def _plan_row(self, sequence: Sequence, plan: StepPlan, budget: int) -> None:
        """Add a running sequence to the step if it gets its pages, with the tokens that `budget` leaves."""
        if sequence.status is SequenceStatus.RUNNING:
            count = min(sequence.remaining, budget - plan.tokens)
            count = self._rows.prefixes.limit(sequence, self._limited_by_prompt_rows(sequence, count, plan))
            if count and self._rows.allocate(sequence, count, plan):
                plan.add(sequence, count, self._rows.prefixes.completed(sequence, count))

    def _running_of(self, classes: Collection[JobClass]) -> list[Sequence]:
        """The running sequences of these classes by rank, the interactive class first even if others rank with it."""
        return [
            sequence
            for job_class in (JobClass.INTERACTIVE, JobClass.BATCH)
            if job_class in classes
            for sequence in self._rows.running
            if sequence.request.job_class is job_class
        ]

    def _prepare_rows(self, plan: StepPlan, classes: Collection[JobClass], budget: int) -> bool:
        """Plan one token for each running sequence of these classes, `budget` tokens at most.

        Returns False if the next step will do anything else.
        """
        for sequence in self._running_of(classes):
            if plan.tokens >= budget:
                return True
            # 0 if the current step computes it, 1 if that step leaves it out
            left = sequence.length - sequence.num_computed_tokens
            if not left and sequence.ends_next:
                if self._rows.num_waiting or self._both_classes():
                    return False
                plan.ending += 1
                continue
            if left > 1 or (not left and sequence.length == sequence.original_length):
                return False
            place = sequence.num_computed_tokens // self._rows.page_size
            if place < sequence.page_count and self._rows.pages.is_shared(sequence.pages.item(place)):
                return False
            plan.add(sequence, 1)
        first = self._rows.first_waiting(classes) if plan.tokens < budget else None
        return first is None or not (self._rows.can_never_run(first) or self._rows.has_room_for(first))

    def _limited_by_prompt_rows(self, sequence: Sequence, count: int, plan: StepPlan) -> int:
        """Return how many of the next `count` tokens fit into the step without more than `max_prompt_rows` rows."""
        wanted = sequence.scored_positions(count)
        if not wanted:
            return count
        taken = sum(len(planned.scored_positions(tokens)) for planned, tokens in plan.rows.items())
        room = self._max_prompt_rows - taken
        return count if len(wanted) <= room else wanted.start + room - sequence.num_computed_tokens
