"""Pages of the paged cache: who holds which, which may be reused, which goes next.

A page is free (no content worth keeping), held (by one or more sequences), or idle (held by
nobody, but its content is known by hash and may be taken up again until it is evicted, least
recently used first). Knows nothing of sequences, requests or tensors; `copy` moves the content.

A full page's name is a digest chained over all tokens up to its end, so equal names mean equal
prefixes.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def page_digest(parent: bytes, token_ids: NDArray[np.int32]) -> bytes:
    """Name of a full page: 16 bytes over its parent's name and its own ids (int32, contiguous)."""
    return blake2b(token_ids.data, digest_size=16, key=parent).digest()


class Pages:
    """Reference-counted pages 0..total-1. `available` counts those that `take` can still give."""

    def __init__(self, total: int, copy: Callable[[int, int], None]) -> None:
        self.total = total
        self._copy = copy
        self._free = list(range(total - 1, -1, -1))  # a stack: low numbers first
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders = [0] * total
        self._digest_of: list[bytes | None] = [None] * total
        self._page_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Free and idle pages."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """A page with one holder and no content. The caller has checked `available`; else IndexError."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self.unname(page)
        else:
            raise IndexError("no page is available")
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held or idle."""
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def is_shared(self, page: int) -> bool:
        """More than one sequence holds it, so nobody may write to it."""
        return self._holders[page] > 1

    def release(self, page: int) -> None:
        """One holder less; the last one leaves it idle if its content has a name, else free."""
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if self._digest_of[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def split(self, page: int) -> int:
        """Copy-on-write: give up one hold on a shared page for a copy of one's own."""
        mine = self.take()
        self._copy(page, mine)
        self.release(page)
        return mine

    def name(self, page: int, digest: bytes) -> None:
        """A held page is full, and this is its content. The first page of a name keeps it."""
        if digest not in self._page_of and self._digest_of[page] is None:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def unname(self, page: int) -> None:
        """Forget its name, if it has one: its content is about to change. At most one holder may have it."""
        digest = self._digest_of[page]
        if digest is not None:
            del self._page_of[digest]
            self._digest_of[page] = None

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix of `digests`; no hold is taken."""
        found = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def idle_among(self, pages: Sequence[int]) -> int:
        """How many of `pages` are idle: sharing those makes `available` smaller."""
        return sum(self._holders[page] == 0 for page in pages)

    def check(self) -> None:
        """Raise AssertionError if the books don't balance. For tests: O(total)."""
        free, idle = set(self._free), set(self._idle)
        held = {page for page in range(self.total) if self._holders[page] > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle and not free & held and not idle & held, "a page is in two states"
        assert len(free) + len(idle) + len(held) == self.total, "a page is lost"
        assert min(self._holders, default=0) >= 0, "a page was released too often"
        assert all(self._digest_of[page] is None for page in free), "a free page has a name"
        named = {page: digest for page, digest in enumerate(self._digest_of) if digest is not None}
        assert {digest: page for page, digest in named.items()} == self._page_of, "names and pages disagree"
        assert idle <= named.keys(), "an idle page has no name"
