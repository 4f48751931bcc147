"""The response that writes a stream until it ends or the client leaves.

`LimitedProtocol` disconnects a client that does not read, which ends its stream. It knows no jobs.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ktqueue.core.errors import KtqueueError
from ktqueue.gateway.errors import ClientGone, InternalError
from ktqueue.openai.stream_format import EVENTS, StreamFormat

logger = logging.getLogger(__name__)


class EventStream(Response):
    """Writes what `frames` yields. If `frames` raises KtqueueError, the stream ends with an error frame, unless it is
    ClientGone. `finished` is called once, however the stream ends."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        finished: Callable[[], None],
        headers: dict[str, str],
        stream_format: StreamFormat = EVENTS,
    ) -> None:
        # no-transform and X-Accel-Buffering stop proxies from buffering frames.
        super().__init__(
            media_type=stream_format.media_type,
            headers={"cache-control": "no-cache, no-transform", "x-accel-buffering": "no", **headers},
        )
        del self.headers["content-length"]
        self._frames = frames
        self._finished = finished
        self._format = stream_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        try:
            # A separate task, since each wake-up would otherwise go through all layers of the application.
            await asyncio.create_task(self._answer(scope, send), name=f"stream {scope['path']}")
        finally:
            self._finished()

    async def _answer(self, scope: Scope, send: Send) -> None:
        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with aclosing(self._frames):
                async for data in self._frames:
                    await write(data)
        except ClientGone:
            return
        except KtqueueError as error:
            await write(self._format.error(error.info()))
        except Exception:
            logger.exception("a stream of %s failed", scope["path"])
            failure = InternalError("an unexpected error in the gateway; its log has the details")
            await write(self._format.error(failure.info()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def watch_disconnect(receive: Receive, interrupt: Callable[[KtqueueError], None]) -> None:
    """Call `interrupt` with ClientGone when the client has left. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
    interrupt(ClientGone("the client closed the connection"))
