"""NoEnd, a vocabulary for engine tests that look only at token ids."""


class NoEnd:
    """A vocabulary of `size` tokens without an end token; its texts do not matter."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, size: int) -> None:
        self.size = size

    def token_bytes(self, token_id: int) -> bytes:
        """Return a full stop for any token."""
        return b"."

    special_token_bytes = token_bytes
