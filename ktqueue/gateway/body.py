"""A request's JSON body: read in pieces with a limit, decoded, never held when it is too large."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from ktqueue.core.errors import RequestTooLarge
from ktqueue.core.units import format_bytes
from ktqueue.gateway.content_encoding import check_encoding, decode_content
from ktqueue.gateway.faults import ClientGone, SlowBody, UnsupportedMediaType
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.large_bodies import decode_object

Parsed = TypeVar("Parsed")


async def read_body(request: Request, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    """The body as JSON, made by `parse` what it stands for, within the limits of the gateway's settings.

    A body without a model asks for the only one that is served.

    Raises UnsupportedMediaType, RequestTooLarge (as soon as it is known), MalformedBody (also for broken
    UTF-8, NaN and nesting beyond any use), SlowBody, ClientGone, and what `parse` raises.
    """
    gateway: Gateway = request.app.state.gateway
    settings = gateway.config.gateway
    content_type = request.headers.get("content-type")
    if content_type is not None and not _is_json(content_type):
        raise UnsupportedMediaType(
            f"content-type must be application/json, got {content_type[:80]!r}{_hint(content_type)}",
            param="content-type",
            limit="application/json",
            value=content_type[:80],
        )
    encoding = check_encoding(request.headers.get("content-encoding", ""))
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > settings.max_body_bytes:
        raise _too_large(int(announced), settings.max_body_bytes)
    data = await _read(request, settings.max_body_bytes, settings.stall_seconds)
    size = len(data) if encoding == "identity" else settings.max_body_bytes  # as large as it may become
    plain = await gateway.large_bodies.run(size, decode_content, bytes(data), encoding, settings.max_body_bytes)
    value = await gateway.large_bodies.run(len(plain), decode_object, plain)
    if value.get("model") is None:
        value["model"] = await gateway.broker.models.only_name()
    return await gateway.large_bodies.run(len(plain), parse, value)


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


def _hint(content_type: str) -> str:
    form = content_type.partition(";")[0].strip().lower() == "application/x-www-form-urlencoded"
    return ": curl -d sends this unless told otherwise with -H 'content-type: application/json'" if form else ""


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
