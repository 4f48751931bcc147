"""Compressed request bodies, decoded within the limit that holds for plain ones."""

import zlib

from ktqueue.core.errors import RequestTooLarge
from ktqueue.core.units import format_bytes
from ktqueue.gateway.faults import MalformedBody, UnsupportedMediaType

ACCEPTED = "gzip, deflate, identity"
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS  # zlib's names for the three forms


def check_encoding(encoding: str) -> str:
    """The one `Content-Encoding` of a request, in small letters. Raises UnsupportedMediaType."""
    name = encoding.strip().lower() or "identity"
    if name not in ("gzip", "x-gzip", "deflate", "identity"):
        raise UnsupportedMediaType(
            f"content-encoding must be one of {ACCEPTED}, got {encoding[:80]!r}",
            param="content-encoding",
            limit=ACCEPTED,
            value=encoding[:80],
        )
    return name


def decode_content(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The plain body. Raises RequestTooLarge as soon as it is longer than `max_bytes`, MalformedBody."""
    if encoding == "identity":
        return body
    form = _GZIP
    if encoding == "deflate":  # the standard's has zlib's header, and some clients leave that out
        form = _ZLIB if len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0 else _RAW
    plain = bytearray()
    rest = body
    try:
        while rest:  # gzip may have several members
            decoder = zlib.decompressobj(form)
            plain += decoder.decompress(rest, max_bytes + 1 - len(plain))
            if len(plain) > max_bytes:
                raise RequestTooLarge(
                    f"the decoded body must be at most {max_bytes} bytes ({format_bytes(max_bytes)})",
                    param="body",
                    limit=max_bytes,
                    value=len(plain),
                )
            if not decoder.eof:
                raise zlib.error("it ends too early")
            rest = decoder.unused_data
    except zlib.error as error:
        raise MalformedBody(f"the body is not {encoding}: {error}", param="content-encoding", limit=encoding) from error
    return bytes(plain)
