"""Large bodies are decoded and checked by a thread, one after the other, so that the event loop goes on meanwhile.

Each call into C that the thread makes takes some hundredths of a second at most; between them the loop has its turn.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from ktqueue.core.codec import CodecError, loads
from ktqueue.gateway.faults import MalformedBody
from ktqueue.gateway.json_structure import check_structure

LARGE = 128 << 10  # bytes; what is smaller takes a few milliseconds
_EXPECTED = "a JSON object in UTF-8"

Given = ParamSpec("Given")
Result = TypeVar("Result")


class LargeBodies:
    """The thread of one gateway."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large bodies")

    async def run(self, size: int, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """`work(...)` on a body of `size` bytes: here, or in the thread if it is large. Raises what `work` raises."""
        if size <= LARGE:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def decode_object(body: bytes) -> dict[str, Any]:
    """A body as a JSON object. Raises MalformedBody."""
    check_structure(body)
    try:
        value = loads(body)
    except CodecError as error:
        raise MalformedBody(f"the body is {error.message}", param="body", limit=_EXPECTED) from error
    if not isinstance(value, dict):
        raise MalformedBody(
            f"the body must be a JSON object, got {type(value).__name__}", param="body", limit=_EXPECTED
        )
    return value
