"""Reads the JSON body of a request within its limits. Large bodies are decoded by a thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from ktqueue.core.config import GatewayConfig
from ktqueue.gateway.errors import UnsupportedMediaType
from ktqueue.gateway.http.body_decoding import check_encoding, decode_content, decode_object
from ktqueue.gateway.http.headers import check_origin
from ktqueue.gateway.http.uploads import Uploads, too_large

# aiohttp calls bytes an octet-stream, as LiteLLM does with Ollama's form. A web page may send none of these to another
# origin without a preflight, in contrast to text/plain, forms and bodies without a type.
JSON_TYPES = ("application/json", "application/octet-stream")
FORM = "application/x-www-form-urlencoded"  # curl -d calls JSON so, and all examples of Ollama's API rely on that
LARGE = 128 << 10  # bytes; a smaller body takes a few milliseconds

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A decoded body. `size`: bytes of its JSON."""

    value: dict[str, Any]
    size: int


class BodyReader:
    """Reads all bodies of one gateway. A large one is handled by a thread, one after the other."""

    def __init__(self, settings: GatewayConfig) -> None:
        self.uploads = Uploads(settings)
        self._max_bytes = settings.max_body_bytes
        self._cors_origins = settings.cors_origins
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large bodies")

    async def read(self, request: Request) -> JsonBody:
        """The request's body as a JSON object.

        Raises UnsupportedMediaType, PermissionDenied (of a foreign page), RequestTooLarge (as soon as it is known),
        MalformedBody (also for broken UTF-8, NaN and nesting that is too deep for the parser), and what `Uploads.read`
        raises.
        """
        self._check_media_type(request)
        encoding = check_encoding(request.headers.get("content-encoding", ""))
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise too_large(int(announced), self._max_bytes)
        async with self.uploads.read(request) as data:
            size = len(data) if encoding == "identity" else self._max_bytes  # the largest that it may become
            plain = await self.run(size, decode_content, bytes(data), encoding, self._max_bytes)
            return JsonBody(await self.run(len(plain), decode_object, plain), len(plain))

    async def run(
        self, size: int, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call `work` on a body of `size` bytes: in the thread if it is large. Raises what `work` raises."""
        if size <= LARGE:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check_media_type(self, request: Request) -> None:
        content_type = request.headers.get("content-type")
        kind = (content_type or "").partition(";")[0].strip().lower()
        if content_type is None or (kind == FORM and request.url.path.startswith("/api/")):
            check_origin(request.headers, self._cors_origins, "send JSON without its content type")
            return
        if kind in JSON_TYPES or (kind.startswith("application/") and kind.endswith("+json")):
            return
        hint = ": curl -d sends this unless told otherwise with -H 'content-type: application/json'"
        raise UnsupportedMediaType(
            f"content-type must be application/json, got {content_type[:80]!r}{hint if kind == FORM else ''}",
            param="content-type",
            limit="application/json",
            value=content_type[:80],
        )
