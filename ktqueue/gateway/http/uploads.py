"""Reads request bodies: each within a time limit and at a minimum rate, all together within a memory limit."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from ktqueue.core.config import GatewayConfig
from ktqueue.core.errors import RequestTooLarge
from ktqueue.core.units import format_bytes
from ktqueue.gateway.errors import ClientGone, RequestTimeout, TooManyBodyBytes

GRACE_SECONDS = 5.0
KEPT_SHARE = 7 / 8  # of the limit for all bodies: what may remain after some were dropped
SMALL_BYTES = 32 << 10  # longer bodies take turns, one part at a time, so that they do not delay small ones


@dataclass(slots=True, eq=False)
class _Upload:
    timer: asyncio.Timeout
    data: bytearray = field(default_factory=bytearray)
    complete: bool = False
    dropped: bool = False  # to make room for others


class Uploads:
    """All bodies that the gateway is reading."""

    def __init__(self, settings: GatewayConfig) -> None:
        self.grace_seconds = GRACE_SECONDS  # before the minimum rate applies
        self._settings = settings
        self._open: set[_Upload] = set()
        self.held_bytes = 0  # of all bodies that are being read
        self._turn = asyncio.Lock()  # first come, first served

    def __len__(self) -> int:
        """The number of bodies that are being read."""
        return len(self._open)

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncGenerator[bytearray, None]:
        """The whole body. Its bytes count as held until the end of the block.

        Raises RequestTooLarge, RequestTimeout, TooManyBodyBytes, ClientGone.
        """
        upload = _Upload(asyncio.timeout(self._settings.stall_seconds))
        self._open.add(upload)
        try:
            try:
                async with upload.timer:
                    await self._receive(request, upload)
            except TimeoutError:
                raise self._error_of(upload) from None
            upload.complete = True
            yield upload.data
        finally:
            self._open.discard(upload)
            self.held_bytes -= len(upload.data)
            upload.data = bytearray()  # else the traceback of an error would keep it

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
            self.held_bytes += len(message["body"])
            del message  # else a waiting request would keep a second copy
            if len(upload.data) > self._settings.max_body_bytes:
                raise too_large(len(upload.data), self._settings.max_body_bytes)
            if self.held_bytes > self._settings.max_bodies_bytes:
                self._drop_largest()
            if not upload.dropped:
                self._set_deadline(upload, began, clock())
            if more and len(upload.data) > SMALL_BYTES:
                async with self._turn:
                    await asyncio.sleep(0)  # lets the event loop serve all others once

    def _set_deadline(self, upload: _Upload, began: float, now: float) -> None:
        settings = self._settings
        upload.timer.reschedule(
            min(
                now + settings.stall_seconds,
                began + settings.body_timeout,
                began + self.grace_seconds + len(upload.data) / settings.min_body_rate,
            )
        )

    def _drop_largest(self) -> None:
        """Drop the largest unfinished bodies, so that small ones are never refused because of them.

        It drops several at once, since sorting all of them takes time.
        """
        waiting = [
            upload for upload in self._open if not upload.complete and not upload.dropped and not upload.timer.expired()
        ]
        for upload in sorted(waiting, key=lambda candidate: len(candidate.data), reverse=True):
            if self.held_bytes <= KEPT_SHARE * self._settings.max_bodies_bytes:
                break
            upload.dropped = True
            self.held_bytes -= len(upload.data)
            upload.data = bytearray()
            upload.timer.reschedule(0)

    def _error_of(self, upload: _Upload) -> RequestTimeout | TooManyBodyBytes:
        settings = self._settings
        if upload.dropped:
            limit = settings.max_bodies_bytes
            return TooManyBodyBytes(
                f"the bodies that are being read have more than {limit} bytes ({format_bytes(limit)}) together, "
                "and this one was among the largest",
                param="body",
                limit=limit,
            )
        return RequestTimeout(
            f"the body came too slowly: it must end within {settings.body_timeout:g} seconds, come at an average of "
            f"{settings.min_body_rate} bytes per second or more, never pausing for {settings.stall_seconds:g} seconds",
            param="body",
            limit=settings.body_timeout,
            value=len(upload.data),
        )


def too_large(size: int, max_bytes: int) -> RequestTooLarge:
    """The error for a body of `size` bytes or more."""
    return RequestTooLarge(
        f"the body must be at most {max_bytes} bytes ({format_bytes(max_bytes)}), got {size} or more",
        param="body",
        limit=max_bytes,
        value=size,
    )
