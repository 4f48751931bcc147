"""Who runs next, with how many tokens, on which pages.

A step has a token budget and a number of seats. Decode rows come first, then prefill chunks, then
waiting sequences, each in order of rank: class, arrival, order of coming. The first few of the batch
class rank as interactive: they have the seats that are batch's own. Pages are taken as tokens come.
When they are short, the sequence of lowest rank is preempted: it gives all its pages back and is
computed again later; one that nobody needs pages from only stands still. The first in rank can take
pages from all others, so it always gets on, and everybody becomes the first in time: nothing starves.

A seat is held by each running sequence and by each sibling that waits for a running leader's
prompt. A waiting sequence is let in when the pages for all its known tokens are there, which
reserves nothing: it keeps out what would be preempted at once. It may preempt running ones of a
lower class only. Knows nothing of sampling or of tensors.
"""

from bisect import insort
from dataclasses import dataclass, field
from heapq import nsmallest

from ktqueue.core.request import JobClass
from ktqueue.engine.pages import Pages
from ktqueue.engine.sequence import Sequence, Status

Rank = tuple[int, float, int, int]


@dataclass(slots=True)
class Plan:
    """One step: tokens to compute for each sequence, in the order of the batch; sequences that can never run."""

    rows: dict[Sequence, int] = field(default_factory=dict)
    hopeless: list[Sequence] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens planned so far."""
        return sum(self.rows.values())


def _arrival(sequence: Sequence) -> tuple[float, int, int]:
    return sequence.request.arrival, sequence.request.serial, sequence.index


class Scheduler:
    """Owns the waiting and running sequences and their pages. `batch_floor` seats are batch's while it needs them."""

    def __init__(
        self,
        pages: Pages,
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool,
        batch_floor: int,
    ) -> None:
        self.pages = pages
        self.seats = min(max_num_seqs, max_num_batched_tokens)  # a budget smaller than the rows would starve some
        self.running: list[Sequence] = []
        self.changes = 0
        """Counts whatever makes another plan possible than that all who run go on: who comes, goes, stops or forks."""
        self.preemptions = 0
        self.prefix_queries = 0  # tokens
        self.prefix_hits = 0  # tokens
        self._waiting: dict[JobClass, list[Sequence]] = {kind: [] for kind in JobClass}
        self._page_size = page_size
        self._budget = max_num_batched_tokens
        self._prefix_caching = prefix_caching
        self._batch_floor = batch_floor
        self._kept: set[Sequence] = set()  # of the batch class, but ranked as interactive
        self._ranked = -1  # the `changes` for which `running` is in order of rank

    @property
    def waiting(self) -> int:
        """Waiting sequences, those included that wait for a waiting leader."""
        return sum(_seats(one) for queue in self._waiting.values() for one in queue)

    @property
    def seats_taken(self) -> int:
        """Seats of running sequences and of those that wait for a running one's prompt."""
        return sum(_seats(one) for one in self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, with the siblings in its `forks`."""
        self.changes += 1
        sequence.status = Status.WAITING
        insort(self._waiting[sequence.request.job_class], sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands; its pages come back. Siblings that wait for it go on without it."""
        self.changes += 1
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self._waiting[sequence.request.job_class].remove(sequence)
        sequence.status = Status.FINISHED
        self._release(sequence)
        if sequence.forks:  # the next sibling computes the prompt for the others
            first, *others = sequence.forks
            sequence.forks, first.forks = [], others
            self.add(first)

    def schedule(self) -> Plan:
        """Plan a step."""
        self._sort()
        plan = Plan()
        decoding = [one for one in self.running if one.remaining == 1]
        filling = [one for one in self.running if one.remaining > 1]
        for sequence in decoding:
            self._plan(sequence, plan)
        for sequence in filling:
            if plan.tokens < self._budget:
                self._plan(sequence, plan)
        for sequence in plan.hopeless:
            self.remove(sequence)
        while plan.tokens < self._budget and (head := self._head()) is not None and self._admit(head, plan):
            self._plan(head, plan)
        return plan

    def ahead(self) -> Plan | None:
        """What `schedule` will plan if each running sequence gets one token now and `changes` stays as it is.

        None if that is known to be otherwise, or would take more than available pages. Called when the computed tokens
        are booked; the sequences keep the pages that they get here, since each needs its own whenever it goes on.
        """
        self._sort()
        head = self._head()
        if head is not None and (self._is_hopeless(head) or self._has_seat(head)):
            return None
        plan = Plan()
        missing = 0
        for one in self.running:
            place = one.computed // self._page_size
            if one.remaining or one.ends_next:
                return None
            if place == one.page_count:
                missing += 1
            elif self.pages.is_shared(int(one.pages[place])):
                return None
            plan.rows[one] = 1
        if missing > self.pages.available:
            return None
        for one in plan.rows:
            self._make_room(one, 1, plan)
        return plan if plan.rows else None

    def shrink(self, plan: Plan) -> bool:
        """Preempt the lower half in rank of a planned step that could not be made. False: it had one row."""
        ranked = sorted(plan.rows, key=self._rank)
        for victim in ranked[(len(ranked) + 1) // 2 :]:
            self._preempt(victim, plan)
        return len(ranked) > 1

    def commit(self, sequence: Sequence, count: int) -> list[Sequence]:
        """`count` tokens were computed. Name full pages; the siblings that now share the prompt, running."""
        sequence.computed += count
        self._name_pages(sequence)
        forks = sequence.forks
        if not forks or sequence.computed < len(sequence.request.prompt):
            return []
        sequence.forks = []
        for fork in forks:
            self._fork(sequence, fork)
        return forks

    def check(self) -> None:
        """Raise AssertionError where the books don't balance. For tests."""
        self.pages.check()
        assert self.seats_taken <= self.seats, "more rows than seats"
        for one in self.running:
            assert one.status is Status.RUNNING, "a sequence runs that should not"
            assert one.computed <= one.page_count * self._page_size, "tokens without a page"
            assert 0 <= one.computed < one.length, "a running sequence has nothing to compute"
        for queue in self._waiting.values():
            assert queue == sorted(queue, key=_arrival), "the queue is out of order"
            assert all(one.page_count == 0 and one.status is Status.WAITING for one in queue), "a waiting one has pages"

    def _plan(self, sequence: Sequence, plan: Plan) -> None:
        """Give a sequence its part of the step, if it still runs and pages can be had. Decode rows always fit in."""
        if sequence.status is Status.RUNNING:
            count = 1 if sequence.remaining == 1 else min(sequence.remaining, self._budget - plan.tokens)
            if self._make_room(sequence, count, plan):
                plan.rows[sequence] = count

    def _rank(self, sequence: Sequence) -> Rank:
        request = sequence.request
        return self._class(sequence), request.arrival, request.serial, sequence.index

    def _class(self, sequence: Sequence) -> int:
        return int(sequence.request.job_class is JobClass.BATCH and sequence not in self._kept)

    def _sort(self) -> None:
        """Put the running in order of rank, if anything has changed since."""
        if self._ranked != self.changes:
            batch = [one for one in self.running if one.request.job_class is JobClass.BATCH]
            self._kept = set(nsmallest(self._batch_floor, batch + self._waiting[JobClass.BATCH], key=_arrival))
            self.running.sort(key=self._rank)
            self._ranked = self.changes

    def _head(self) -> Sequence | None:
        heads = [queue[0] for queue in self._waiting.values() if queue]
        return min(heads, key=self._rank, default=None)

    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        """Give the first waiting one a seat, or find that it can never run. False: it has to wait."""
        if self._is_hopeless(sequence):
            self.remove(sequence)
            plan.hopeless.append(sequence)
            return True
        if not self._has_seat(sequence):
            return False
        while self.seats_taken + _seats(sequence) > self.seats:
            self._preempt_below(sequence, plan)
        needed, found = self._pages_for(sequence.length), self._lookup(sequence)
        while self.pages.available - self.pages.idle_among(found) < needed - len(found):
            if not self._preempt_below(sequence, plan):
                return False
        self.changes += 1
        self._waiting[sequence.request.job_class].remove(sequence)
        self.running.append(sequence)
        sequence.status = Status.RUNNING
        for page in found:
            self.pages.share(page)
        sequence.pages[: len(found)] = found
        sequence.page_count = sequence.named = len(found)
        sequence.computed = len(found) * self._page_size
        self._count_hits(sequence)
        return True

    def _is_hopeless(self, sequence: Sequence) -> bool:
        return self._pages_for(sequence.length) > self.pages.total

    def _has_seat(self, sequence: Sequence) -> bool:
        """Whether a waiting one can get seats, those of lower classes included."""
        lower = sum(_seats(one) for one in self.running if self._class(one) > self._class(sequence))
        return self.seats_taken - lower + _seats(sequence) <= self.seats

    def _preempt_below(self, sequence: Sequence, plan: Plan) -> bool:
        """Preempt the last of the running, if it is of a lower class than `sequence`."""
        victim = max(self.running, key=self._rank, default=None)
        if victim is None or self._class(victim) <= self._class(sequence):
            return False
        self._preempt(victim, plan)
        return True

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Pages for the next `count` tokens, own ones where it writes. False: it stands still in this step."""
        pages = self.pages
        if self._is_hopeless(sequence):
            plan.hopeless.append(sequence)
            return False
        first = sequence.computed // self._page_size
        while True:
            splits = first < sequence.page_count and pages.is_shared(int(sequence.pages[first]))
            missing = self._pages_for(sequence.computed + count) - sequence.page_count
            if pages.available >= missing + splits:
                break
            victim = max(self.running, key=self._rank)
            if victim is sequence:
                return False
            self._preempt(victim, plan)
        if splits:
            sequence.pages[first] = pages.split(int(sequence.pages[first]))
        elif first < sequence.page_count:
            pages.unname(int(sequence.pages[first]))  # a sibling that has ended may have filled it with its own tokens
        for _ in range(missing):
            sequence.pages[sequence.page_count] = pages.take()
            sequence.page_count += 1
        return True

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        plan.rows.pop(victim, None)
        self.running.remove(victim)
        self._release(victim)
        self.preemptions += 1
        self.add(victim)

    def _release(self, sequence: Sequence) -> None:
        # The last page first: of a cached prefix the tail must be evicted before the head.
        for page in reversed(sequence.pages[: sequence.page_count].tolist()):
            self.pages.release(page)
        sequence.page_count = sequence.computed = 0

    def _fork(self, leader: Sequence, fork: Sequence) -> None:
        """Let `fork` share the pages of the prompt that `leader` has computed.

        Where the leader has logits for the prompt's end, they are the fork's too (`remaining` 0).
        """
        self.changes += 1
        prompt = len(leader.request.prompt)
        count = self._pages_for(prompt)
        fork.pages[:count] = leader.pages[:count]
        for page in leader.pages[:count].tolist():
            self.pages.share(page)
        fork.page_count = count
        fork.computed = prompt if leader.length == prompt else min(prompt, fork.length - 1)
        fork.named = min(leader.named, fork.computed // self._page_size)
        fork.digests = leader.digests[: prompt // self._page_size]
        fork.status = Status.RUNNING
        self.running.append(fork)

    def _lookup(self, sequence: Sequence) -> list[int]:
        """Cached pages of its tokens; never all of them, since the last token's logits are wanted."""
        if not self._prefix_caching:
            return []
        full = (sequence.length - 1) // self._page_size
        return self.pages.find(sequence.page_digests(full, self._page_size))

    def _count_hits(self, sequence: Sequence) -> None:
        request = sequence.request
        if self._prefix_caching:
            self.prefix_queries += sequence.length
            self.prefix_hits += sequence.computed
        if request.cached_tokens is None:
            request.cached_tokens = min(sequence.computed, len(request.prompt))

    def _name_pages(self, sequence: Sequence) -> None:
        full = sequence.computed // self._page_size
        if not self._prefix_caching or full <= sequence.named:
            return
        digests = sequence.page_digests(full, self._page_size)
        for place in range(sequence.named, full):
            self.pages.name(int(sequence.pages[place]), digests[place])
        sequence.named = full

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)


def _seats(sequence: Sequence) -> int:
    return 1 + len(sequence.forks)
