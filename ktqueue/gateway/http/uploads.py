"""The request bodies that are being read: each in time and at a least rate, all together within a limit of memory."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from ktqueue.core.config import GatewayConfig
from ktqueue.core.errors import RequestTooLarge
from ktqueue.core.units import format_bytes
from ktqueue.gateway.errors import ClientGone, SlowBody, TooManyBodyBytes

GRACE_SECONDS = 5.0  # before the least rate counts
ROOM = 7 / 8  # of the limit for all bodies: what is left once some were given up
SMALL_BYTES = 32 << 10  # what is longer takes turns, a piece at a time, so that large bodies don't delay small ones


@dataclass(slots=True, eq=False)
class _Upload:
    timer: asyncio.Timeout
    data: bytearray = field(default_factory=bytearray)
    whole: bool = False
    dropped: bool = False  # to make room


class Uploads:
    """All bodies that this gateway reads at the moment."""

    def __init__(self, settings: GatewayConfig) -> None:
        self._settings = settings
        self._open: set[_Upload] = set()
        self._held = 0  # bytes
        self._turns = asyncio.Lock()  # first come, first served

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncGenerator[bytearray, None]:
        """The whole body, whose bytes count until the end of the block.

        Raises RequestTooLarge, SlowBody, TooManyBodyBytes, ClientGone.
        """
        upload = _Upload(asyncio.timeout(self._settings.stall_seconds))
        self._open.add(upload)
        try:
            try:
                async with upload.timer:
                    await self._receive(request, upload)
            except TimeoutError:
                raise self._why(upload) from None
            upload.whole = True
            yield upload.data
        finally:
            self._open.discard(upload)
            self._held -= len(upload.data)
            upload.data = bytearray()  # not to be kept by an error's traceback

    async def _receive(self, request: Request, upload: _Upload) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        self._set_deadline(upload, began, began)
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left while sending its body")
            more = message.get("more_body", False)
            upload.data += message["body"]
            self._held += len(message["body"])
            del message  # a waiting request keeps no second copy
            if len(upload.data) > self._settings.max_body_bytes:
                raise too_large(len(upload.data), self._settings.max_body_bytes)
            if self._held > self._settings.max_bodies_bytes:
                self._drop_largest()
            if not upload.dropped:
                self._set_deadline(upload, began, clock())
            if more and len(upload.data) > SMALL_BYTES:
                async with self._turns:
                    await asyncio.sleep(0)  # lets the loop serve everybody else once

    def _set_deadline(self, upload: _Upload, began: float, now: float) -> None:
        settings = self._settings
        upload.timer.reschedule(
            min(
                now + settings.stall_seconds,
                began + settings.body_timeout,
                began + GRACE_SECONDS + len(upload.data) / settings.min_body_rate,
            )
        )

    def _drop_largest(self) -> None:
        """Give up the unfinished bodies that hold most, several at once since looking at all of them takes time.

        So a small one is never refused for the sake of large ones.
        """
        waiting = [one for one in self._open if not one.whole and not one.dropped and not one.timer.expired()]
        for upload in sorted(waiting, key=lambda one: len(one.data), reverse=True):
            if self._held <= ROOM * self._settings.max_bodies_bytes:
                break
            upload.dropped = True
            self._held -= len(upload.data)
            upload.data = bytearray()
            upload.timer.reschedule(0)

    def _why(self, upload: _Upload) -> SlowBody | TooManyBodyBytes:
        settings = self._settings
        if upload.dropped:
            limit = settings.max_bodies_bytes
            return TooManyBodyBytes(
                f"the bodies that are being read have more than {limit} bytes ({format_bytes(limit)}) together, "
                "and this one was among the largest",
                param="body",
                limit=limit,
            )
        return SlowBody(
            f"the body came too slowly: it must end within {settings.body_timeout:g} seconds, come at an average of "
            f"{settings.min_body_rate} bytes per second or more, never pausing for {settings.stall_seconds:g} seconds",
            param="body",
            limit=settings.body_timeout,
            value=len(upload.data),
        )


def too_large(size: int, max_bytes: int) -> RequestTooLarge:
    """The error of a body of `size` bytes or more."""
    return RequestTooLarge(
        f"the body must be at most {max_bytes} bytes ({format_bytes(max_bytes)}), got {size} or more",
        param="body",
        limit=max_bytes,
        value=size,
    )
