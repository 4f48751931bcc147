"""Calls the Lua scripts. Every change of shared state is one script.

Every script is idempotent, by job id, claim number or step number. So a call whose reply was lost is sent again.
"""

import asyncio
import hashlib
from importlib import resources
from typing import Any

from ktqueue.broker.keys import Keys
from ktqueue.broker.redis.connection import RedisConnection, jittered
from ktqueue.broker.redis.node import NotPermitted, OutOfMemory, ReplyError
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, LeaseLost, Unavailable

# These only read, or store something new, which a server without memory refuses.
REFUSABLE = (
    "submit_job",
    "get_job",
    "list_jobs",
    "queue_depths",
    "tenant_loads",
    "read_journal",
    "ended_jobs",
    "count_events",
    "list_models",
    "list_workers",
    "server_memory",
    "conversation",
    "stored_response",
    "bound_jobs",
    "add_file",
    "get_file",
    "list_files",
    "expired_files",
    "missing_records",
    "store_owner",
    "create_batch",
    "get_batch",
    "list_batches",
    "open_batches",
)
# These run even if the server has no memory left: most of them free some, and without them no job would end. A server
# without memory refuses only a script whose first write takes memory, so these start with a write that takes none.
NEVER_REFUSED = (
    "cancel_job",
    "due_webhooks",
    "register_worker",
    "renew_lease",
    "claim_jobs",
    "commit_events",
    "start_trial",
    "release_jobs",
    "release_lease",
    "reap",
    "requeue_unreadable",
    "fail_unserved",
    "scrub",
    "mark_retried",
    "delete_file",
    "cancel_batch",
    "take_batch",
    "update_batch",
    "release_batch",
    "forget_jobs",
)
PRELUDES = ("turns", "damage", "journals", "prelude", "batch_inputs")  # prepended to every script
# What they promise to a client is on disk afterwards, if `broker.durability` requires it.
DURABLE = ("submit_job", "cancel_job", "add_file", "delete_file", "create_batch", "cancel_batch", "update_batch")
FIRST_WRITE = "redis.call('DEL', TAG .. 'nothing')\n"
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5  # seconds between attempts


class ScriptRefused(Exception):
    """A script refused before it wrote anything. The scripts' headers list the codes."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code} {detail}")
        self.code = code
        self.detail = detail


class Scripts:
    """Calls the scripts of one shard."""

    def __init__(self, connection: RedisConnection, keys: Keys, config: BrokerConfig) -> None:
        folder = resources.files("ktqueue.broker").joinpath("lua")
        prelude = "".join(folder.joinpath(f"{name}.lua").read_text(encoding="utf-8") for name in PRELUDES)
        self._sources = {
            name: prelude
            + (FIRST_WRITE if name in NEVER_REFUSED else "")
            + folder.joinpath(f"{name}.lua").read_text(encoding="utf-8")
            for name in (*REFUSABLE, *NEVER_REFUSED)
        }
        self._digests = {name: hashlib.sha1(source.encode()).hexdigest() for name, source in self._sources.items()}
        self._connection = connection
        self._tag = keys.tag
        self._patience = config.connect_timeout

    async def call(self, name: str, *arguments: bytes | str | int, patience: float | None = None) -> Any:
        """Run a script and return its reply.

        While Redis does not answer, the call is repeated for `patience` seconds. None means the connect timeout, and no
        repetition if Redis is out of memory.

        Raises ScriptRefused, LeaseLost, Unavailable, or ConfigError if the user lacks permission.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + (self._patience if patience is None else patience)
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._connection.evaluate(
                    self._digests[name], self._sources[name], self._tag, arguments, durable=name in DURABLE
                )
            except Unavailable as error:
                if loop.time() + pause > end or (isinstance(error, OutOfMemory) and patience is None):
                    raise
            except NotPermitted as error:
                raise ConfigError(f"Redis refuses the user of broker.url: {error}", param="broker.url") from error
            except ReplyError as error:
                code, _, detail = str(error).partition(" ")
                if code == "LEASE_LOST":
                    raise LeaseLost(f"the lease of {detail} has expired") from error
                raise ScriptRefused(code, detail) from error
            await asyncio.sleep(jittered(pause))
            pause = min(pause * 2, LONGEST_PAUSE)
