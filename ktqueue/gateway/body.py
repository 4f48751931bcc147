"""A request's JSON body: read in pieces with a limit, decoded, never held when it is too large."""

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from ktqueue.gateway.content_encoding import check_encoding, decode_content
from ktqueue.gateway.faults import UnsupportedMediaType
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.large_bodies import decode_object
from ktqueue.gateway.uploads import too_large

Parsed = TypeVar("Parsed")


async def read_body(request: Request, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    """The body as JSON, made by `parse` what it stands for, within the limits of the gateway's settings.

    A body without a model asks for the only one that is served.

    Raises UnsupportedMediaType, RequestTooLarge (as soon as it is known), MalformedBody (also for broken
    UTF-8, NaN and nesting beyond any use), and what `Uploads.read` and `parse` raise.
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
        raise too_large(int(announced), settings.max_body_bytes)
    async with gateway.uploads.read(request) as data:
        size = len(data) if encoding == "identity" else settings.max_body_bytes  # as large as it may become
        plain = await gateway.large_bodies.run(size, decode_content, bytes(data), encoding, settings.max_body_bytes)
        value = await gateway.large_bodies.run(len(plain), decode_object, plain)
    if value.get("model") is None:
        value["model"] = await gateway.broker.models.only_name()
    return await gateway.large_bodies.run(len(plain), parse, value)


def _hint(content_type: str) -> str:
    form = content_type.partition(";")[0].strip().lower() == "application/x-www-form-urlencoded"
    return ": curl -d sends this unless told otherwise with -H 'content-type: application/json'" if form else ""


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
