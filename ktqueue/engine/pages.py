"""The pages of the KV cache: which are in use, which can be shared, which is evicted next.

A page is in one of three states:

    free    its content is useless
    in use  by one or more sequences, which are counted
    idle    no sequence uses it, but its content is registered under a digest and may be used again

`allocate` takes a free page, else it evicts the idle page that was used longest ago. A page that several sequences use
is never written: `copy_shared` gives the writer a copy (copy-on-write).

A full page is registered under a digest over all tokens up to its end. So equal digests mean equal prefixes. This
module knows nothing of sequences, requests or tensors; the function `copy` moves a page's content.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import compress

import numpy as np
from numpy.typing import NDArray


def page_digest(parent: bytes, token_ids: NDArray[np.int32]) -> bytes:
    """Digest of a full page: 16 bytes over the digest of the page before and its own token ids (contiguous int32)."""
    return blake2b(token_ids.data, digest_size=16, key=parent).digest()


class Pages:
    """Reference-counted pages 0 to `total` - 1. `copy(source, target)` copies a page's content."""

    def __init__(self, total: int, copy: Callable[[int, int], None]) -> None:
        self.total = total
        self._copy = copy
        self._free = list(range(total - 1, -1, -1))  # a stack: low numbers first
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._users = [0] * total  # number of sequences that use each page
        self._digest_of: list[bytes | None] = [None] * total
        self._page_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can still give: free and idle ones."""
        return len(self._free) + len(self._idle)

    def allocate(self) -> int:
        """A page with one user and no content. Raises IndexError if none is available; check `available` first."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self.unregister(page)
        else:
            raise IndexError("no page is available")
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a user to a page that is in use or idle."""
        if self._users[page] == 0:
            del self._idle[page]
        self._users[page] += 1

    def is_shared(self, page: int) -> bool:
        """Whether several sequences use the page, so that none may write to it."""
        return self._users[page] > 1

    def is_kept(self, page: int) -> bool:
        """Whether the page's content must stay: several sequences use it, or it is registered."""
        return self._users[page] > 1 or self._digest_of[page] is not None

    def release(self, page: int) -> None:
        """Remove a user. After the last one a registered page is idle, any other page is free."""
        self._users[page] -= 1
        if self._users[page] == 0:
            if self._digest_of[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def copy_shared(self, page: int) -> int:
        """Replace one use of a shared page by a private copy, and return the copy."""
        copy = self.allocate()
        self._copy(page, copy)
        self.release(page)
        return copy

    def register(self, page: int, digest: bytes) -> None:
        """Register a full page that is in use, so that others can find it. The first page of a digest stays."""
        if digest not in self._page_of and self._digest_of[page] is None:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def unregister(self, page: int) -> None:
        """Forget the page's digest, if it has one, before its content changes. It has at most one user."""
        digest = self._digest_of[page]
        if digest is not None:
            del self._page_of[digest]
            self._digest_of[page] = None

    def find_prefix(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the longest registered prefix of `digests`. They get no new user."""
        found = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def count_idle(self, pages: Sequence[int]) -> int:
        """How many of `pages` are idle. Sharing those reduces `available`."""
        return sum(self._users[page] == 0 for page in pages)

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent. For tests: it looks at all pages."""
        free, every = set(self._free), range(self.total)
        used, registered = set(compress(every, self._users)), set(compress(every, self._digest_of))
        assert min(self._users, default=0) >= 0, "a page was released too often"
        assert len(free) == len(self._free), "a page is free twice"
        idle = self._idle.keys()
        assert free.isdisjoint(idle) and free.isdisjoint(used) and used.isdisjoint(idle), "a page is in two states"
        assert len(free) + len(idle) + len(used) == self.total, "a page is lost"
        assert free.isdisjoint(registered), "a free page has a digest"
        assert {self._digest_of[page]: page for page in registered} == self._page_of, "digests and pages disagree"
        assert len(registered) == len(self._page_of), "two pages have the same digest"
        assert idle <= registered, "an idle page has no digest"
