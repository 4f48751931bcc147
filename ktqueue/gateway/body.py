"""A request's JSON body: read in pieces with a limit, decoded, never held when it is too large."""

from typing import Any

from starlette.requests import Request

from ktqueue.core.codec import CodecError, loads
from ktqueue.gateway.faults import MalformedBody, UnsupportedMediaType
from ktqueue.gateway.uploads import too_large


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object, within the limits of the gateway's settings.

    Raises UnsupportedMediaType, RequestTooLarge (as soon as it is known), MalformedBody (also for broken
    UTF-8, NaN and nesting beyond any use), and what `Uploads.read` raises.
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
        raise too_large(int(announced), settings.max_body_bytes)
    async with request.app.state.gateway.uploads.read(request) as data:
        try:
            value = loads(bytes(data))
        except CodecError as error:
            raise MalformedBody(f"the body is {error.message}", param="body", limit="a JSON object in UTF-8") from error
    if not isinstance(value, dict):
        raise MalformedBody(
            f"the body must be a JSON object, got {type(value).__name__}", param="body", limit="a JSON object in UTF-8"
        )
    return value


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
