"""Retention of the store: deletes files whose life is over, and objects that belong to nothing.

A gateway that dies between storing an upload and adding its record leaves an object without a record, and so does a
Redis that lost data. Objects younger than a day are left alone, since their record may be on its way.
"""

import contextlib
import logging

from ktqueue.broker.broker import Broker
from ktqueue.broker.files import content_name
from ktqueue.core.errors import FileNotFound, Unavailable
from ktqueue.storage.store import NotStored, Store

ORPHAN_SECONDS = 86_400.0
EXPIRED_AT_ONCE = 500

log = logging.getLogger(__name__)


async def purge_store(broker: Broker, store: Store, orphan_seconds: float = ORPHAN_SECONDS) -> int:
    """Delete what nobody can use any more. Returns the number of objects. What fails now is deleted the next time."""
    deleted = 0
    try:
        deleted += await _delete_expired(broker, store)
        deleted += await _delete_orphans(broker, store, "files/", "file", orphan_seconds)
        deleted += await _delete_orphans(broker, store, "batches/", "batch", orphan_seconds)
        await store.sweep()
    except Unavailable as error:
        log.warning("old files are deleted later: %s", error.message)
    if deleted:
        log.info("%d old files were deleted from the store", deleted)
    return deleted


async def _delete_expired(broker: Broker, store: Store) -> int:
    deleted = 0
    while expired := await broker.files.expired(EXPIRED_AT_ONCE):
        for file_id, tenant in expired:
            with contextlib.suppress(FileNotFound):  # another control worker was faster
                await broker.files.delete(tenant, file_id)
            await store.delete(content_name(file_id))
        deleted += len(expired)
    return deleted


async def _delete_orphans(broker: Broker, store: Store, folder: str, kind: str, seconds: float) -> int:
    """Delete old objects of a folder whose second word is the id of no record of this kind."""
    names = await store.names(folder)
    records = {name: f"{kind}:{name.split('/')[1]}" for name in names}
    missing = set(await broker.files.missing(sorted(set(records.values()))))
    deleted = 0
    for name in names:
        if records[name] in missing:
            with contextlib.suppress(NotStored):
                if await store.age(name) >= seconds:
                    await store.delete(name)
                    deleted += 1
    return deleted
