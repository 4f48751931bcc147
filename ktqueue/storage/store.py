"""What every store of objects promises. An object is some bytes under a name, and is never changed once it is there.

All methods raise Unavailable if the store cannot be used now, such as for want of space, and ValueError for a name that
is not a path of plain words. Names are made by this program, never by a client.
"""

import re
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol

from ktqueue.core.errors import KtqueueError

PART_BYTES = 256 << 10  # read or written at once
THREADS = 64  # of a store, which are its own: those of the event loop also look up names, for Redis too
MAX_NAME = 200

_WORD = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"  # no word begins with a dot
_NAME = re.compile(rf"{_WORD}(/{_WORD})*")


class NotStored(KtqueueError):
    """No object has this name: it was never created, or was deleted."""

    code = "not_stored"
    status = 404


class Writing(Protocol):
    """An object that is being written."""

    @property
    def size(self) -> int:
        """Bytes written so far."""

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises Unavailable."""


class Store(Protocol):
    """Objects by name. Any number of processes and hosts may use the same store at once."""

    def create(self, name: str) -> AbstractAsyncContextManager[Writing]:
        """Create the object, or take the place of an older one.

        It appears whole and durable when the block ends. If the block raises or the process dies, nothing appears.
        """

    def read(self, name: str, start: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """Parts of at most PART_BYTES, from the byte `start`, `length` bytes or up to the end. Raises NotStored.

        An object that is deleted meanwhile is either read to its end, or reading it raises NotStored.
        """

    async def size(self, name: str) -> int:
        """Bytes of the object. Raises NotStored."""

    async def age(self, name: str) -> float:
        """Seconds since the object appeared, by the store's clock. Raises NotStored."""

    async def delete(self, name: str) -> None:
        """Delete the object. An unknown name is no error."""

    async def names(self, prefix: str) -> list[str]:
        """Names of all objects in a folder such as `files/`, sorted. Those being written are not among them.

        Files that others have put there are left out, if no object can have their name.
        """

    async def sweep(self) -> None:
        """Delete what writers that died have left."""


async def read_whole(store: Store, name: str, start: int = 0, length: int | None = None) -> bytes:
    """All that `read` yields, for what is known to be small. Raises NotStored."""
    async with aclosing(store.read(name, start, length)) as parts:
        return b"".join([part async for part in parts])


def is_name(name: str) -> bool:
    """Whether an object can have this name. What others put into the same folder may have other ones."""
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """The name, if it is one. Raises ValueError."""
    if not is_name(name):
        raise ValueError(f"the name of an object must be words of letters, digits and _ . - with /, got {name[:80]!r}")
    return name


def check_prefix(prefix: str) -> str:
    """The folder's name with / at its end, if it is one. Raises ValueError."""
    if not prefix.endswith("/"):
        raise ValueError(f"objects are listed by folder: the prefix must end with /, got {prefix[:80]!r}")
    check_name(prefix[:-1])
    return prefix
