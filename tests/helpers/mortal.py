"""Objects that die at one of their calls, as the process of a batch's owner does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any


class Death(BaseException):
    """The process is killed."""


class Mortal:
    """Stands before an object and dies at one of its calls, just before or just after the call.

    Afterwards nothing is called any more. All parts of an owner share one `life`, a list with the calls that are left.
    A call with the name `last` is the last one in any case.
    """

    def __init__(self, target: Any, life: list[float], last: str = "") -> None:
        self._target = target
        self._life = life
        self._last = last

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name in ("batches", "jobs", "journal", "models", "files"):
            return Mortal(value, self._life, self._last)
        if name == "create":
            return self._create
        if not asyncio.iscoroutinefunction(value):
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            if name == self._last:
                self._life[0] = 1
            self._step()
            result = await value(*args, **kwargs)
            self._step()
            return result

        return call

    @contextlib.asynccontextmanager
    async def _create(self, name: str) -> AsyncIterator[Any]:
        self._step()
        async with self._target.create(name) as writing:
            yield writing
            self._step()
        self._step()

    def _step(self) -> None:
        self._life[0] -= 1
        if self._life[0] <= 0:
            raise Death
