"""SteadyWorker: arq's Worker, made to outlive Redis and to be outlived (the door to arq).

What arq 0.28 lacks, and this adds (ADR 0022): records are JSON; an outage of Redis ends no worker; a job's lock is
short and renewed, so that a dead worker's jobs run elsewhere within seconds; jobs that run are not looked at again at
each poll; aborts of jobs that do not exist are forgotten. Every function must be idempotent: a worker that stalls for
longer than its lock may share a job with another one. Knows nothing of what the jobs do.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from arq.connections import ArqRedis
from arq.constants import abort_jobs_ss, health_check_key_suffix, in_progress_key_prefix, job_key_prefix
from arq.cron import CronJob, cron
from arq.jobs import serialize_result
from arq.worker import JobExecutionFailed, Retry, Worker, func

from ktqueue.arq_json import dumps, loads
from ktqueue.broker.redis.address import Kind, read_address
from ktqueue.broker.redis.node import Node
from ktqueue.broker.redis.topology import make_topology
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError

__all__ = ["CronJob", "Function", "Retry", "SteadyWorker", "by_clock"]

LOCK_SECONDS = 3.0  # of a running job; renewed three times in that time
AWAY_PAUSE = 0.5  # seconds between tries while Redis is away
LEAVE_SECONDS = 5.0  # to hand jobs back at the end
READ_FACTOR = 16  # running jobs stay in arq's queue: so many full workers may share it
LOOKED_AT_ONCE = 256  # locks read by one command
HEALTH_SECONDS = 10
HEALTH_SUFFIX = ":ktqueue-health-check"  # not arq's: several workers of ours may share a queue, and know each other
CRON_RESULT_SECONDS = 120
MAX_TRIES = 2**31  # arq counts the deaths of workers as tries; chores count their own
PICKLE_MARK = b"\x80"  # how each pickle of protocol 2 or later begins (Python's pickletools, opcode PROTO)
PICKLE_REFUSED = (
    "this queue reads JSON and never pickle: give arq.create_pool "
    "job_serializer=ktqueue.arq_json.dumps and job_deserializer=ktqueue.arq_json.loads"
)

Function = Callable[..., Awaitable[Any]]

log = logging.getLogger(__name__)


class SteadyWorker(Worker):
    """Runs named functions from one of arq's queues until cancelled. Make it inside a running event loop.

    `url` is the Redis of the queue, a server or the sentinels of one, with the time limits of `config`;
    `password_file` has its password, where the URL has none. `keep_result`
    (of one function: `kept`) and `poll_seconds` in seconds. Raises ConfigError for a cluster, where arq's
    keys have no home.
    """

    def __init__(
        self,
        functions: dict[str, Function],
        *,
        url: str,
        password_file: str | None = None,
        config: BrokerConfig,
        queue: str,
        max_jobs: int,
        keep_result: float,
        poll_seconds: float,
        kept: Mapping[str, float] | None = None,
        cron_jobs: Sequence[CronJob] = (),
    ) -> None:
        self._address = read_address(url, password_file)
        if self._address.kind is Kind.CLUSTER:
            raise ConfigError("arq does not speak Redis Cluster: give it a server of its own (redis_url)", param="url")
        self._config = config
        self._topology = make_topology(self._address, "", config)
        self._node: Node | None = None
        super().__init__(
            [func(coroutine, name=name, keep_result=(kept or {}).get(name)) for name, coroutine in functions.items()],  # type: ignore[arg-type]
            queue_name=queue,
            cron_jobs=cron_jobs,
            handle_signals=False,
            max_jobs=max_jobs,
            keep_result=keep_result,
            poll_delay=poll_seconds,
            queue_read_limit=READ_FACTOR * max_jobs,
            max_tries=MAX_TRIES,
            health_check_interval=HEALTH_SECONDS,
            health_check_key=queue + HEALTH_SUFFIX,
            allow_abort_jobs=True,
            job_serializer=dumps,
            job_deserializer=loads,
            log_results=False,
        )
        self.in_progress_timeout_s = LOCK_SECONDS
        self.job_timeout_s = None  # type: ignore[assignment] # a job ends when it ends; arq takes no None for several

    async def main(self) -> None:
        """Until cancelled. Whatever goes wrong in a round is logged, and the next round comes.

        Raises ConfigError where an arq worker that is none of ours serves the queue.
        """
        renewal = asyncio.create_task(self._renew(), name="arq-locks")
        told, alone = "", False
        try:
            while True:
                pause = self.poll_delay_s
                try:
                    async with asyncio.timeout(self._config.operation_timeout):
                        if told or self._node is None:
                            await self._find()
                        if not alone:
                            await self._check_alone()
                            alone = True
                        await self._poll_iteration()
                    told = ""
                except ConfigError:
                    raise
                except Exception as error:
                    if told != str(error):
                        log.warning("queue %s: %s: %s", self.queue_name, type(error).__name__, error)
                    told = str(error)
                    pause = AWAY_PAUSE
                await asyncio.sleep(pause)
        finally:
            renewal.cancel()

    async def _check_alone(self) -> None:
        """Take no job from a queue that another program's arq worker serves: each would fail the other's jobs."""
        key = self.queue_name + health_check_key_suffix
        seconds = await self.pool.ttl(key)
        if await self.pool.exists(key):
            raise ConfigError(
                f"the queue {self.queue_name!r} is served by another program's arq worker, whose health check is alive "
                f"(key {key}, {seconds} s left): it would fail our jobs, and we its. Choose another queue with "
                "bridge.queue or control.queue; if that worker has died, delete the key",
                param="queue",
                value=self.queue_name,
            )

    async def _find(self) -> None:
        """Connect to the server that has the queue now. Raises Unavailable."""
        endpoint, address = await self._topology.find(), self._address
        if self._node is not None and self._node.endpoint == endpoint:
            return
        old, config = self._node, self._config
        self._node = Node(
            endpoint, address.login, address.tls, address.database,
            connect=config.connect_timeout, operate=config.operation_timeout,
        )  # fmt: skip
        self._pool = ArqRedis(
            self._node.pool, job_serializer=dumps, job_deserializer=loads, default_queue_name=self.queue_name
        )
        if old is not None:
            await old.close()

    async def leave(self) -> None:
        """Give running jobs back to the queue and close the connections."""
        running = list(self.tasks.values())
        for task in running:
            task.cancel()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(LEAVE_SECONDS):
                await asyncio.gather(*running, return_exceptions=True)
        if self._node is not None:
            await self._node.close()
        await self._topology.close()

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Start what nobody runs. arq's own asks four times for each job in the queue, running ones too."""
        waiting = [one for one in job_ids if one.decode(errors="replace") not in self.tasks]
        for start in range(0, len(waiting), LOOKED_AT_ONCE):
            some = waiting[start : start + LOOKED_AT_ONCE]
            locks = await self.pool.mget([in_progress_key_prefix.encode() + one for one in some])
            for job_id, lock in zip(some, locks, strict=True):
                if self.job_counter >= self.max_jobs:
                    return
                if lock is None:
                    await self._start(job_id)

    async def _start(self, job_id: bytes) -> None:
        try:
            await super().start_jobs([job_id])
        except BaseException:
            if job_id.decode() not in self.tasks:  # arq counts the job before it begins, and forgets it here
                self._release_sem_dec_counter_on_complete()
            raise

    async def _cancel_aborted_jobs(self) -> None:
        """Cancel what `Job.abort` asked for. Aborts of jobs that wait stay; those of jobs that are no more go."""
        asked = [one.decode(errors="replace") for one in await self.pool.zrange(abort_jobs_ss, 0, -1)]
        running = [job_id for job_id in asked if job_id in self.job_tasks]
        self.aborting_tasks.update(running)
        for job_id in running:
            self.job_tasks[job_id].cancel()
        gone = [
            job_id
            for job_id in asked
            if job_id not in self.tasks and not await self.pool.exists(job_key_prefix + job_id)
        ]
        if running or gone:
            await self.pool.zrem(abort_jobs_ss, *running, *gone)

    async def finish_failed_job(self, job_id: str, result_data: bytes | None) -> None:
        """The end of a job that never began. One that was sent as pickle is refused, in JSON as everything here."""
        raw = await self.pool.get(job_key_prefix + job_id)
        if raw is not None and raw.startswith(PICKLE_MARK):
            result_data = self._refusal(job_id)
        await super().finish_failed_job(job_id, result_data)

    def _refusal(self, job_id: str) -> bytes | None:
        log.warning("queue %s: job %s came as pickle: %s", self.queue_name, job_id, PICKLE_REFUSED)
        fault = JobExecutionFailed(PICKLE_REFUSED)
        of_job = (job_id, self.queue_name, job_id)
        return serialize_result(
            "<unread>", (), {}, 1, 0, False, fault, 0, 0, *of_job, serializer=self.job_serializer
        )  # fmt: skip

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LOCK_SECONDS / 3)
            with contextlib.suppress(Exception):  # the next one comes soon
                async with asyncio.timeout(LOCK_SECONDS), self.pool.pipeline(transaction=False) as pipe:
                    for job_id in self.tasks:
                        pipe.pexpire(in_progress_key_prefix + job_id, round(LOCK_SECONDS * 1000))
                    await pipe.execute()


def by_clock(name: str, run: Any, when: Mapping[str, set[int]]) -> CronJob:
    """Has arq's workers of a queue run it, one of them each time. `when`: month, day, weekday, hour, minute.

    The result of a run is what keeps the other workers from running it, too, so it is kept for a while.
    """
    return cron(
        run, name=name, keep_result=CRON_RESULT_SECONDS, second=0, minute=when.get("minute"), hour=when.get("hour"),
        day=when.get("day"), month=when.get("month"), weekday=when.get("weekday"),
    )  # fmt: skip
