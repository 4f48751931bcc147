"""Shares of rows: which sequences are more than the part of their owner, if several owners have some. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Many

from ktqueue.core.tenants import Owner
from ktqueue.engine.sequence import Sequence


def over_share(sequences: Many[Sequence], rows: int, rank: Callable[[Sequence], tuple[float, ...]]) -> set[Sequence]:
    """The sequences beyond the share of their owner in `rows` rows. `sequences`: those of all owners.

    Tenants share the rows by weight, and callers the rows of their tenant equally. The first sequences of an owner by
    `rank` are within its share, at least one.
    """
    owners = {sequence.request.owner for sequence in sequences}
    if len(owners) < 2:
        return set()
    weights = {owner.tenant: owner.weight for owner in owners}
    callers = Counter(owner.tenant for owner in owners)
    row = rows / sum(weights.values())
    shares = {owner: max(1, int(row * weights[owner.tenant] / callers[owner.tenant])) for owner in owners}
    taken: defaultdict[Owner, int] = defaultdict(int)
    over = set()
    for sequence in sorted(sequences, key=rank):
        owner = sequence.request.owner
        if taken[owner] >= shares[owner]:
            over.add(sequence)
        taken[owner] += 1 + len(sequence.forks)
    return over
