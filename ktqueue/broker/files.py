"""The records of files: whose they are, how large, and until when they are kept. Their bytes are in the store.

A file is first stored, then added; and its record is deleted before its bytes. So a record always has its bytes, and
bytes without a record are deleted by the control worker after a day.
"""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

from ktqueue.broker.scripts import ScriptRefused, Scripts
from ktqueue.broker.terminal_events import microseconds
from ktqueue.core.codec import CodecError, reading
from ktqueue.core.config import StorageConfig
from ktqueue.core.errors import FileInUse, FileLimitReached, FileNotFound, InvalidRequest
from ktqueue.core.tenants import TenantLimits
from ktqueue.core.units import format_bytes

LOOKED_AT = 500  # files that one call of a script looks at
MICROSECONDS = 1_000_000

Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Most files and most bytes in them that a tenant may have."""

    files: int
    bytes: int

    @classmethod
    def of(cls, settings: StorageConfig, tenant: TenantLimits | None) -> Self:
        """The limits of a tenant, or those for everybody."""
        return cls(
            (tenant and tenant.max_files) or settings.max_files,
            (tenant and tenant.max_files_bytes) or settings.max_files_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """A file to add. `size` in bytes; it is kept for `seconds`."""

    id: str
    tenant: str
    filename: str
    purpose: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file. Times in Unix seconds by the server's clock."""

    id: str
    tenant: str
    filename: str
    purpose: str
    size: int
    created_at: float
    expires_at: float


class Files:
    """The files of all tenants. Every call raises Unavailable if Redis does not answer."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def add(self, facts: FileFacts, limits: FileLimits | None) -> FileRecord:
        """Add a file whose bytes are stored. The same id again is the same file, and counts once.

        Without `limits` nothing is refused: what a batch wrote counts, but never fails for want of room.

        Raises FileLimitReached.
        """
        return _decoded(facts.id, await self._add(facts, limits))

    async def check_room(self, tenant: str, size: int, limits: FileLimits) -> None:
        """Raise FileLimitReached if the tenant has no room for one more file of `size` bytes now."""
        await self._add(FileFacts(id="", tenant=tenant, filename="", purpose="", size=size, seconds=0), limits)

    async def _add(self, facts: FileFacts, limits: FileLimits | None) -> Sequence[bytes]:
        try:
            described: Sequence[bytes] = await self._scripts.call(
                "add_file",
                facts.id,
                facts.tenant,
                facts.filename,
                facts.purpose,
                facts.size,
                microseconds(facts.seconds),
                "" if limits is None else limits.files,
                "" if limits is None else limits.bytes,
            )
        except ScriptRefused as refused:
            assert limits is not None
            raise _limit_error(refused, facts.size, limits) from refused
        return described

    async def get(self, tenant: str, file_id: str) -> FileRecord:
        """One file of a tenant. Raises FileNotFound, also for a file of another tenant."""
        described = await self._scripts.call("get_file", file_id, tenant)
        if described is None:
            raise _file_not_found(file_id)
        return _decoded(file_id, described)

    async def list(
        self, tenant: str, *, limit: int, purpose: str | None = None, order: Order = "desc", after: str | None = None
    ) -> tuple[Sequence[FileRecord], bool]:
        """A tenant's files by their arrival, those after the file `after`, and whether there are more.

        `after` may be deleted meanwhile, up to a day ago. Raises InvalidRequest if there was no such file.
        """
        found: list[FileRecord] = []
        begin, place = after or "", ""
        while len(found) <= limit:
            reply = await self._scripts.call("list_files", tenant, purpose or "", order, begin, place, LOOKED_AT)
            if reply is None:
                raise InvalidRequest(f"after must be the id of a file, got {after!r:.80}", param="after", value=after)
            for file_id, described in reply[0]:
                with suppress(CodecError):
                    found.append(_decoded(file_id.decode(), described))
            begin, place = "", reply[1].decode()
            if not place:
                break
        return found[:limit], len(found) > limit

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file's record. Its bytes are to be deleted afterwards. Raises FileNotFound, FileInUse."""
        try:
            is_deleted = await self._scripts.call("delete_file", file_id, tenant)
        except ScriptRefused as refused:
            raise FileInUse(
                f"the file {file_id} is the input of the batch {refused.detail}, which has not ended; "
                "cancel that batch or wait for its end, then delete the file",
                param="file_id",
                limit="a file that no batch reads",
                value=refused.detail,
            ) from refused
        if not is_deleted:
            raise _file_not_found(file_id)

    async def expired(self, limit: int) -> Sequence[tuple[str, str]]:
        """Id and tenant of the files that have expired, the first `limit` of them.

        Inputs of batches that have not ended are not among them, since lines of these are still read.
        """
        return [
            (file_id.decode(), tenant.decode()) for file_id, tenant in await self._scripts.call("expired_files", limit)
        ]

    async def store_owner(self, found: str) -> str:
        """The name of this installation, as its store has it. `found`: the name in the store, or '' if it has none.

        If neither has one, it is made now. '' if only the store has one, which is then that of another installation.
        """
        name: bytes = await self._scripts.call("store_owner", found, secrets.token_hex(12))
        return name.decode()

    async def missing(self, names: Sequence[str]) -> Sequence[str]:
        """Those of the names, such as `file:ID` and `batch:ID`, that have no record."""
        missing: list[str] = []
        for start in range(0, len(names), LOOKED_AT):
            reply = await self._scripts.call("missing_records", *names[start : start + LOOKED_AT])
            missing += [name.decode() for name in reply]
        return missing


def new_file_id() -> str:
    """The id of an uploaded file."""
    return f"file-{secrets.token_hex(12)}"


def content_name(file_id: str) -> str:
    """The name of a file's bytes in the store."""
    return f"files/{file_id}"


def _file_not_found(file_id: str) -> FileNotFound:
    shown = file_id[:80]
    return FileNotFound(
        f"no file {shown!r}: it was never uploaded, was deleted, or has expired", param="file_id", value=shown
    )


def _limit_error(refused: ScriptRefused, size: int, limits: FileLimits) -> Exception:
    match refused.code:
        case "FILES":
            return FileLimitReached(
                f"{refused.detail} files are stored, but at most {limits.files} are allowed; delete some first",
                param="max_files",
                limit=limits.files,
                value=int(refused.detail),
            )
        case "BYTES":
            total = int(refused.detail) + size
            return FileLimitReached(
                f"with this file, all files would have {total} bytes, but at most {limits.bytes} "
                f"({format_bytes(limits.bytes)}) are allowed; delete some first",
                param="max_files_bytes",
                limit=limits.bytes,
                value=total,
            )
    return refused


def _decoded(file_id: str, described: Sequence[bytes]) -> FileRecord:
    fields: Mapping[bytes, bytes] = dict(zip(described[::2], described[1::2], strict=True))
    with reading(f"file {file_id}"):
        return FileRecord(
            id=file_id,
            tenant=fields[b"tenant"].decode(),
            filename=fields[b"filename"].decode(),
            purpose=fields[b"purpose"].decode(),
            size=int(fields[b"size"]),
            created_at=int(fields[b"created"]) / MICROSECONDS,
            expires_at=int(fields[b"expires"]) / MICROSECONDS,
        )
