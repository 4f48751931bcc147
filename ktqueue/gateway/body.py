"""A request's JSON body: read in pieces with a limit, decoded, never held when it is too large."""

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ktqueue.core.codec import CodecError, loads
from ktqueue.core.errors import RequestTooLarge
from ktqueue.core.units import format_bytes
from ktqueue.gateway.faults import ClientGone, MalformedBody, SlowBody, UnsupportedMediaType


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object, within the limits of the gateway's settings.

    Raises UnsupportedMediaType, RequestTooLarge (as soon as it is known), MalformedBody (also for broken
    UTF-8, NaN and nesting beyond any use), SlowBody, ClientGone.
    """
    settings = request.app.state.gateway.config.gateway
    content_type = request.headers.get("content-type")
    if content_type is not None and not _is_json(content_type):
        raise UnsupportedMediaType(
            f"content-type must be application/json, got {content_type[:80]!r}",
            param="content-type",
            limit="application/json",
            value=content_type[:80],
        )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > settings.max_body_bytes:
        raise _too_large(int(announced), settings.max_body_bytes)
    data = await _read(request, settings.max_body_bytes, settings.stall_seconds)
    try:
        value = loads(bytes(data))
    except CodecError as error:
        raise MalformedBody(f"the body is {error.message}", param="body", limit="a JSON object in UTF-8") from error
    if not isinstance(value, dict):
        raise MalformedBody(
            f"the body must be a JSON object, got {type(value).__name__}", param="body", limit="a JSON object in UTF-8"
        )
    return value


async def _read(request: Request, max_bytes: int, stall_seconds: float) -> bytearray:
    data = bytearray()
    pieces = request.stream()
    while True:
        try:
            async with asyncio.timeout(stall_seconds):
                piece = await anext(pieces, None)
        except TimeoutError:
            raise SlowBody(
                f"no more of the body came within {stall_seconds:g} seconds",
                param="body",
                limit=stall_seconds,
                value=len(data),
            ) from None
        except ClientDisconnect as error:
            raise ClientGone("the client left while sending its body") from error
        if piece is None:
            return data
        data += piece
        if len(data) > max_bytes:
            raise _too_large(len(data), max_bytes)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _too_large(size: int, max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the body must be at most {max_bytes} bytes ({format_bytes(max_bytes)}), got {size} or more",
        param="body",
        limit=max_bytes,
        value=size,
    )
