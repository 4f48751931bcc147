"""The little that the engine must know of a tokenizer."""

from typing import Protocol


class Vocabulary(Protocol):
    """Token ids to bytes. Ids run from 0 to `size` - 1."""

    @property
    def size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a choice unless `ignore_eos`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes (perhaps part of a character) that a token adds; empty for a special token."""
        ...
