"""The plan of one step: which sequences compute how many tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ktqueue.engine.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """The rows of one step: the number of tokens to compute for each sequence, in the order of the batch.

    `tokens`: their sum. `ending`: number of rows of the step before that are left out, because they end with it.
    `can_never_run`: sequences that need more pages than the cache has. `is_shared`: whether the step is for all
    classes. `is_prefill`: whether prompts of the batch class fill it, and its other rows are left out.
    `holds_prompts`: whether these prompts wait for such a step. `prefixes`: digests of the prefixes that the prefix
    cache will know after the step, and the sequence that computes each. `drafts`: tokens that are verified beside the
    last token of a sequence; `rows` and `tokens` count them. `most_rows`: rows that it has at most; None: any number.
    `lacks_pages`: whether a waiting sequence found too few pages.
    """

    rows: dict[Sequence, int] = field(default_factory=dict)
    tokens: int = 0
    ending: int = 0
    can_never_run: list[Sequence] = field(default_factory=list)
    is_shared: bool = True
    is_prefill: bool = False
    holds_prompts: bool = False
    prefixes: dict[bytes, Sequence] = field(default_factory=dict)
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    most_rows: int | None = None
    lacks_pages: bool = False

    def is_full(self, budget: int) -> bool:
        """Whether no further row may join a step of `budget` tokens."""
        return self.tokens >= budget or (self.most_rows is not None and len(self.rows) >= self.most_rows)

    def add(self, sequence: Sequence, count: int, prefixes: Iterable[bytes] = ()) -> None:
        """Plan the next `count` tokens of a sequence, which complete these prefixes."""
        self.rows[sequence] = count
        self.tokens += count
        for digest in prefixes:
            self.prefixes[digest] = sequence

    def add_drafts(self, sequence: Sequence, drafts: list[int]) -> None:
        """Let the planned row of a sequence verify drafts too."""
        self.drafts[sequence] = drafts
        self.rows[sequence] += len(drafts)
        self.tokens += len(drafts)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out, if it is planned."""
        self.tokens -= self.rows.pop(sequence, 0)
        self.drafts.pop(sequence, None)

    def completes(self, digest: bytes) -> bool:
        """Whether the prefix with this digest is known after the step."""
        return self.prefixes.get(digest) in self.rows
