"""A JSON body's structure, counted before it is parsed: a few bytes of text can be a costly tree of objects."""

from ktqueue.gateway.faults import MalformedBody

MAX_PARTS = 100_000  # lists, objects and keys of one body; a prompt is one value, however many token ids it has
SLICE = 256 << 10  # bytes looked at at once, so that other threads run in between


def check_structure(body: bytes) -> None:
    """Raises MalformedBody for a body of more than MAX_PARTS lists, objects and keys. Text inside strings is free."""
    if _marks(body) <= MAX_PARTS:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts, in_string = 0, False
    for start in range(0, len(plain), SLICE):
        pieces = plain[start : start + SLICE].split(b'"')
        parts += _marks(b"".join(pieces[in_string::2]))
        if parts > MAX_PARTS:
            raise MalformedBody(
                f"the body has more than {MAX_PARTS} lists, objects and keys", param="body", limit=MAX_PARTS
            )
        in_string ^= len(pieces) % 2 == 0


def _marks(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")
