"""Repeats calls while Redis or the store cannot be used: a batch waits for them, however long that takes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ktqueue.core.errors import Unavailable

RETRY_SECONDS = 1.0

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Patience:
    """The patience of what is called `name` in the log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reason = ""  # why it waits

    async def call(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """The result of `call`, which is repeated while it raises Unavailable."""
        while True:
            try:
                result = await call()
            except Unavailable as error:
                await self.wait(error)
            else:
                self._reason = ""
                return result

    async def wait(self, error: Unavailable) -> None:
        """Log why it waits, and wait for a moment."""
        self.log(error)
        await asyncio.sleep(RETRY_SECONDS)

    def log(self, error: Unavailable) -> None:
        """Log why it waits, once for each reason."""
        if (reason := str(error)) != self._reason:
            log.warning("%s waits: %s", self._name, reason)
        self._reason = reason
