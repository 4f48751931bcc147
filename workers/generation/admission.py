"""Admission: from a claim to a job that the engine can take: the prompt as token ids, off the event loop.

What is wrong with a request becomes the end of its own job. Knows neither Redis nor the engine.
"""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ktqueue.core.errors import ErrorInfo, InvalidRequest, KtqueueError
from ktqueue.core.request import GenerationRequest

THREADS = 3
LARGE = 64 << 10  # characters; large prompts leave one thread to the others
CHARACTERS_PER_SECOND = 1e6  # about what a tokeniser does

log = logging.getLogger(__name__)


class Refused(KtqueueError):
    """The job cannot run; `reason` goes into its journal."""

    code = "refused"

    def __init__(self, reason: ErrorInfo) -> None:
        super().__init__(reason.message)
        self.reason = reason


def reason_for(error: Exception, job_id: str, doing: str) -> ErrorInfo:
    """What a job's journal says of an exception. One that nobody planned for is logged and told as a 500."""
    if isinstance(error, KtqueueError):
        return error.info()
    log.error("job %s: %s failed", job_id, doing, exc_info=error)
    return ErrorInfo(code="internal_error", message=f"{doing} failed: {type(error).__name__}", status=500)


class Tokeniser:
    """Threads that turn requests into token ids while the engine computes.

    Who waits for a thread is served in the order of arrival time plus expected seconds: a short prompt overtakes long
    ones that have just come, and nobody is overtaken for ever.
    """

    def __init__(self, encode: Callable[[GenerationRequest], list[int]]) -> None:
        self._encode = encode
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")
        self._free = THREADS
        self._large = 0  # threads that are at a large prompt
        self._waiting: list[tuple[float, int, bool, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    async def encode(self, job_id: str, request: GenerationRequest) -> list[int]:
        """The prompt's token ids, at least one. Raises Refused."""
        size = _characters(request)
        await self._turn(size)
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._encode, request)
        work.add_done_callback(lambda done: self._end_turn(done, size > LARGE))
        try:
            ids = await asyncio.shield(work)  # a thread goes on even when nobody waits for it any more
            if not ids:
                raise InvalidRequest("the prompt has no tokens", param="prompt", limit=1, value=0)
        except Exception as error:  # a template is code from outside: it may raise anything
            raise Refused(reason_for(error, job_id, "tokenising")) from error
        return ids

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, size: int) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        rank = loop.time() + size / CHARACTERS_PER_SECOND
        heapq.heappush(self._waiting, (rank, next(self._arrivals), size > LARGE, turn))
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came at the same moment
                self._release(size > LARGE)
            raise

    def _give_turns(self) -> None:
        passed_over = []
        while self._waiting and self._free:
            entry = heapq.heappop(self._waiting)
            _, _, large, turn = entry
            if turn.cancelled():
                continue
            if large and self._large == THREADS - 1:
                passed_over.append(entry)
                continue
            self._free -= 1
            self._large += large
            turn.set_result(None)
        for entry in passed_over:
            heapq.heappush(self._waiting, entry)

    def _end_turn(self, done: asyncio.Future[list[int]], large: bool) -> None:
        if not done.cancelled():
            done.exception()  # seen, also where nobody waited for it
        self._release(large)

    def _release(self, large: bool) -> None:
        self._free += 1
        self._large -= large
        self._give_turns()


def _characters(request: GenerationRequest) -> int:
    """About how many characters the prompt has; token ids cost next to nothing."""
    if request.prompt is not None:
        return len(request.prompt)
    return sum(len(content) for one in request.messages or () if isinstance(content := one.get("content"), str))
