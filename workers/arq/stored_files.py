"""Retention of the store: deletes files whose life is over, and objects that belong to nothing.

A gateway that dies between storing an upload and adding its record leaves an object without a record. Objects younger
than a day are left alone, since their record may be on its way. All are, if the store has the name of another
installation: their records are in another Redis, or this one was emptied.
"""

import contextlib
import logging
from collections.abc import Mapping

from ktqueue.broker.broker import Broker
from ktqueue.broker.files import content_name
from ktqueue.core.errors import FileInUse, FileNotFound, Unavailable
from ktqueue.storage.store import NotStored, Store

ORPHAN_SECONDS = 86_400.0
EXPIRED_AT_ONCE = 500
INSTALLATION = "installation"  # an object with the name of the installation whose store it is

log = logging.getLogger(__name__)


async def purge_store(broker: Broker, store: Store, orphan_seconds: float = ORPHAN_SECONDS) -> int:
    """Delete what nobody can use any more. Returns the number of objects. What fails now is deleted the next time."""
    deleted = 0
    try:
        deleted += await _delete_expired(broker, store)
        records = {name: f"file:{name.split('/')[1]}" for name in await store.names("files/")}
        records |= {name: f"batch:{name.split('/')[1]}" for name in await store.names("batches/")}
        if records and await _is_ours(broker, store):
            deleted += await _delete_orphans(broker, store, records, orphan_seconds)
        await store.sweep()
    except Unavailable as error:
        log.warning("old files are deleted later: %s", error.message)
    if deleted:
        log.info("%d old files were deleted from the store", deleted)
    return deleted


async def _is_ours(broker: Broker, store: Store) -> bool:
    """Whether the store belongs to the installation of this Redis. A store without a name gets ours."""
    found = ""
    with contextlib.suppress(NotStored):
        async with contextlib.aclosing(store.read(INSTALLATION)) as parts:
            found = b"".join([part async for part in parts]).decode(errors="replace")
    name = await broker.files.store_owner(found)
    if not found:
        async with store.create(INSTALLATION) as writing:
            await writing.write(name.encode())
        return True
    if name != found:
        log.error(
            "objects without a record are kept: the store is that of another installation, or Redis was emptied; "
            "if it is yours alone, delete the object %r in it",
            INSTALLATION,
        )
    return name == found


async def _delete_expired(broker: Broker, store: Store) -> int:
    deleted = 0
    while expired := await broker.files.expired(EXPIRED_AT_ONCE):
        for file_id, tenant in expired:
            try:
                await broker.files.delete(tenant, file_id)
            except FileNotFound:  # another control worker was faster
                pass
            except FileInUse:  # a batch was created meanwhile
                continue
            await store.delete(content_name(file_id))
        deleted += len(expired)
    return deleted


async def _delete_orphans(broker: Broker, store: Store, records: Mapping[str, str], seconds: float) -> int:
    """Delete old objects whose record is missing. `records`: its name for each object."""
    missing = set(await broker.files.missing(sorted(set(records.values()))))
    deleted = 0
    for name, record in records.items():
        if record in missing:
            with contextlib.suppress(NotStored):
                if await store.age(name) >= seconds:
                    await store.delete(name)
                    deleted += 1
    return deleted
