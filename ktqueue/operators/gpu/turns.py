"""Work that waits for somebody else now and then, so that other work can go on meanwhile."""

from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Turns = Generator[None, None, T]
"""Yields where it would wait; returns T."""


def take_turns(works: Iterable[Turns[T]]) -> list[T]:
    """Let each go on to where it would wait, one after the other, until all have ended; what they return."""
    results: dict[int, T] = {}
    waiting = dict(enumerate(works))
    while waiting:
        for number, work in list(waiting.items()):
            try:
                next(work)
            except StopIteration as end:
                results[number] = end.value
                del waiting[number]
    return [results[number] for number in sorted(results)]
