"""The plan of one step: which sequences compute how many tokens."""

from dataclasses import dataclass, field

from ktqueue.engine.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """The rows of one step: the number of tokens to compute for each sequence, in the order of the batch.

    `tokens`: their sum. `can_never_run`: sequences that need more pages than the cache has. `is_turn`: whether the
    batch class takes its turn, or has the step for itself.
    """

    rows: dict[Sequence, int] = field(default_factory=dict)
    tokens: int = 0
    can_never_run: list[Sequence] = field(default_factory=list)
    is_turn: bool = True

    def add(self, sequence: Sequence, count: int) -> None:
        """Plan the next `count` tokens of a sequence."""
        self.rows[sequence] = count
        self.tokens += count

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out, if it is planned."""
        self.tokens -= self.rows.pop(sequence, 0)
