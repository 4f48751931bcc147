"""The part of a body that a client asks for with `Range` (RFC 9110, section 14): one range of bytes."""

import re

from starlette.datastructures import Headers

from ktqueue.gateway.errors import RangeNotSatisfiable

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.IGNORECASE)


def requested_range(headers: Headers, size: int, etag: str) -> range | None:
    """The bytes that are asked for, of a body of `size` bytes with this `ETag`. None for all of them.

    What cannot be understood and several ranges are answered with the whole body, as the RFC allows, and so is a range
    of another version (`If-Range`).

    Raises RangeNotSatisfiable if the body has no such bytes.
    """
    match = _RANGE.fullmatch(headers.get("range", ""))
    if match is None or not any(match.groups()) or headers.get("if-range", etag) != etag:
        return None
    first, last = match.groups()
    if not first:
        found = range(max(0, size - int(last)), size)
    elif last and int(last) < int(first):
        return None
    else:
        found = range(int(first), min(int(last) + 1, size) if last else size)
    if not found:
        raise RangeNotSatisfiable(
            f"the file has {size} bytes, and none of {headers['range'][:80]}",
            param="range",
            limit=size,
            value=headers["range"][:80],
        )
    return found
