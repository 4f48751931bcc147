"""Server-sent events: frames, and the response that writes them for as long as there is a reader.

A write that a client does not take within `stall_seconds` ends the stream. Heartbeats are comments,
which every reader of the format ignores. Knows nothing of jobs.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ktqueue.core.codec import dumps
from ktqueue.core.errors import KtqueueError
from ktqueue.gateway.faults import ClientGone, InternalError, error_body
from ktqueue.gateway.feed import Feed

logger = logging.getLogger(__name__)

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def frame(value: Any, *, event_id: int | str | None = None) -> bytes:
    """One event with JSON data, and its `id:` where it has one."""
    head = b"" if event_id is None else f"id: {event_id}\n".encode()
    return b"%bdata: %b\n\n" % (head, dumps(value))


def error_frame(error: KtqueueError) -> bytes:
    """An error after the status line was sent."""
    return frame(error_body(error.info()))


class EventStream(Response):
    """Writes what `frames` yields. `frames` raises KtqueueError to end the stream with an error frame,
    ClientGone to end it without one; `finished` is called once, however the stream ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        stall_seconds: float,
        finished: Callable[[], None],
        headers: dict[str, str],
    ) -> None:
        # no-transform and X-Accel-Buffering keep proxies from holding frames back.
        super().__init__(headers={"cache-control": "no-cache, no-transform", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._frames = frames
        self._stall_seconds = stall_seconds
        self._finished = finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        try:
            # A task of its own: each wake-up would go through all layers of the application otherwise.
            await asyncio.create_task(self._stream(scope, send), name=f"stream {scope['path']}")
        finally:
            self._finished()

    async def _stream(self, scope: Scope, send: Send) -> None:
        try:
            async with _Patience(self._stall_seconds) as patience:
                await self._answer(scope, send, patience)
        except TimeoutError:
            # Left unfinished, so that the server closes the connection.
            logger.warning("a client took nothing for %g seconds; its stream was dropped", self._stall_seconds)

    async def _answer(self, scope: Scope, send: Send, patience: "_Patience") -> None:
        async def write(data: bytes) -> None:
            patience.begin()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            patience.end()

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with aclosing(self._frames):
                async for data in self._frames:
                    await write(data)
        except ClientGone:
            return
        except KtqueueError as error:
            await write(error_frame(error))
        except Exception:
            logger.exception("a stream of %s broke", scope["path"])
            await write(error_frame(InternalError("the gateway made a mistake; its log knows more")))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Patience:
    """Ends its block with TimeoutError once a single write has taken `seconds`.

    It looks a few times in that time whether one is under way, since a time limit set for each write would cost more
    than the write.
    """

    LOOKS = 4

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._limit = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A write begins."""
        self._began = self._loop.time()

    def end(self) -> None:
        """It is over."""
        self._began = None

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, fault, trace)

    def _look(self) -> None:
        now = self._loop.time()
        if self._began is not None and now - self._began >= self._seconds:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._seconds / self.LOOKS, self._look)


async def watch(receive: Receive, feed: Feed) -> None:
    """Interrupt `feed` when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    feed.interrupt(ClientGone("the client closed the connection"))
