"""Pages under random use: counts stay consistent, contents are found again, and no page is lost."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ktqueue.engine.pages import Pages, page_digest


class PagesMachine(RuleBasedStateMachine):
    """Takes, shares, splits, names and releases pages at random. Plain lists are the reference."""

    TOTAL = 7

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[int, int]] = []
        self.pages = Pages(self.TOTAL, lambda source, target: self.copies.append((source, target)))
        self.holds: list[int] = []  # an entry for each user of a page
        self.names: dict[bytes, int] = {}  # digests of pages in use
        self.count = 0

    @rule()
    def take(self) -> None:
        if self.pages.available:
            page = self.pages.allocate()
            assert page not in self.holds
            self.holds.append(page)
        else:
            assert len(set(self.holds)) == self.TOTAL
            with pytest.raises(IndexError):
                self.pages.allocate()

    @rule(which=st.integers(0, 100))
    def share(self, which: int) -> None:
        if self.holds:
            page = self.holds[which % len(self.holds)]
            self.pages.share(page)
            self.holds.append(page)
            assert self.pages.is_shared(page)

    @rule(which=st.integers(0, 100))
    def split(self, which: int) -> None:
        if self.holds and self.pages.available:
            place = which % len(self.holds)
            page = self.holds[place]
            if self.holds.count(page) > 1:
                self.holds[place] = self.pages.copy_shared(page)
                assert self.copies[-1] == (page, self.holds[place])
                assert self.holds.count(self.holds[place]) == 1

    @rule(which=st.integers(0, 100))
    def name(self, which: int) -> None:
        if self.holds:
            page = self.holds[which % len(self.holds)]
            if page not in self.names.values():
                self.count += 1
                digest = self.count.to_bytes(4, "big")
                self.pages.register(page, digest)
                if self.pages.find_prefix([digest]) == [page]:
                    self.names[digest] = page

    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        if self.holds:
            page = self.holds.pop(which % len(self.holds))
            self.pages.release(page)
            if page not in self.holds:
                self.names = {digest: held for digest, held in self.names.items() if held != page}

    @rule(which=st.integers(1, 200))
    def find(self, which: int) -> None:
        for page in self.pages.find_prefix([which.to_bytes(4, "big")]):
            idle = self.pages.count_idle([page])
            before = self.pages.available
            self.pages.share(page)
            assert self.pages.available == before - idle
            assert idle == (page not in self.holds)
            self.holds.append(page)
            self.names[which.to_bytes(4, "big")] = page

    @invariant()
    def books_balance(self) -> None:
        self.pages.check()
        assert self.pages.available == self.TOTAL - len(set(self.holds))
        for digest, page in self.names.items():
            assert self.pages.find_prefix([digest]) == [page], "a page in use lost its digest"


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_idle_page_is_taken_first() -> None:
    pages = Pages(4, lambda source, target: None)
    held = [pages.allocate() for _ in range(4)]
    for i, page in enumerate(held):
        pages.register(page, bytes([i]))
    for i in (2, 0, 3, 1):
        pages.release(held[i])
    pages.share(held[0])  # now it is the most recently used page
    pages.release(held[0])
    assert pages.available == 4
    assert [pages.allocate() for _ in range(4)] == [held[2], held[3], held[1], held[0]]
    assert pages.find_prefix([bytes([0])]) == []


def test_free_pages_are_taken_before_idle_pages() -> None:
    pages = Pages(2, lambda source, target: None)
    named, plain = pages.allocate(), pages.allocate()
    pages.register(named, b"x")
    pages.release(named)
    pages.release(plain)
    assert pages.allocate() == plain
    assert pages.find_prefix([b"x"]) == [named]


def test_the_first_page_with_a_digest_keeps_it() -> None:
    pages = Pages(2, lambda source, target: None)
    first, second = pages.allocate(), pages.allocate()
    pages.register(first, b"x")
    pages.register(second, b"x")
    pages.check()
    assert pages.find_prefix([b"x", b"y"]) == [first]
    pages.release(second)
    assert pages.allocate() == second


def test_find_ends_at_the_first_gap() -> None:
    pages = Pages(3, lambda source, target: None)
    a, b = pages.allocate(), pages.allocate()
    pages.register(a, b"a")
    pages.register(b, b"c")
    assert pages.find_prefix([b"a", b"b", b"c"]) == [a]


def test_a_digest_covers_the_whole_prefix() -> None:
    first, second = np.arange(4, dtype=np.int32), np.arange(4, 8, dtype=np.int32)
    root = page_digest(b"", first)
    assert page_digest(root, second) == page_digest(page_digest(b"", first.copy()), second.copy())
    assert page_digest(root, second) != page_digest(b"", second)
    assert page_digest(page_digest(b"", second), first) != page_digest(root, second)
    assert len(root) == 16
