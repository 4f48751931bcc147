"""Admission: from a claim to a job that the engine can take: the prompt as token ids, off the event loop.

What is wrong with a request becomes the end of its own job. Knows neither Redis nor the engine.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ktqueue.core.errors import ErrorInfo, InvalidRequest, KtqueueError
from ktqueue.core.request import GenerationRequest

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
    """One thread that turns requests into token ids, one after the other, while the engine computes."""

    def __init__(self, encode: Callable[[GenerationRequest], list[int]]) -> None:
        self._encode = encode
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    async def encode(self, job_id: str, request: GenerationRequest) -> list[int]:
        """The prompt's token ids, at least one. Raises Refused."""
        try:
            ids = await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, request)
            if not ids:
                raise InvalidRequest("the prompt has no tokens", param="prompt", limit=1, value=0)
        except Exception as error:  # a template is code from outside: it may raise anything
            raise Refused(reason_for(error, job_id, "tokenising")) from error
        return ids

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)
