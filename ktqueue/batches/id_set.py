"""A set of texts in 16 to 32 bytes each, however long the texts are: the custom_ids of a huge batch file.

It keeps 64-bit hashes in an open-addressing table, so it may take a new text for one it has seen:
once in about 37 million runs over a file of a million lines.
"""

from array import array
from hashlib import blake2b


class IdSet:
    """Texts that were added. Nothing is ever taken out."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * 1024))  # 0: free
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, text: str) -> bool:
        key = _hash(text)
        return self._slots[self._place(key)] == key

    def add(self, text: str) -> bool:
        """Add the text; False if it was there already."""
        key = _hash(text)
        place = self._place(key)
        if self._slots[place] == key:
            return False
        self._slots[place] = key
        self._count += 1
        if 2 * self._count > len(self._slots):
            self._grow()
        return True

    def _place(self, key: int) -> int:
        """The slot that holds the key, or the free one where it belongs."""
        mask = len(self._slots) - 1
        place = key & mask
        while self._slots[place] not in (0, key):
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        keys = self._slots
        self._slots = array("Q", bytes(8 * 2 * len(keys)))
        for key in keys:
            if key:
                self._slots[self._place(key)] = key


def _hash(text: str) -> int:
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
