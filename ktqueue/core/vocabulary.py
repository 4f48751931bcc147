"""Vocabulary: the part of a tokenizer that the engine needs."""

from typing import Protocol


class Vocabulary(Protocol):
    """The bytes of each token. Ids run from 0 to `size` - 1."""

    @property
    def size(self) -> int:
        """Number of token ids."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a choice unless `ignore_eos`."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes (perhaps part of a character) of a token; empty for a special token."""

    def special_token_bytes(self, token_id: int) -> bytes:
        """The same, but a special token is spelled out, such as `<|im_end|>`."""
