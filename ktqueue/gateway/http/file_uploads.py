"""Receives the bodies of uploads, which go to the store part by part: each at a minimum rate, and a limited number.

They may be far larger than other bodies, and no more than a part of each is in memory.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Message

from ktqueue.core.config import StorageConfig
from ktqueue.gateway.errors import ClientGone, RequestTimeout, TooManyUploads
from ktqueue.gateway.http.upload_form import FORM_BYTES, file_too_large
from ktqueue.gateway.http.uploads import GRACE_SECONDS

RETRY_SECONDS = 10.0  # after which a client that found no room may try again


@dataclass(slots=True, eq=False)
class _FileUpload:
    caller: tuple[str, str]
    timer: asyncio.Timeout | None = None  # while the client is waited for
    dropped: bool = False  # to make room for another caller


class FileUploads:
    """All uploads that the gateway is receiving. `stall_seconds`: the longest pause of a client."""

    def __init__(self, settings: StorageConfig, stall_seconds: float) -> None:
        self.grace_seconds = GRACE_SECONDS  # before the minimum rate applies
        self._settings = settings
        self._stall_seconds = stall_seconds
        self._open: set[_FileUpload] = set()
        self._turn = asyncio.Lock()  # first come, first served

    def __len__(self) -> int:
        """The number of uploads."""
        return len(self._open)

    async def receive(self, request: Request, caller: tuple[str, str]) -> AsyncGenerator[bytes, None]:
        """The parts of the body. `caller`: who sends it; callers share the uploads evenly if there are too many.

        Only the time in which the client is waited for counts, not that in which the parts are stored.

        Raises TooManyUploads, RequestTooLarge, RequestTimeout, ClientGone.
        """
        upload = self._enter(caller)
        limit = self._settings.max_file_bytes
        size, waited, more = 0, 0.0, True
        clock = asyncio.get_running_loop().time
        try:
            while more:
                began = clock()
                message = await self._next(request, upload, size, waited)
                waited += clock() - began
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client left while sending its file")
                more = message.get("more_body", False)
                size += len(message["body"])
                if size > limit + FORM_BYTES:
                    raise file_too_large(size, limit)
                yield message["body"]
                async with self._turn:
                    await asyncio.sleep(0)  # lets the event loop serve all others once
        finally:
            self._open.discard(upload)

    async def _next(self, request: Request, upload: _FileUpload, size: int, waited: float) -> Message:
        rate = self._settings.min_upload_rate
        seconds = min(self._stall_seconds, self.grace_seconds + size / rate - waited)
        try:
            async with asyncio.timeout(0 if upload.dropped else seconds) as upload.timer:
                return await request.receive()
        except TimeoutError:
            if upload.dropped:
                raise self._no_room() from None
            raise RequestTimeout(
                f"the file came too slowly: it must come at an average of {rate} bytes per second or more, never "
                f"pausing for {self._stall_seconds:g} seconds",
                param="file",
                limit=rate,
                value=size,
            ) from None
        finally:
            upload.timer = None

    def _enter(self, caller: tuple[str, str]) -> _FileUpload:
        """Count a new upload. If there are too many, one of the caller with the most is dropped for it."""
        upload = _FileUpload(caller)
        present = [other for other in self._open if not other.dropped]
        if len(present) >= self._settings.max_uploads:
            counts = Counter(other.caller for other in present)
            most, count = counts.most_common(1)[0]
            if count <= counts[caller] + 1:
                raise self._no_room()
            victim = next(other for other in present if other.caller == most)
            victim.dropped = True
            if victim.timer is not None:
                victim.timer.reschedule(0)
        self._open.add(upload)
        return upload

    def _no_room(self) -> TooManyUploads:
        limit = self._settings.max_uploads
        return TooManyUploads(
            f"this gateway receives at most {limit} files at once (storage.max_uploads)",
            limit=limit,
            value=len(self._open),
            retry_after=RETRY_SECONDS,
        )
