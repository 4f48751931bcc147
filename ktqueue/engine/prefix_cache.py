"""The prefix cache: which beginning of a sequence need not be computed, because another sequence has computed it.

Full pages are found by the digest of all tokens up to their end. A model with linear attention also needs the state
after the last of them. States are overwritten, so snapshots are kept: at the last full page of a prompt, and every
1,024 tokens. Steps end where a snapshot is wanted.
"""

from ktqueue.engine.pages import Pages
from ktqueue.engine.sequence import NO_SLOT, Sequence
from ktqueue.engine.states import States
from ktqueue.engine.step_plan import StepPlan

LEAST_SNAPSHOT = 128  # tokens; computing fewer again takes less than a step more
SNAPSHOT_TOKENS = 1024  # between snapshots


class PrefixCache:
    """Finds and registers the pages of sequences. Without `enabled` nothing is registered or found.

    `states`: None for a model without linear attention. queries, hits: tokens so far.
    """

    def __init__(self, pages: Pages, states: States | None, *, page_size: int, enabled: bool) -> None:
        self.queries = self.hits = 0
        self._pages = pages
        self._states = states
        self._page_size = page_size
        self._enabled = enabled

    def find(self, sequence: Sequence) -> tuple[list[int], int]:
        """Return known pages of the sequence's tokens, and the slot of the state after them.

        Tokens whose logits are needed, such as the last, are computed.
        """
        if not self._enabled:
            return [], NO_SLOT
        digests = self._reusable(sequence)
        pages = self._pages.find_prefix(digests)
        if self._states is None:
            return pages, NO_SLOT
        count, slot = self._states.snapshot_of(digests[: len(pages)])
        return pages[:count], slot

    def found_later(self, sequence: Sequence, found: int, plan: StepPlan) -> int:
        """Return how many pages more than the `found` ones of `find` a sequence will find after the planned step."""
        if not plan.prefixes:
            return 0
        digests = self._reusable(sequence)
        return next(
            (count - found for count in range(len(digests), found, -1) if plan.completes(digests[count - 1])), 0
        )

    def completed(self, sequence: Sequence, count: int) -> list[bytes]:
        """Digests of the prefixes that `register` will make known after the next `count` tokens of a prompt."""
        end = sequence.num_computed_tokens + count
        full = end // self._page_size
        if not self._enabled or count == 1 or full <= sequence.registered_pages:
            return []
        if self._states is not None and not self._keeps_state(sequence, end, count):
            return []
        return sequence.page_digests(full, self._page_size)[sequence.registered_pages if self._states is None else -1 :]

    def record_use(self, sequence: Sequence) -> None:
        """Count the tokens of a sequence that starts, all of which but those of its pages will be computed."""
        request = sequence.request
        if self._enabled:
            self.queries += sequence.length
            self.hits += sequence.num_computed_tokens
        if request.cached_tokens is None:
            request.cached_tokens = min(sequence.num_computed_tokens, len(request.prompt))

    def limit(self, sequence: Sequence, count: int) -> int:
        """Return how many of the next `count` tokens to compute so that the step ends where a snapshot is wanted."""
        first, last = sequence.num_computed_tokens, self._last_page(sequence) * self._page_size
        if self._states is None or not self._enabled or last - first < LEAST_SNAPSHOT:
            return count
        end = min(first + count, last) // self._page_size * self._page_size
        return end - first if end > first else count

    def register(self, sequence: Sequence, count: int) -> None:
        """Register the pages that a sequence has filled by computing `count` more tokens, and its state if wanted."""
        computed = sequence.num_computed_tokens
        if not self._enabled or computed % self._page_size >= count:  # no page is full that was not before
            return
        full = computed // self._page_size
        if full > sequence.registered_pages:
            digests = sequence.page_digests(full, self._page_size)
            for place in range(sequence.registered_pages, full):
                self._pages.register(int(sequence.pages[place]), digests[place])
            sequence.registered_pages = full
        if self._states is not None and self._keeps_state(sequence, computed, count):
            self._states.keep(sequence, sequence.page_digests(full, self._page_size)[-1])

    def _reusable(self, sequence: Sequence) -> list[bytes]:
        """Digests of the full pages whose tokens need no logits."""
        full = self._last_page(sequence)
        if sequence.request.sampling.prompt_logprobs is not None:
            full = min(full, max(0, sequence.request.prompt_entries - 1) // self._page_size)
        return sequence.page_digests(full, self._page_size)

    def _keeps_state(self, sequence: Sequence, end: int, count: int) -> bool:
        """Whether the state after `end` tokens, the last `count` of them in one step, becomes a snapshot."""
        full, rest = divmod(end, self._page_size)
        far = end // SNAPSHOT_TOKENS > (end - count) // SNAPSHOT_TOKENS
        return full > 0 and not rest and (far or full == self._last_page(sequence))

    def _last_page(self, sequence: Sequence) -> int:
        """Number of full pages before the last known token."""
        return (sequence.length - 1) // self._page_size
