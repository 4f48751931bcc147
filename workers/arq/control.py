"""The control worker: a worker of arq on a queue of ours, for idempotent chores.

The chores are `webhook JOB`, which calls a job's webhook; `batches`, which finds batch files; `batch FILE`, which runs
a batch file; and `retention`, which removes old files. Beside them it runs batches over HTTP: see `batch_owner`.

Also a module to execute (`python -m ktqueue.workers.arq.control`).
"""

from ktqueue.core import garbage

if __name__ == "__main__":
    garbage.collect_seldom()

import asyncio
import logging
import sys
from contextlib import suppress
from typing import Any

from ktqueue.broker.broker import Broker
from ktqueue.broker.redis.address import DeploymentKind, read_address
from ktqueue.core.codec import CodecError, NewerFormat
from ktqueue.core.config import Config
from ktqueue.core.errors import JobNotFound, JournalRegressed, Unavailable
from ktqueue.storage.opening import open_store
from ktqueue.workers.arq.batch_files import BatchFiles
from ktqueue.workers.arq.batch_owner import BatchOwner
from ktqueue.workers.arq.crontab import parse_entry
from ktqueue.workers.arq.process import execute, serve
from ktqueue.workers.arq.stored_files import purge_store
from ktqueue.workers.arq.webhooks import Undeliverable, Undelivered, body_of, deliver, event_of, key_of, trusted
from ktqueue.workers.arq.worker import CronJob, Function, Retry, SteadyWorker, by_clock

MAX_CHORES = 32  # at once
POLL_SECONDS = 0.5  # between searches for jobs that have ended, and for chores that other processes enqueued
MAX_WEBHOOKS_READ = 100  # by one search
BATCH_RESULT_SECONDS = 60.0  # then another file of the same name can be run
LONGEST_PAUSE_SECONDS = 120.0  # between attempts to call a webhook
FIRST_LEFT_SECONDS, MOST_LEFT_SECONDS = 0.2, 2.0  # for which a chore is left to others; each time it is left longer
MAX_LEFT = 50  # times that a batch file is left to others, which take more than a minute
PURGE_SECONDS = 3_600.0  # between two looks for old files of the store, where there is no crontab

log = logging.getLogger(__name__)


