"""Tells when jobs end: one subscription and a few calls for any number of jobs. Reads no journals.

A batch of a thousand lines follows no line's tokens, only its end. The channel announces ends. A message may be lost,
and an older version sends none, so after a quiet time all jobs that are waited for are looked up.
"""

import asyncio
from contextlib import suppress

from ktqueue.broker.keys import Keys
from ktqueue.broker.redis.hub import Hub, Mailbox
from ktqueue.broker.scripts import Scripts
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import Unavailable

LOOKED_UP = 1_000  # jobs in one call
QUIET_SECONDS, LONGEST_QUIET = 0.5, 4.0  # without a message, then all jobs are looked up, at growing intervals
OUTAGE_SECONDS = 60.0  # how long a caller waits for Redis
OUTAGE_PAUSE = 0.25  # seconds between attempts
MAILBOX_BYTES = 1 << 18
NEW_JOB = b""  # our own message: there is a job to look up


class JobEnds:
    """Waits for the ends of jobs. While nobody waits, it uses nothing."""

    def __init__(self, scripts: Scripts, hub: Hub, keys: Keys, config: BrokerConfig) -> None:
        self._scripts = scripts
        self._hub = hub
        self._keys = keys
        self._config = config
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._new: set[str] = set()  # ids that were not looked up since their wait began
        self._mailbox: Mailbox | None = None
        self._task: asyncio.Task[None] | None = None

    async def wait(self, job_id: str) -> None:
        """Return once the job has ended, or if it does not exist. Raises Unavailable after a minute without Redis."""
        end = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, []).append(end)
        self._new.add(job_id)
        if self._mailbox is not None:
            self._mailbox.put(NEW_JOB)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="ktqueue-job-ends")
        try:
            await end
        finally:
            self._leave(job_id, end)

    async def close(self) -> None:
        """Stop. Nobody may wait any more."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def _leave(self, job_id: str, end: asyncio.Future[None]) -> None:
        ends = self._waiting.get(job_id, [])
        if end in ends:
            ends.remove(end)
            if not ends:
                del self._waiting[job_id]

    async def _run(self) -> None:
        try:
            await self._watch()
        except Exception as error:  # whatever it is, nobody may wait for ever
            for ends in self._waiting.values():
                for end in ends:
                    if not end.done():
                        end.set_exception(error)
            self._waiting.clear()
            self._new.clear()

    async def _watch(self) -> None:
        """Look up jobs and take messages until nobody waits. Raises Unavailable after a long outage."""
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while self._waiting:
            try:
                mailbox = self._mailbox = await self._hub.subscribe(
                    self._keys.ends_channel, max_bytes=MAILBOX_BYTES, seconds=self._config.operation_timeout
                )
                try:
                    looks_up_all, quiet_seconds = True, QUIET_SECONDS
                    while self._waiting:
                        ids = list(self._waiting) if looks_up_all else [i for i in self._new if i in self._waiting]
                        self._new.clear()
                        found = await self._look_up(ids)
                        answered = loop.time()
                        if not self._waiting:
                            break
                        mail = await mailbox.take(quiet_seconds)
                        for message in mail.messages:
                            self._end(message.decode())
                        is_quiet = not mail.messages and not found
                        quiet_seconds = min(2 * quiet_seconds, LONGEST_QUIET) if is_quiet else QUIET_SECONDS
                        looks_up_all = mail.missed or not mail.messages
                finally:
                    self._mailbox = None
                    await self._hub.unsubscribe(mailbox)
            except Unavailable:
                if loop.time() - answered > OUTAGE_SECONDS:
                    raise
                await asyncio.sleep(OUTAGE_PAUSE)

    async def _look_up(self, job_ids: list[str]) -> int:
        """End the waits for those of the jobs that have ended. Returns their number."""
        found = 0
        for start in range(0, len(job_ids), LOOKED_UP):
            for job_id in await self._scripts.call("ended_jobs", *job_ids[start : start + LOOKED_UP]):
                self._end(job_id.decode())
                found += 1
        return found

    def _end(self, job_id: str) -> None:
        for end in self._waiting.pop(job_id, ()):
            if not end.done():
                end.set_result(None)
