"""Calls that run at the same time, a limited number of them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def map_concurrently(
    call: Callable[[Item], Awaitable[Result]], items: Sequence[Item], at_once: int
) -> list[Result]:
    """The results of `call` for all items, in their order. At most `at_once` calls run at the same time.

    Raises what a call raises, once no other call runs.
    """
    results: list[Result] = []
    for start in range(0, len(items), at_once):
        for result in await asyncio.gather(*map(call, items[start : start + at_once]), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
    return results
