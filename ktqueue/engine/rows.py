"""The rows and pages of an engine: which sequences run, which wait, and which loses its place to another.

A *waiting* sequence has no pages. A *running* sequence has pages, and takes one of `max_num_seqs` rows. Each sibling
that waits for its prompt takes a row too.

**Rank.** The interactive class goes before the batch class, then the earlier arrival. The `batch_floor` earliest
sequences of the batch class rank as interactive, so batch jobs always make progress. Interactive sequences *over
share*, of an owner who has more than others, rank between the classes, and lose rows and pages as batch does.

**Pages and preemption.** Pages are allocated when tokens need them, not in advance. If none is available, the running
sequence of the lowest rank is *preempted*: it loses all its pages, waits again, and is computed again later, mostly
from the prefix cache. A sequence that would have to preempt itself skips the step. A waiting sequence is admitted
only if the pages for all its known tokens are available, otherwise it would be preempted at once. To make room for
it, only sequences of a lower class, or over share, are preempted.

**Prompts that arrive together.** A step may compute a prefix that a waiting sequence has too. The sequence then sits
the step out, if that saves more than it costs, and finds the prefix in the cache before the next. Its row and pages
are reserved meanwhile. A sequence that overtakes it must fit into the step, so that no long prompt gets in between.

**Nothing starves.** The first running sequence in rank can take pages from all others, so it always progresses. Later
arrivals rank behind it, and the earliest batch sequence ranks as interactive. So every sequence becomes the first.

This module knows nothing of sampling or tensors.
"""

from bisect import insort
from collections.abc import Collection
from heapq import nsmallest
from operator import attrgetter

from ktqueue.core.errors import EngineFailure
from ktqueue.core.request import JobClass
from ktqueue.engine.pages import Pages
from ktqueue.engine.prefix_cache import PrefixCache
from ktqueue.engine.row_shares import over_share
from ktqueue.engine.sequence import Sequence, SequenceStatus
from ktqueue.engine.states import States
from ktqueue.engine.step_costs import StepCosts
from ktqueue.engine.step_plan import StepPlan

LEAST_SHARED = {JobClass.INTERACTIVE: 256, JobClass.BATCH: 1}
"""Tokens of a prefix for which a sequence sits a step out. A step of a few rows takes about as long as 256 tokens of a
prompt. The batch class need not count steps."""

Rank = tuple[int, tuple[float, int, int]]
"""Class, and `Sequence.order`. The lowest goes first."""
OVER_SHARE, BATCH = 1, 2  # ranks of classes after that of interactive requests
_order = attrgetter("order")


