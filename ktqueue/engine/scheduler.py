"""Continuous batching: decides before each step which sequences run, on how many tokens, in which pages.

A *waiting* sequence has no pages. A *running* sequence has pages and computes tokens in (almost) every step. New
sequences join between two steps, and finished ones leave, so the batch never has to drain.

**A step.** `schedule` fills a token budget (`max_num_batched_tokens`) in three rounds. First every running sequence
that decodes gets one token. Then running sequences with several tokens to compute, such as a prompt, get a chunk
(*prefill*). The rest of the budget goes to waiting sequences. So a long prompt never delays the tokens of others: it is
computed in chunks beside them.

**Order.** Each round goes by rank: the interactive class before the batch class, then the earlier arrival. The
`batch_floor` earliest sequences of the batch class rank as interactive, so batch jobs always make progress.

**Rows.** A running sequence takes one of `max_num_seqs` rows. Each sibling that waits for its prompt takes a row too.

**Pages and preemption.** Pages are allocated when tokens need them, not in advance. If none is available, the running
sequence of the lowest rank is *preempted*: it loses all its pages, waits again, and is computed again later, mostly
from the prefix cache. A sequence that would have to preempt itself skips the step. A waiting sequence is admitted
only if the pages for all its known tokens are available, otherwise it would be preempted at once. To make room for
it, only sequences of a lower class are preempted.

**States, angles.** With linear attention a sequence also has a state (`states.py`). With longrope, one that grows
beyond the original length is restarted with other rotary angles, as in transformers.

**Nothing starves.** The first running sequence in rank can take pages from all others, so it always progresses. Later
arrivals rank behind it, and the earliest batch sequence ranks as interactive. So every sequence becomes the first.

This module knows nothing of sampling or tensors.
"""

from bisect import insort
from dataclasses import dataclass, field
from heapq import nsmallest

from ktqueue.core.request import JobClass
from ktqueue.engine.pages import Pages
from ktqueue.engine.prefix_cache import PrefixCache
from ktqueue.engine.sequence import Sequence, SequenceStatus
from ktqueue.engine.states import States

MAX_PROMPT_ROWS = 256

Rank = tuple[int, float, int, int]
"""Class, arrival, admission number, choice. The lowest goes first."""


