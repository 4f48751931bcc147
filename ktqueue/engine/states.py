"""The slots of the states that sequences have in layers with linear attention: who reads which, and who writes.

A state cannot be taken back by a token, so it can only be reused where it was kept. A step reads a sequence's state
from one slot and writes it to another if the old one is worth keeping: as a *snapshot* of a prefix, registered under
the digest of its last page, or because several sequences share it. So nothing is ever copied. Slots are counted and
evicted like pages. A draft is a row that reads the state which the row before it writes. So there is a state after each
draft, of which that after the last right one remains. Knows nothing of tensors' content.
"""

from ktqueue.engine.pages import Pages
from ktqueue.engine.sequence import NO_SLOT, Sequence

SLOTS_PER_ROW = 2
"""A running sequence has at most two: the state before the next step and the one after it. So with this many for each
row there is always one to allocate, and rows that are not in use leave room for snapshots."""


DRAFT_SLOTS = 8
"""Further ones for an engine that drafts, since the state after each draft is kept until it is verified. Slots that
rows do not use serve drafts too."""


def slots_for(rows: int, *, drafts: bool) -> int:
    """Return how many slots an engine with so many rows has for a model with linear attention."""
    return SLOTS_PER_ROW * rows + (DRAFT_SLOTS if drafts else 0)


class States:
    """Slots 0 to `total` - 1."""

    def __init__(self, total: int) -> None:
        self._slots = Pages(total, _never)

    def snapshot_of(self, digests: list[bytes]) -> tuple[int, int]:
        """Return how many of the pages with these digests the longest snapshot covers, and its slot.

        Without any, (0, NO_SLOT).
        """
        for count in range(len(digests), 0, -1):
            if found := self._slots.find_prefix(digests[count - 1 : count]):
                return count, found[0]
        return 0, NO_SLOT

    def start(self, sequence: Sequence, slot: int) -> None:
        """Let a sequence begin with the snapshot in `slot`, or from zeros with NO_SLOT."""
        if slot != NO_SLOT:
            self._slots.share(slot)
        sequence.state = slot

    def fork(self, leader: Sequence, fork: Sequence) -> None:
        """Let `fork` begin with the state of `leader`."""
        self.start(fork, leader.state)

    def plan(self, sequence: Sequence, *, may_repeat: bool = False) -> None:
        """Choose the slot to which the next step writes. It has one already if that step was planned before.

        `may_repeat`: the step may be computed twice, so it must not overwrite the state that it reads.
        """
        if sequence.next_state == NO_SLOT:
            keeps = may_repeat or sequence.state == NO_SLOT or self._slots.is_kept(sequence.state)
            sequence.next_state = self._slots.allocate() if keeps else sequence.state

    def plan_drafts(self, sequence: Sequence, count: int) -> int:
        """Choose the slots to which the next step writes the states after `count` drafts, or after fewer.

        Returns for how many there are slots. Call it after `plan`, once no other row of the step needs a slot.
        """
        count = min(count, self._slots.available)
        sequence.draft_states = [self._slots.allocate() for _ in range(count)]
        return count

    def accept_draft(self, sequence: Sequence) -> None:
        """Let the next `commit` take the state after the next draft."""
        sequence.next_state = sequence.draft_states.pop(0)

    def drop_drafts(self, sequence: Sequence) -> None:
        """Release the slots of drafts that are not accepted."""
        for slot in sequence.draft_states:
            self._slots.release(slot)
        sequence.draft_states = []

    def commit(self, sequence: Sequence) -> None:
        """Record that the step which was planned is computed."""
        if sequence.next_state != sequence.state and sequence.state != NO_SLOT:
            self._slots.release(sequence.state)
        sequence.state, sequence.next_state = sequence.next_state, NO_SLOT

    def keep(self, sequence: Sequence, digest: bytes) -> None:
        """Register the state as the snapshot of the prefix with that digest."""
        self._slots.register(sequence.state, digest)

    def release(self, sequence: Sequence) -> None:
        """Take all slots from a sequence."""
        self.drop_drafts(sequence)
        for slot in {sequence.state, sequence.next_state} - {NO_SLOT}:
            self._slots.release(slot)
        sequence.state = sequence.next_state = NO_SLOT

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent. For tests."""
        self._slots.check()


def _never(source: int, target: int) -> None:
    raise AssertionError(f"slot {source} would be copied to {target}")