class Rows:
    """Owns the waiting and running sequences and their pages.

    `batch_floor` rows are reserved for the batch class while it needs them. With `auto_rows` batch sequences take only
    as many rows as raise the tokens computed in a second, by `costs`. `states`: None for a model without linear
    attention.
    """

    def __init__(
        self,
        pages: Pages,
        *,
        page_size: int,
        max_num_seqs: int,
        prefix_caching: bool,
        batch_floor: int,
        costs: StepCosts,
        auto_rows: bool = False,
        states: States | None = None,
    ) -> None:
        self.pages = pages
        self.states = states
        self.max_num_seqs = max_num_seqs
        self.page_size = page_size
        self.running: list[Sequence] = []  # by rank
        self.running_of = dict.fromkeys(JobClass, 0)  # number of running sequences of each class
        self._with_forks: set[Sequence] = set()  # running sequences that have had siblings in `forks`
        self.version = 0
        """Grows when a sequence arrives, is admitted, finishes, is aborted, is preempted, forks or jumps. A step that
        was prepared for an older version is stale."""
        self.preemptions = 0
        self.prefixes = PrefixCache(pages, states, page_size=page_size, enabled=prefix_caching)
        self.in_flight: Collection[Sequence] = ()  # that the device computes: they keep their rows and pages
        self._waiting: dict[JobClass, list[Sequence]] = {job_class: [] for job_class in JobClass}
        self._sitting_out: list[Sequence] = []  # waiting sequences that must not join the step that is being planned
        self._reserved_rows = self._reserved_pages = 0  # for them
        self._costs = costs
        self._auto_rows = auto_rows
        self._batch_floor = batch_floor
        self._over_share: set[Sequence] = set()
        self._promoted: set[Sequence] = set()  # sequences of the batch class that rank as interactive
        self._sorted_version = -1  # the `version` for which `running` is sorted by rank

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences, including those that wait for a waiting sibling's prompt."""
        return sum(_rows(sequence) for queue in self._waiting.values() for sequence in queue)

    @property
    def num_over_share(self) -> int:
        """Number of interactive sequences that are more than the share of their owner."""
        return len(self._over_share)

    @property
    def rows_taken(self) -> int:
        """Rows of running sequences and of the siblings that wait for their prompts."""
        return len(self.running) + sum(len(sequence.forks) for sequence in tuple(self._with_forks))

    @property
    def rows_wanted(self) -> int:
        """Rows that batch sequences may fill: as many as raise the tokens computed in a second."""
        wanted = max(self._batch_floor, self._costs.best_tokens()) if self._auto_rows else self.max_num_seqs
        return min(self.max_num_seqs, wanted)

    def has(self, job_class: JobClass) -> bool:
        """Whether the class has a sequence here, running or waiting."""
        return self.running_of[job_class] > 0 or bool(self._waiting[job_class])

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, with the siblings in its `forks`."""
        self.version += 1
        sequence.set_angles()
        sequence.status = SequenceStatus.WAITING
        insort(self._waiting[sequence.request.job_class], sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state and free its pages. If siblings wait for its prompt, one takes it over."""
        self.version += 1
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_running(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting[sequence.request.job_class].remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._free_pages(sequence)
        self._hand_over_forks(sequence)

    def commit(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Record that `count` tokens of a sequence were computed, and register its full pages in the prefix cache.

        Returns the siblings that start to run now, because the prompt that they share is complete.
        """
        sequence.num_computed_tokens += count
        if self.states is not None:
            self.states.commit(sequence)
        self.prefixes.register(sequence, count)
        forks = sequence.forks
        if not forks or sequence.num_computed_tokens < len(sequence.request.prompt):
            return []
        if self.states is not None and sequence.length > len(sequence.request.prompt):
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
        self.version += 1

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent. For tests."""
        self.pages.check()
        if self.states is not None:
            self.states.check()
        assert not self._sitting_out, "a sequence is not in its queue"
        assert self.rows_taken == sum(map(_rows, self.running)), "rows are counted wrongly"
        assert self.rows_taken <= self.max_num_seqs, "more rows than max_num_seqs"
        classes = [sequence.request.job_class for sequence in self.running]
        assert self.running == sorted(self.running, key=self.rank), "running sequences are out of order"
        assert self.running_of == {job_class: classes.count(job_class) for job_class in JobClass}, "wrong counts"
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING, "a sequence runs that should not"
            assert sequence.num_computed_tokens <= sequence.page_count * self.page_size, "tokens without a page"
            assert 0 <= sequence.num_computed_tokens < sequence.length, "a running sequence has nothing to compute"
            assert not sequence.draft_states, "a draft that is verified has a state"
        for queue in self._waiting.values():
            assert queue == sorted(queue, key=_order), "the queue is out of order"
            for sequence in queue:
                assert sequence.page_count == 0, "a waiting sequence has pages"
                assert sequence.status is SequenceStatus.WAITING, "a sequence waits that should not"

    def sort(self) -> None:
        """Rank the sequences anew, if the schedule has changed since the last time."""
        if self._sorted_version != self.version:
            batch = [sequence for sequence in self.running if sequence.request.job_class is JobClass.BATCH]
            self._promoted = set(nsmallest(self._batch_floor, batch + self._waiting[JobClass.BATCH], key=_order))
            interactive = [one for one in self.running if one.request.job_class is JobClass.INTERACTIVE]
            waiting = self._waiting[JobClass.INTERACTIVE]
            self._over_share = over_share(interactive + waiting, sum(map(_rows, interactive)), _order)
            self.running.sort(key=self.rank)
            self._sorted_version = self.version

    def rank(self, sequence: Sequence) -> Rank:
        return self._class_rank(sequence), sequence.order

    def first_waiting(self, classes: Collection[JobClass]) -> Sequence | None:
        heads = [queue[0] for job_class, queue in self._waiting.items() if queue and job_class in classes]
        if self._over_share and JobClass.INTERACTIVE in classes:
            within = (one for one in self._waiting[JobClass.INTERACTIVE] if one not in self._over_share)
            heads += [one for one in (next(within, None),) if one is not None]
        return min(heads, key=self.rank, default=None)

    def waiting_tokens(self, job_class: JobClass, rows: int) -> int:
        """Known tokens of the first waiting sequences of a class that take `rows` rows."""
        return sum(sequence.length for sequence in self._waiting[job_class][: max(0, rows)])

    def can_never_run(self, sequence: Sequence) -> bool:
        return self._pages_for(sequence.length) > self.pages.total

    def too_long(self, sequence: Sequence) -> EngineFailure:
        """The error of a sequence that can never run."""
        capacity = self.pages.total * self.page_size
        return EngineFailure(
            f"this sequence has {sequence.length} tokens, but the whole cache of this worker has room for {capacity}",
            limit=capacity,
            value=sequence.length,
        )

    def has_room_for(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence can get rows, including those that lower classes would lose to it."""
        class_rank = self._class_rank(sequence)
        limit = self.rows_wanted if class_rank == BATCH else self.max_num_seqs
        room = limit - self.rows_taken - self._reserved_rows - _rows(sequence)
        if room >= 0 or class_rank == BATCH:
            return room >= 0
        others = (running for running in self.running if running not in self.in_flight)
        return room + sum(_rows(running) for running in others if self._class_rank(running) > class_rank) >= 0

    def admit(self, sequence: Sequence, plan: StepPlan, budget: int) -> bool:
        """Start the first waiting sequence, find that it can never run, or let it sit out this step of `budget` tokens.

        Returns False if it has to wait, and all behind it. Call `end_admission` once the step is planned.
        """
        if self.can_never_run(sequence):
            self.remove(sequence)
            plan.can_never_run.append(sequence)
            return True
        if not self.has_room_for(sequence):
            return False
        cached, slot = self.prefixes.find(sequence)
        needed = self._pages_for(sequence.length) - len(cached)
        shared = self.prefixes.found_later(sequence, len(cached), plan)
        if shared * self.page_size >= LEAST_SHARED[sequence.request.job_class]:
            self._waiting[sequence.request.job_class].remove(sequence)
            self._sitting_out.append(sequence)
            self._reserved_rows += _rows(sequence)
            self._reserved_pages += needed - shared
            return True
        if self._sitting_out and sequence.length - len(cached) * self.page_size > budget - plan.tokens:
            return False
        while self.rows_taken + self._reserved_rows + _rows(sequence) > self.max_num_seqs:
            self._preempt_lower_class(sequence, plan)
        while self.pages.available - self.pages.count_idle(cached) - self._reserved_pages < needed:
            if not self._preempt_lower_class(sequence, plan):
                plan.lacks_pages = True
                return False
        self.version += 1
        self._waiting[sequence.request.job_class].remove(sequence)
        self._join_running(sequence)
        if sequence.forks:
            self._with_forks.add(sequence)
        sequence.status = SequenceStatus.RUNNING
        if self.states is not None:
            self.states.start(sequence, slot)
        for page in cached:
            self.pages.share(page)
        sequence.pages[: len(cached)] = cached
        sequence.page_count = sequence.registered_pages = len(cached)
        sequence.num_computed_tokens = len(cached) * self.page_size
        self.prefixes.record_use(sequence)
        return True

    def end_admission(self) -> None:
        """Let the sequences that sat out the planned step wait for the next."""
        for sequence in self._sitting_out:
            insort(self._waiting[sequence.request.job_class], sequence, key=_order)
        self._sitting_out.clear()
        self._reserved_rows = self._reserved_pages = 0

    def allocate(self, sequence: Sequence, count: int, plan: StepPlan, *, may_repeat: bool = False) -> bool:
        """Allocate pages for the next `count` tokens, copying a shared page before it is written.

        Preempts sequences of lower rank if necessary. Returns False if there are no pages; the sequence then skips
        this step. `may_repeat`: see States.plan.
        """
        pages, first = self.pages, sequence.num_computed_tokens // self.page_size
        end = sequence.num_computed_tokens + count
        has_pages = max(end, sequence.length) <= sequence.page_count * self.page_size
        if has_pages and self.states is None and not pages.is_kept(sequence.pages.item(first)):
            return True  # most rows that decode
        if self.can_never_run(sequence):
            plan.can_never_run.append(sequence)
            return False
        while True:
            copies = first < sequence.page_count and pages.is_shared(int(sequence.pages[first]))
            missing = self._pages_for(end) - sequence.page_count
            if pages.available >= missing + copies:
                break
            if (victim := self._lowest()) is None or self.rank(victim) <= self.rank(sequence):
                return False
            self.preempt(victim, plan)
        if copies:
            sequence.pages[first] = pages.copy_shared(int(sequence.pages[first]))
        elif first < sequence.page_count:
            pages.unregister(int(sequence.pages[first]))  # a finished sibling may have filled and registered it
        for _ in range(missing):
            sequence.pages[sequence.page_count] = pages.allocate()
            sequence.page_count += 1
        if self.states is not None:
            self.states.plan(sequence, may_repeat=may_repeat)
        return True

    def room_beside_others(self, sequence: Sequence) -> int:
        """How many tokens fit into its pages, and new ones without which each running sequence can still get one."""
        spare = max(0, self.pages.available - len(self.running))
        return (sequence.page_count + spare) * self.page_size - sequence.num_computed_tokens

    def preempt(self, victim: Sequence, plan: StepPlan) -> None:
        plan.drop(victim)
        self.preemptions += 1
        self.restart(victim)

    def restart(self, sequence: Sequence) -> None:
        """Let a running sequence wait without pages, to be computed again."""
        self._leave_running(sequence)
        self._free_pages(sequence)
        self.add(sequence)

    def _join_running(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=self.rank)
        self.running_of[sequence.request.job_class] += 1

    def _leave_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.running_of[sequence.request.job_class] -= 1
        self._with_forks.discard(sequence)

    def _class_rank(self, sequence: Sequence) -> int:
        """0 for interactive requests and for promoted sequences, then OVER_SHARE, then BATCH."""
        if sequence.request.job_class is JobClass.BATCH:
            return 0 if sequence in self._promoted else BATCH
        return OVER_SHARE if sequence in self._over_share else 0

    def _hand_over_forks(self, sequence: Sequence) -> None:
        """Let the first sibling that waits for the sequence's prompt compute it for the others."""
        if sequence.forks:
            first, *others = sequence.forks
            sequence.forks, first.forks = [], others
            self.add(first)

    def _preempt_lower_class(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt the running sequence of the lowest rank if its class is lower than that of `sequence`."""
        if (victim := self._lowest()) is None or self._class_rank(victim) <= self._class_rank(sequence):
            return False
        self.preempt(victim, plan)
        return True

    def _lowest(self) -> Sequence | None:
        """The running sequence of the lowest rank that may be preempted."""
        return next((one for one in reversed(self.running) if one not in self.in_flight), None)

    def _free_pages(self, sequence: Sequence) -> None:
        # The last page first: the end of a cached prefix must be evicted before its beginning.
        for page in reversed(sequence.pages[: sequence.page_count].tolist()):
            self.pages.release(page)
        sequence.page_count = sequence.num_computed_tokens = 0
        sequence.draft_progress = None
        if self.states is not None:
            self.states.release(sequence)

    def _fork(self, leader: Sequence, fork: Sequence) -> None:
        """Start `fork` on the pages of the prompt that `leader` has computed.

        If the leader's logits are those of the prompt's last token, they serve the fork too (its `remaining` is 0).
        """
        self.version += 1
        prompt = len(leader.request.prompt)
        count = self._pages_for(prompt)
        fork.pages[:count] = leader.pages[:count]
        for page in leader.pages[:count].tolist():
            self.pages.share(page)
        fork.page_count = count
        if self.states is not None:
            self.states.fork(leader, fork)
        fork.num_computed_tokens = prompt if leader.length == prompt else min(prompt, fork.length - 1)
        fork.registered_pages = min(leader.registered_pages, fork.num_computed_tokens // self.page_size)
        fork.known_digests = leader.known_digests[: prompt // self.page_size]
        fork.status = SequenceStatus.RUNNING
        self._join_running(fork)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def _rows(sequence: Sequence) -> int:
    return 1 + len(sequence.forks)
