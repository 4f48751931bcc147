"""Reads and checks the grammars of requests beside the event loop, so that no other request waits for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ktqueue.answers.grammar_process import GrammarProcesses

THREADS = 2

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class GrammarChecks:
    """Threads for bodies with constraints, and processes with limits that compile their grammars."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
        self._processes = GrammarProcesses()

    async def run(self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call `work` in a thread. Raises what `work` raises."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args, **kwargs))

    async def check(self, grammar: str | None, param: str) -> None:
        """Raise InvalidRequest for the field `param` if its grammar takes too long to compile.

        A grammar that is known costs nothing.
        """
        if grammar is None:
            return
        if self._processes.known(grammar):
            self._processes.check(grammar, param)
        else:
            await self.run(self._processes.check, grammar, param)

    def close(self) -> None:
        """End the threads and processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()
