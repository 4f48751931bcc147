"""The control worker: arq's worker on a queue of ours, for idempotent chores.

Chores: `webhook JOB` calls one, `batches` finds batch files, `batch FILE` runs one, `retention` removes old files.

Also a module to execute (`python -m ktqueue.workers.arq.control`).
"""

import asyncio
import logging
import sys
from typing import Any

from ktqueue.broker.broker import Broker
from ktqueue.core.config import Config
from ktqueue.core.errors import JobNotFound, JournalRegressed
from ktqueue.workers.arq.batch_files import BatchFiles
from ktqueue.workers.arq.crontab import parse_entry
from ktqueue.workers.arq.process import execute, serve
from ktqueue.workers.arq.webhooks import Undeliverable, Undelivered, body_of, deliver, event_of, key_of
from ktqueue.workers.arq.worker import CronJob, Function, Retry, SteadyWorker, by_clock

MAX_CHORES = 32  # at once
LOOK_SECONDS = 0.5  # between looks for ended jobs
LOOKED_AT_ONCE = 100
BATCH_RESULT_SECONDS = 60.0  # a file of the same name may come again
LONGEST_PAUSE = 120.0  # seconds between attempts

log = logging.getLogger(__name__)


class Control(SteadyWorker):
    """Serves the chores on the control queue of the configuration. Raises ConfigError."""

    def __init__(self, broker: Broker, config: Config, url: str) -> None:
        self._files = BatchFiles(broker, config.control)
        chores: dict[str, Function] = {
            "webhook": self.webhook,
            "batches": self.batches,
            "batch": self._files.run,
            "retention": self._files.purge,
        }
        super().__init__(
            chores,
            url=config.control.redis_url or url,
            password_file=None if config.control.redis_url else config.broker.password_file,
            config=config.broker,
            queue=config.control.queue,
            max_jobs=MAX_CHORES,
            keep_result=0,
            kept={"batch": BATCH_RESULT_SECONDS},
            cron_jobs=[_cron_job(entry, chores) for entry in config.control.crontab],
            poll_seconds=LOOK_SECONDS / 5,
        )
        self._broker = broker
        self._settings = config.control
        if self._settings.webhook_secret is not None:
            key_of(self._settings.webhook_secret)

    async def main(self) -> None:
        """Until cancelled."""
        hooks = asyncio.create_task(self._hand_over(), name="webhooks")
        try:
            await super().main()
        finally:
            hooks.cancel()

    async def webhook(self, context: dict[str, Any], job_id: str) -> None:
        """Tell of one job's end. Tried again with growing pauses, `control.webhook_attempts` times in all."""
        try:
            record = await self._broker.jobs.get(job_id)
        except JobNotFound:
            log.warning("webhook of %s: the job's record is gone", job_id)
            return
        if record.request is None:
            log.warning("webhook of %s waits for a version that reads its record", job_id)
            raise Retry(LONGEST_PAUSE)
        hook = record.request.webhook
        if hook is None or event_of(record.state) not in hook.events:
            return
        try:
            events = await self._broker.journal.replay(job_id)
        except (JobNotFound, JournalRegressed):
            events = []
        attempt = int(context["job_try"])
        try:
            await deliver(hook, body_of(record, events), self._settings)
        except Undeliverable as fault:
            log.warning("webhook of %s is given up: %s", job_id, fault.message)
        except Undelivered as fault:
            if attempt >= self._settings.webhook_attempts:
                log.warning("webhook of %s is given up after %d attempts: %s", job_id, attempt, fault.message)
                return
            log.info("webhook of %s, attempt %d: %s", job_id, attempt, fault.message)
            raise Retry(min(LONGEST_PAUSE, self._settings.webhook_pause * 2 ** (attempt - 1))) from fault

    async def batches(self, context: dict[str, Any]) -> None:
        """Make a chore of each batch file that waits; one that is a chore already stays that one."""
        for name in await asyncio.to_thread(self._files.waiting):
            await self.pool.enqueue_job("batch", name, _job_id=f"batch:{name}", _queue_name=self.queue_name)

    async def _hand_over(self) -> None:
        """Make a chore of each ended job with a webhook. One that dies in between makes the chore twice."""
        taken: list[str] = []
        while True:
            try:
                waiting = await self._broker.webhooks.waiting(LOOKED_AT_ONCE, taken)
                taken = []
                for job_id in waiting:
                    await self.pool.enqueue_job("webhook", job_id, _job_id=f"webhook:{job_id}")
                    taken.append(job_id)
            except Exception as error:  # the same ones come again
                log.warning("webhooks wait: %s", error)
            if not taken:
                await asyncio.sleep(LOOK_SECONDS)


def _cron_job(entry: str, chores: dict[str, Function]) -> CronJob:
    """A line of the crontab. Raises ConfigError."""
    when, name, arguments = parse_entry(entry, chores)

    async def run(context: dict[str, Any]) -> None:
        await chores[name](context, *arguments)

    return by_clock(f"cron:{entry}", run, when)


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT; waits for Redis where it is away. Raises ConfigError."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # below that it writes each URL
    await serve(config, lambda broker, url: Control(broker, config, url))


if __name__ == "__main__":
    sys.exit(execute(run))