class ControlWorker(SteadyWorker):
    """Runs the chores of the queue `control.queue`. Raises ConfigError."""

    def __init__(self, broker: Broker, config: Config, url: str) -> None:
        trusted(config.control)  # a wrong file is found now, not by the first webhook
        self._files = BatchFiles(broker, config.control)
        chores: dict[str, Function] = {
            "webhook": self.webhook,
            "batches": self.batches,
            "batch": self.batch,
            "retention": self.retention,
        }
        super().__init__(
            chores,
            url=config.control.redis_url or url,
            url_key="control.redis_url" if config.control.redis_url else "broker.url",
            password_file=None if config.control.redis_url else config.broker.password_file,
            config=config.broker,
            queue=config.control.queue,
            max_jobs=MAX_CHORES,
            keep_result=0,
            kept={"batch": BATCH_RESULT_SECONDS},
            cron_jobs=[
                _cron_job(entry, chores)
                for entry in config.control.crontab
                if config.control.batch_dir is not None or parse_entry(entry, chores)[1] != "batches"
            ],
            poll_seconds=POLL_SECONDS / 5,
            idle_seconds=POLL_SECONDS,
        )
        self._broker = broker
        self._store = open_store(config.storage, config.broker.state_dir)
        self._owner = BatchOwner(broker, self._store, config)
        self._settings = config.control
        if self._settings.webhook_secret is not None:
            key_of(self._settings.webhook_secret)  # checks it

    async def main(self) -> None:
        """Run chores and batches until cancelled. Raises ConfigError."""
        work = [
            asyncio.create_task(super().main(), name="chores"),
            asyncio.create_task(self._owner.run(), name="batches"),
        ]
        if self._settings.webhook_secret is not None:
            work.append(asyncio.create_task(self._enqueue_webhooks(), name="webhooks"))
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            results = await asyncio.gather(*work, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def webhook(self, context: dict[str, Any], job_id: str) -> None:
        """Call a job's webhook. A failed call is repeated, `control.webhook_attempts` calls in all."""
        if self._settings.webhook_secret is None:
            raise _left(context)
        try:
            record = await self._broker.jobs.get(job_id)
        except JobNotFound:
            log.warning("webhook of %s is dropped: the job's record has expired", job_id)
            return
        except Unavailable as error:
            raise Retry(self._settings.webhook_pause) from error
        if record.request is None:
            log.warning("webhook of %s waits: a newer version of ktqueue wrote the job's record", job_id)
            raise Retry(LONGEST_PAUSE_SECONDS)
        hook = record.request.webhook
        if hook is None or event_of(record.state) not in hook.events:
            return
        try:
            events = await self._broker.journal.replay(job_id)
        except NewerFormat:
            log.warning("webhook of %s waits: a newer version of ktqueue wrote the job's journal", job_id)
            raise Retry(LONGEST_PAUSE_SECONDS) from None
        except Unavailable as error:
            raise Retry(self._settings.webhook_pause) from error
        except (CodecError, JobNotFound, JournalRegressed):
            events = []
        attempt = int(context["job_try"])
        try:
            await deliver(hook, body_of(record, events), self._settings)
        except Undeliverable as fault:
            log.warning("webhook of %s failed for good: %s", job_id, fault.message)
        except Undelivered as fault:
            if attempt >= self._settings.webhook_attempts:
                log.warning("webhook of %s failed for good after %d attempts: %s", job_id, attempt, fault.message)
                return
            log.info("webhook of %s failed at attempt %d and will be repeated: %s", job_id, attempt, fault.message)
            raise Retry(min(LONGEST_PAUSE_SECONDS, self._settings.webhook_pause * 2 ** (attempt - 1))) from fault

    async def batch(self, context: dict[str, Any], name: str, model: str | None = None) -> dict[str, Any]:
        """Run a batch file: see `BatchFiles.run`. Without `control.batch_dir` it is left to other control workers."""
        if self._settings.batch_dir is None and int(context["job_try"]) < MAX_LEFT:
            raise _left(context)
        return await self._files.run(context, name, model)

    async def batches(self, context: dict[str, Any]) -> None:
        """Enqueue a chore for each waiting batch file, unless there is one for it."""
        try:
            names = await asyncio.to_thread(self._files.waiting)
        except OSError as error:  # perhaps a share that is away; the next search is in a minute
            log.error("control.batch_dir cannot be used: %s", error)
            return
        for name in names:
            await self.pool.enqueue_job("batch", name, _job_id=f"batch:{name}", _queue_name=self.queue_name)
            self.poll_now()

    async def retention(self, context: dict[str, Any]) -> None:
        """Delete old batch files, and old files of the store."""
        await self._files.purge(context)
        await purge_store(self._broker, self._store)

    async def _enqueue_webhooks(self) -> None:
        """Enqueue a chore for each ended job with a webhook. If this process dies in between, it is enqueued twice."""
        enqueued: list[str] = []
        while True:
            try:
                waiting = await self._broker.webhooks.waiting(MAX_WEBHOOKS_READ, enqueued)
                enqueued = []
                for job_id in waiting:
                    await self.pool.enqueue_job("webhook", job_id, _job_id=f"webhook:{job_id}")
                    enqueued.append(job_id)
                    self.poll_now()
            except Exception as error:  # the next search finds the same jobs
                log.warning("webhooks are delayed: %s", error)
            if not enqueued:
                await asyncio.sleep(POLL_SECONDS)


def _cron_job(entry: str, chores: dict[str, Function]) -> CronJob:
    """Make a cron job of an entry of the crontab. Raises ConfigError."""
    when, name, arguments = parse_entry(entry, chores)

    async def run(context: dict[str, Any]) -> None:
        await chores[name](context, *arguments)

    return by_clock(f"cron:{entry}", run, when)


def _left(context: dict[str, Any]) -> Retry:
    """Leave a chore that this worker has no settings for to another one."""
    return Retry(min(MOST_LEFT_SECONDS, FIRST_LEFT_SECONDS * 1.15 ** int(context["job_try"])))


class BatchesOnly:
    """A control worker beside a Redis Cluster, which arq does not support: it runs batches, and no other chores."""

    queue_name = "of batches"

    def __init__(self, broker: Broker, config: Config) -> None:
        self._broker = broker
        self._store = open_store(config.storage, config.broker.state_dir)
        self._owner = BatchOwner(broker, self._store, config)

    async def async_run(self) -> None:
        """Run batches until cancelled, and delete old files of the store each hour."""
        owner = asyncio.create_task(self._owner.run(), name="batches")
        try:
            while True:
                done, _ = await asyncio.wait([owner], timeout=PURGE_SECONDS)
                if done:
                    owner.result()
                with suppress(Unavailable):
                    await purge_store(self._broker, self._store)
        finally:
            owner.cancel()
            await asyncio.gather(owner, return_exceptions=True)

    async def leave(self) -> None:
        """Do nothing: batches were given back when `async_run` ended."""


def worker_for(broker: Broker, config: Config, url: str) -> SteadyWorker | BatchesOnly:
    """The control worker for the Redis at `url`. Raises ConfigError."""
    control = config.control
    needs_arq = control.redis_url is not None or control.webhook_secret is not None or control.batch_dir is not None
    if not needs_arq and read_address(url, None).kind is DeploymentKind.CLUSTER:
        log.info("batches run; webhooks and batch files need control.redis_url, another server than a Redis Cluster")
        return BatchesOnly(broker, config)
    return ControlWorker(broker, config, url)


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Waits while Redis does not answer. Raises ConfigError."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs each URL
    await serve(config, lambda broker, url: worker_for(broker, config, url))


if __name__ == "__main__":
    sys.exit(execute(run))
