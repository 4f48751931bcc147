"""Bytes of a request's body to a JSON object: decompressed within the size limit, its structure counted, then parsed.

Each call into C takes some hundredths of a second at most, so that a thread that runs these functions does not keep the
event loop waiting.
"""

import zlib
from typing import Any

from ktqueue.core.codec import CodecError, loads
from ktqueue.core.errors import RequestTooLarge
from ktqueue.core.short_repr import short_repr
from ktqueue.core.units import format_bytes
from ktqueue.gateway.errors import MalformedBody, UnsupportedMediaType

MAX_PARTS = 100_000  # lists, objects and keys of one body; a prompt is one value, however many token ids it has
SLICE_BYTES = 256 << 10  # scanned in one call, so that other threads can run in between
ENCODINGS = "gzip, deflate, identity"
_EXPECTED = "a JSON object in UTF-8"
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS  # zlib's names for the three forms


def check_encoding(encoding: str) -> str:
    """The `Content-Encoding` of a request in lower case. Only one is allowed. Raises UnsupportedMediaType."""
    name = encoding.strip().lower() or "identity"
    if name not in ("gzip", "x-gzip", "deflate", "identity"):
        raise UnsupportedMediaType.must_be("content-encoding", f"one of {ENCODINGS}", encoding[:80], limit=ENCODINGS)
    return name


def decode_content(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The decompressed body. Raises MalformedBody, and RequestTooLarge as soon as it is longer than `max_bytes`."""
    if encoding == "identity":
        return body
    form = _GZIP
    if encoding == "deflate":  # by the standard it has zlib's header, which some clients leave out
        form = _ZLIB if len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0 else _RAW
    plain = bytearray()
    rest = body
    try:
        while rest:  # a gzip body may have several members
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


def check_structure(body: bytes) -> None:
    """Raise MalformedBody if a body has more than MAX_PARTS lists, objects and keys. Text in strings is not counted.

    A few bytes of JSON can become a large tree of objects, so this runs before the parser.
    """
    if _marks(body) <= MAX_PARTS:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts, in_string = 0, False
    for start in range(0, len(plain), SLICE_BYTES):
        pieces = plain[start : start + SLICE_BYTES].split(b'"')
        parts += _marks(b"".join(pieces[in_string::2]))
        if parts > MAX_PARTS:
            raise MalformedBody(
                f"the body has more than {MAX_PARTS} lists, objects and keys", param="body", limit=MAX_PARTS
            )
        in_string ^= len(pieces) % 2 == 0


def _marks(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")


def decode_object(body: bytes) -> dict[str, Any]:
    """A body as a JSON object. Raises MalformedBody."""
    check_structure(body)
    try:
        value = loads(body)
    except CodecError as error:
        raise MalformedBody(f"the body is {error.message}", param="body", limit=_EXPECTED) from error
    if not isinstance(value, dict):
        shown = short_repr(value)
        raise MalformedBody(f"the body must be {_EXPECTED}, got {shown}", param="body", limit=_EXPECTED, value=shown)
    return value
