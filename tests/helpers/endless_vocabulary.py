"""NoEnd: the vocabulary of an engine's tests that look at token ids only."""


class NoEnd:
    """A vocabulary of `size` tokens without an end token; texts don't matter."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, size: int) -> None:
        self.size = size

    def token_bytes(self, token_id: int) -> bytes:
        """A point, whatever the token."""
        return b"."

    special_token_bytes = token_bytes