@dataclass(slots=True)
class StepPlan:
    """The rows of one step: the number of tokens to compute for each sequence, in the order of the batch.

    `can_never_run`: sequences that need more pages than the cache has.
    """

    rows: dict[Sequence, int] = field(default_factory=dict)
    can_never_run: list[Sequence] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of tokens planned so far."""
        return sum(self.rows.values())


def _arrival(sequence: Sequence) -> tuple[float, int, int]:
    return sequence.request.arrival, sequence.request.serial, sequence.index


class Scheduler:
    """Owns the waiting and running sequences and their pages.

    `batch_floor` rows are reserved for the batch class while it needs them. `max_prompt_rows` limits the rows of logits
    that a step computes for log probabilities of prompts, and so the memory that they take. `states`: None for a model
    without linear attention.
    """

    def __init__(
        self,
        pages: Pages,
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool,
        batch_floor: int,
        max_prompt_rows: int = MAX_PROMPT_ROWS,
        states: States | None = None,
    ) -> None:
        self.pages = pages
        self._states = states
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # every decode row must fit into the budget
        self.running: list[Sequence] = []
        self.schedule_version = 0
        """Grows when a sequence arrives, is admitted, finishes, is aborted, is preempted, forks or jumps. A step that
        was prepared for an older version is stale."""
        self.preemptions = 0
        self.prefixes = PrefixCache(pages, states, page_size=page_size, enabled=prefix_caching)
        self._waiting: dict[JobClass, list[Sequence]] = {job_class: [] for job_class in JobClass}
        self._page_size = page_size
        self._token_budget = max_num_batched_tokens
        self._batch_floor = batch_floor
        self._max_prompt_rows = max_prompt_rows
        self._promoted: set[Sequence] = set()  # sequences of the batch class that rank as interactive
        self._sorted_version = -1  # the `schedule_version` for which `running` is sorted by rank

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences, including those that wait for a waiting sibling's prompt."""
        return sum(_rows(sequence) for queue in self._waiting.values() for sequence in queue)

    @property
    def rows_taken(self) -> int:
        """Rows of running sequences and of the siblings that wait for their prompts."""
        return sum(_rows(sequence) for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, with the siblings in its `forks`."""
        self.schedule_version += 1
        sequence.set_angles()
        sequence.status = SequenceStatus.WAITING
        insort(self._waiting[sequence.request.job_class], sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state and free its pages. If siblings wait for its prompt, one takes it over."""
        self.schedule_version += 1
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting[sequence.request.job_class].remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._free_pages(sequence)
        self._hand_over_forks(sequence)

    def _hand_over_forks(self, sequence: Sequence) -> None:
        """Let the first sibling that waits for the sequence's prompt compute it for the others."""
        if sequence.forks:
            first, *others = sequence.forks
            sequence.forks, first.forks = [], others
            self.add(first)

    def schedule(self) -> StepPlan:
        """Plan a step: decode rows, then prefill chunks, then waiting sequences."""
        for sequence in [running for running in self.running if running.rotary_offset != running.needed_offset]:
            self._restart(sequence)
        self._sort()
        plan = StepPlan()
        decoding = [sequence for sequence in self.running if sequence.remaining == 1]
        prefilling = [sequence for sequence in self.running if sequence.remaining > 1]
        for sequence in decoding:
            self._plan_row(sequence, plan)
        for sequence in prefilling:
            if plan.tokens < self._token_budget:
                self._plan_row(sequence, plan)
        for sequence in plan.can_never_run:
            self.remove(sequence)
        while plan.tokens < self._token_budget and (first := self._first_waiting()) and self._admit(first, plan):
            self._plan_row(first, plan)
        return plan

    def plan_next_step(self) -> StepPlan | None:
        """Plan the step after the current one, assuming that each running sequence gets one token now.

        The plan is valid while `schedule_version` stays the same. Returns None if the next step will be a different
        one, or if it needs more pages than are available. Call it after `commit`. The sequences keep the pages that
        they are given here, because each needs its page in any case.
        """
        self._sort()
        first = self._first_waiting()
        if first is not None and (self._can_never_run(first) or self._has_room_for(first)):
            return None
        plan = StepPlan()
        missing = 0
        for sequence in self.running:
            place = sequence.num_computed_tokens // self._page_size
            if sequence.remaining or sequence.ends_next or sequence.length == sequence.original_length:
                return None
            if place == sequence.page_count:
                missing += 1
            elif self.pages.is_shared(int(sequence.pages[place])):
                return None
            plan.rows[sequence] = 1
        if missing > self.pages.available:
            return None
        for sequence in plan.rows:
            self._allocate(sequence, 1, plan)
        return plan if plan.rows else None

    def shrink(self, plan: StepPlan) -> bool:
        """Preempt the half of the planned rows that ranks lower. Returns False if the plan had only one row.

        The step that failed may have overwritten states, so with states the other half begins again too.
        """
        ranked = sorted(plan.rows, key=self._rank)
        half = (len(ranked) + 1) // 2
        for victim in ranked[0 if self._states and len(ranked) > 1 else half :]:
            self._preempt(victim, plan)
        while len(plan.rows) < half and (first := self._first_waiting()) and not self._can_never_run(first):
            if not self._admit(first, plan):
                break
            self._plan_row(first, plan)
        return len(ranked) > 1

    def commit(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Record that `count` tokens of a sequence were computed, and register its full pages in the prefix cache.

        Returns the siblings that start to run now, because the prompt that they share is complete.
        """
        sequence.num_computed_tokens += count
        if self._states is not None:
            self._states.commit(sequence)
        self.prefixes.register(sequence, count)
        forks = sequence.forks
        if not forks or sequence.num_computed_tokens < len(sequence.request.prompt):
            return []
        if self._states is not None and sequence.length > len(sequence.request.prompt):
            self._hand_over_forks(sequence)  # which may need the state of an earlier token
            return []
        forks = [fork for fork in sequence.forks if fork.needed_offset == sequence.rotary_offset]
        sequence.forks = [fork for fork in sequence.forks if fork not in forks]  # whose keys have other angles
        self._hand_over_forks(sequence)
        for fork in forks:
            self._fork(sequence, fork)
        return forks

    def jumped(self) -> None:
        """Record that a running sequence got several tokens at once, for which a prepared step has no place."""
        self.schedule_version += 1

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent. For tests."""
        self.pages.check()
        if self._states is not None:
            self._states.check()
        assert self.rows_taken <= self.max_num_seqs, "more rows than max_num_seqs"
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING, "a sequence runs that should not"
            assert sequence.num_computed_tokens <= sequence.page_count * self._page_size, "tokens without a page"
            assert 0 <= sequence.num_computed_tokens < sequence.length, "a running sequence has nothing to compute"
        for queue in self._waiting.values():
            assert queue == sorted(queue, key=_arrival), "the queue is out of order"
            for sequence in queue:
                assert sequence.page_count == 0, "a waiting sequence has pages"
                assert sequence.status is SequenceStatus.WAITING, "a sequence waits that should not"

    def _plan_row(self, sequence: Sequence, plan: StepPlan) -> None:
        """Add a running sequence to the step if it gets its pages. Decode rows always fit into the token budget."""
        if sequence.status is SequenceStatus.RUNNING:
            count = 1 if sequence.remaining == 1 else min(sequence.remaining, self._token_budget - plan.tokens)
            count = self.prefixes.limit(sequence, self._limited_by_prompt_rows(sequence, count, plan))
            if count and self._allocate(sequence, count, plan):
                plan.rows[sequence] = count

    def _rank(self, sequence: Sequence) -> Rank:
        request = sequence.request
        return self._class_rank(sequence), request.arrival, request.serial, sequence.index

    def _class_rank(self, sequence: Sequence) -> int:
        """0 for the interactive class and for promoted sequences, 1 for the rest of the batch class."""
        return int(sequence.request.job_class is JobClass.BATCH and sequence not in self._promoted)

    def _sort(self) -> None:
        """Sort `running` by rank, if the schedule has changed since the last time."""
        if self._sorted_version != self.schedule_version:
            batch = [sequence for sequence in self.running if sequence.request.job_class is JobClass.BATCH]
            self._promoted = set(nsmallest(self._batch_floor, batch + self._waiting[JobClass.BATCH], key=_arrival))
            self.running.sort(key=self._rank)
            self._sorted_version = self.schedule_version

    def _first_waiting(self) -> Sequence | None:
        heads = [queue[0] for queue in self._waiting.values() if queue]
        return min(heads, key=self._rank, default=None)

    def _admit(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Start the first waiting sequence, or find that it can never run. Returns False if it has to wait."""
        if self._can_never_run(sequence):
            self.remove(sequence)
            plan.can_never_run.append(sequence)
            return True
        if not self._has_room_for(sequence):
            return False
        while self.rows_taken + _rows(sequence) > self.max_num_seqs:
            self._preempt_lower_class(sequence, plan)
        needed, (cached, slot) = self._pages_for(sequence.length), self.prefixes.find(sequence)
        while self.pages.available - self.pages.count_idle(cached) < needed - len(cached):
            if not self._preempt_lower_class(sequence, plan):
                return False
        self.schedule_version += 1
        self._waiting[sequence.request.job_class].remove(sequence)
        self.running.append(sequence)
        sequence.status = SequenceStatus.RUNNING
        if self._states is not None:
            self._states.start(sequence, slot)
        for page in cached:
            self.pages.share(page)
        sequence.pages[: len(cached)] = cached
        sequence.page_count = sequence.registered_pages = len(cached)
        sequence.num_computed_tokens = len(cached) * self._page_size
        self.prefixes.record_use(sequence)
        return True

    def _can_never_run(self, sequence: Sequence) -> bool:
        return self._pages_for(sequence.length) > self.pages.total

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence can get rows, including those that lower classes would lose to it."""
        class_rank = self._class_rank(sequence)
        lower = sum(_rows(running) for running in self.running if self._class_rank(running) > class_rank)
        return self.rows_taken - lower + _rows(sequence) <= self.max_num_seqs

    def _preempt_lower_class(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt the running sequence of the lowest rank if its class is lower than that of `sequence`."""
        victim = max(self.running, key=self._rank, default=None)
        if victim is None or self._class_rank(victim) <= self._class_rank(sequence):
            return False
        self._preempt(victim, plan)
        return True

    def _allocate(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Allocate pages for the next `count` tokens, copying a shared page before it is written.

        Preempts sequences of lower rank if necessary. Returns False if there are no pages; the sequence then skips
        this step.
        """
        pages = self.pages
        if self._can_never_run(sequence):
            plan.can_never_run.append(sequence)
            return False
        first = sequence.num_computed_tokens // self._page_size
        while True:
            copies = first < sequence.page_count and pages.is_shared(int(sequence.pages[first]))
            missing = self._pages_for(sequence.num_computed_tokens + count) - sequence.page_count
            if pages.available >= missing + copies:
                break
            victim = max(self.running, key=self._rank)
            if victim is sequence:
                return False
            self._preempt(victim, plan)
        if copies:
            sequence.pages[first] = pages.copy_shared(int(sequence.pages[first]))
        elif first < sequence.page_count:
            pages.unregister(int(sequence.pages[first]))  # a finished sibling may have filled and registered it
        for _ in range(missing):
            sequence.pages[sequence.page_count] = pages.allocate()
            sequence.page_count += 1
        if self._states is not None:
            self._states.plan(sequence)
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        plan.rows.pop(victim, None)
        self.preemptions += 1
        self._restart(victim)

    def _restart(self, sequence: Sequence) -> None:
        """Let a running sequence wait without pages, to be computed again."""
        self.running.remove(sequence)
        self._free_pages(sequence)
        self.add(sequence)

    def _free_pages(self, sequence: Sequence) -> None:
        # The last page first: the end of a cached prefix must be evicted before its beginning.
        for page in reversed(sequence.pages[: sequence.page_count].tolist()):
            self.pages.release(page)
        sequence.page_count = sequence.num_computed_tokens = 0
        if self._states is not None:
            self._states.release(sequence)

    def _fork(self, leader: Sequence, fork: Sequence) -> None:
        """Start `fork` on the pages of the prompt that `leader` has computed.

        If the leader's logits are those of the prompt's last token, they serve the fork too (its `remaining` is 0).
        """
        self.schedule_version += 1
        prompt = len(leader.request.prompt)
        count = self._pages_for(prompt)
        fork.pages[:count] = leader.pages[:count]
        for page in leader.pages[:count].tolist():
            self.pages.share(page)
        fork.page_count = count
        if self._states is not None:
            self._states.fork(leader, fork)
        fork.num_computed_tokens = prompt if leader.length == prompt else min(prompt, fork.length - 1)
        fork.registered_pages = min(leader.registered_pages, fork.num_computed_tokens // self._page_size)
        fork.known_digests = leader.known_digests[: prompt // self._page_size]
        fork.status = SequenceStatus.RUNNING
        self.running.append(fork)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _limited_by_prompt_rows(self, sequence: Sequence, count: int, plan: StepPlan) -> int:
        """Return how many of the next `count` tokens fit into the step without more than `max_prompt_rows` rows."""
        wanted = sequence.scored_positions(count)
        if not wanted:
            return count
        taken = sum(len(planned.scored_positions(tokens)) for planned, tokens in plan.rows.items())
        room = self._max_prompt_rows - taken
        return count if len(wanted) <= room else wanted.start + room - sequence.num_computed_tokens


def _rows(sequence: Sequence) -> int:
    return 1 + len(sequence.forks)
