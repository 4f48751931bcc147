"""Admission: from a claimed job to a prompt of token ids, which threads compute beside the event loop.

An error in a request ends its own job only. Knows neither Redis nor the engine.
"""

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ktqueue.core.errors import ErrorInfo, InvalidRequest, KtqueueError, Unavailable
from ktqueue.core.request import GenerationRequest
from ktqueue.core.thread_names import name_thread
from ktqueue.loading.tokenizer.encoded_prompt import EncodedPrompt

THREADS = 3
LARGE_CHARACTERS = 64 << 10  # longer prompts never occupy all threads
ROOM_SECONDS = 0.1  # between two looks whether there is memory for a grammar
LONGEST_ROOM_WAIT = 30.0  # seconds
CHARACTERS_PER_SECOND = 1e6  # approximate speed of a tokeniser

log = logging.getLogger(__name__)


class AdmissionRefused(KtqueueError):
    """The job cannot run. `reason` goes into its journal."""

    code = "refused"

    def __init__(self, reason: ErrorInfo) -> None:
        super().__init__(reason.message)
        self.reason = reason


class NoGrammarMemory(AdmissionRefused):
    """The grammars of running answers took all memory for too long. Another worker may have some."""


def error_info(error: Exception, job_id: str, activity: str) -> ErrorInfo:
    """Describe an exception for the job's journal. An unexpected exception is logged and described as a status 500."""
    if isinstance(error, KtqueueError):
        return error.info()
    log.error("job %s: %s failed", job_id, activity, exc_info=error)
    return ErrorInfo(code="internal_error", message=f"{activity} failed: {type(error).__name__}", status=500)


class TokeniserThreads:
    """Threads that tokenise requests while the engine computes.

    Requests wait for a thread in the order of arrival time plus expected duration. So a short prompt overtakes long
    prompts that arrived shortly before, and every prompt gets its turn. `encode` returns the prompt of a request.
    """

    def __init__(
        self, encode: Callable[[GenerationRequest], EncodedPrompt], has_room: Callable[[int], bool] = lambda _: True
    ) -> None:
        """`has_room`: whether there is memory for a grammar, beside so many that are being compiled."""
        self._encode = encode
        self._has_room = has_room
        self._grammars = 0  # that wait for a thread or are being compiled
        self._threads = ThreadPoolExecutor(THREADS, "tokenise", name_thread, ("ktq-tokenise",))
        self._free = THREADS
        self._large_running = 0  # threads that tokenise a large prompt
        self._waiting: list[tuple[float, int, bool, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    async def encode(
        self, job_id: str, request: GenerationRequest, began: Callable[[], None] | None = None
    ) -> EncodedPrompt:
        """Return the request's prompt of at least one token. `began` is called once a thread takes it.

        A request with a grammar waits until there is memory for it. Raises AdmissionRefused, and NoGrammarMemory after
        LONGEST_ROOM_WAIT.
        """
        if request.grammar is None:
            return await self._encode_in_thread(job_id, request, began)
        until = time.monotonic() + LONGEST_ROOM_WAIT
        while not self._has_room(self._grammars):  # answers end in the engine's thread
            if time.monotonic() > until:
                message = f"grammars of other answers took all memory for {LONGEST_ROOM_WAIT:g} seconds; try again"
                raise NoGrammarMemory(Unavailable(message, param="grammar").info())
            await asyncio.sleep(ROOM_SECONDS)
        self._grammars += 1
        try:
            return await self._encode_in_thread(job_id, request, began)
        finally:
            self._grammars -= 1

    async def _encode_in_thread(
        self, job_id: str, request: GenerationRequest, began: Callable[[], None] | None
    ) -> EncodedPrompt:
        size = _characters(request)
        is_large = size > LARGE_CHARACTERS
        await self._acquire_thread(size, is_large)
        if began is not None:
            began()
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._encode, request)
        work.add_done_callback(lambda done: self._finish(done, is_large))
        try:
            prompt = await asyncio.shield(work)  # a thread cannot be stopped, so it stays counted until it has finished
            if not prompt.token_ids:
                raise InvalidRequest("the prompt has no tokens", param="prompt", limit=1, value=0)
        except Exception as error:  # a chat template is foreign code and may raise anything
            raise AdmissionRefused(error_info(error, job_id, "tokenising")) from error
        return prompt

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _acquire_thread(self, size: int, is_large: bool) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        rank = loop.time() + size / CHARACTERS_PER_SECOND
        heapq.heappush(self._waiting, (rank, next(self._arrivals), is_large, turn))
        self._assign_threads()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the thread was assigned just before the cancellation
                self._release_thread(is_large)
            raise

    def _assign_threads(self) -> None:
        passed_over = []
        while self._waiting and self._free:
            entry = heapq.heappop(self._waiting)
            _, _, is_large, turn = entry
            if turn.cancelled():
                continue
            if is_large and self._large_running == THREADS - 1:
                passed_over.append(entry)
                continue
            self._free -= 1
            self._large_running += is_large
            turn.set_result(None)
        for entry in passed_over:
            heapq.heappush(self._waiting, entry)

    def _finish(self, done: asyncio.Future[EncodedPrompt], is_large: bool) -> None:
        if not done.cancelled():
            done.exception()  # marks it as retrieved, in case the caller was cancelled
        self._release_thread(is_large)

    def _release_thread(self, is_large: bool) -> None:
        self._free += 1
        self._large_running -= is_large
        self._assign_threads()


def _characters(request: GenerationRequest) -> int:
    """Approximate number of characters of the prompt. Token ids count as none, since they cost next to nothing."""
    if request.prompt is not None:
        return len(request.prompt)
    contents = (message.get("content") for message in request.messages or ())
    return sum(len(content) for content in contents if isinstance(content, str))
