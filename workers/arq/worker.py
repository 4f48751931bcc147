"""SteadyWorker: arq's Worker, which survives outages of Redis and whose jobs survive it. The only module with arq.

It adds what arq 0.28 lacks (ADR 0022). Records are JSON. An outage of Redis ends no worker. A job's lock is short and
renewed, so that another worker runs the jobs of a dead one within seconds. A poll does not examine running jobs again.
Requests to abort jobs that do not exist are deleted.

Functions must be idempotent: if a worker stalls for longer than its lock, another worker may run the same job. Knows
nothing of what the jobs do.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from arq.connections import ArqRedis
from arq.constants import abort_jobs_ss, health_check_key_suffix, in_progress_key_prefix, job_key_prefix
from arq.cron import CronJob, cron
from arq.jobs import serialize_result
from arq.worker import JobExecutionFailed, Retry, Worker, func

from ktqueue.arq_json import dumps, loads
from ktqueue.broker.redis.address import DeploymentKind, read_address
from ktqueue.broker.redis.node import Node
from ktqueue.broker.redis.topology import make_topology
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError

__all__ = ["CronJob", "Function", "Retry", "SteadyWorker", "by_clock"]

LOCK_SECONDS = 3.0  # duration of a running job's lock, which is renewed three times in that time
OUTAGE_PAUSE_SECONDS = 0.5  # between attempts while Redis does not answer
LEAVE_SECONDS = 5.0  # time to return jobs at the end
READ_FACTOR = 16  # number of full workers that can share a queue, since running jobs stay in arq's queue
MAX_LOCKS_READ = 256  # by one command
HEALTH_SECONDS = 10
HEALTH_SUFFIX = ":ktqueue-health-check"  # differs from arq's, because our workers can share a queue
CRON_RESULT_SECONDS = 120
MAX_TRIES = 2**31  # no limit by arq, which counts deaths of workers as tries; chores count their own attempts
PICKLE_MARK = b"\x80"  # first byte of a pickle of protocol 2 or later (opcode PROTO in Python's pickletools)
PICKLE_REFUSED = (
    "this queue accepts JSON, not pickle: give arq.create_pool "
    "job_serializer=ktqueue.arq_json.dumps and job_deserializer=ktqueue.arq_json.loads"
)

Function = Callable[..., Awaitable[Any]]

log = logging.getLogger(__name__)


class SteadyWorker(Worker):
    """Runs named functions from one of arq's queues until cancelled. Create it inside a running event loop.

    `url`: the Redis of the queue, a server or its sentinels, used with the time limits of `config`. `url_key`: the
    setting that it is from. `password_file` holds its password if the URL has none. `keep_result`: seconds to keep a
    result; `kept` has other values for single functions. `poll_seconds`: between two polls, or `idle_seconds` while no
    job runs here. Raises ConfigError for a wrong URL, and for a Redis Cluster, which arq does not support.
    """

    def __init__(
        self,
        functions: dict[str, Function],
        *,
        url: str,
        url_key: str = "broker.url",
        password_file: str | None = None,
        config: BrokerConfig,
        queue: str,
        max_jobs: int,
        keep_result: float,
        poll_seconds: float,
        idle_seconds: float | None = None,
        kept: Mapping[str, float] | None = None,
        cron_jobs: Sequence[CronJob] = (),
    ) -> None:
        self._address = read_address(url, password_file, url_key)
        if self._address.kind is DeploymentKind.CLUSTER:
            raise ConfigError("arq does not support Redis Cluster: give it another server (redis_url)", param="url")
        self._config = config
        self._topology = make_topology(self._address, "", config)
        self._node: Node | None = None
        self._ends: set[asyncio.Task[Any]] = set()  # they write the results of jobs
        self._idle_seconds = idle_seconds or poll_seconds
        self._woken = asyncio.Event()
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
        self.outage_pause_s = OUTAGE_PAUSE_SECONDS
        self.job_timeout_s = None  # type: ignore[assignment] # jobs have no time limit; arq accepts no None for several functions

    @property
    def connected(self) -> bool:
        """Whether the worker has found the server of its queue."""
        return self._node is not None

    async def main(self) -> None:
        """Poll until cancelled. An error in one poll is logged, and polling continues.

        Raises ConfigError if another program's arq worker serves the queue.
        """
        renewal = asyncio.create_task(self._renew(), name="arq-locks")
        last_error, is_alone = "", False
        try:
            while True:
                try:
                    async with asyncio.timeout(self._config.operation_timeout):
                        if last_error or self._node is None:
                            await self._connect()
                        if not is_alone:
                            await self._check_alone()
                            is_alone = True
                        await self._poll_iteration()
                    last_error = ""
                    pause = self.poll_delay_s if self.tasks else self._idle_seconds
                except ConfigError:
                    raise
                except Exception as error:
                    if last_error != str(error):
                        log.warning("queue %s: %s: %s", self.queue_name, type(error).__name__, error)
                    last_error = str(error)
                    pause = self.outage_pause_s
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._woken.wait()
                self._woken.clear()
        finally:
            renewal.cancel()

    def poll_now(self) -> None:
        """Do not wait until the next poll: this process has put a job into the queue."""
        self._woken.set()

    async def _check_alone(self) -> None:
        """Raise ConfigError if another program's arq worker serves the queue: each would fail the other's jobs."""
        key = self.queue_name + health_check_key_suffix
        seconds = await self.pool.ttl(key)
        if await self.pool.exists(key):
            raise ConfigError(
                f"the queue {self.queue_name!r} is served by another program's arq worker, whose health check is alive "
                f"(key {key}, {seconds} s left). Each worker would fail the other's jobs. Choose another queue with "
                "bridge.queue or control.queue. If that worker is dead, delete the key",
                param="queue",
                value=self.queue_name,
            )

    async def _connect(self) -> None:
        """Connect to the server that holds the queue now. Raises Unavailable."""
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
        """Return running jobs to the queue and close the connections."""
        running = list(self.tasks.values())
        for task in running:
            task.cancel()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(LEAVE_SECONDS):
                await asyncio.gather(*running, return_exceptions=True)
                await asyncio.gather(*self._ends, return_exceptions=True)
        if self._node is not None:
            await self._node.close()
        await self._topology.close()

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Start the jobs that no worker runs. arq's method sends four commands for each queued or running job."""
        waiting = [job_id for job_id in job_ids if job_id.decode(errors="replace") not in self.tasks]
        for start in range(0, len(waiting), MAX_LOCKS_READ):
            chunk = waiting[start : start + MAX_LOCKS_READ]
            locks = await self.pool.mget([in_progress_key_prefix.encode() + job_id for job_id in chunk])
            for job_id, lock in zip(chunk, locks, strict=True):
                if self.job_counter >= self.max_jobs:
                    return
                if lock is None:
                    await self._start(job_id)

    async def _start(self, job_id: bytes) -> None:
        try:
            await super().start_jobs([job_id])
        except BaseException:
            if job_id.decode() not in self.tasks:  # arq has counted the job and does not undo that here
                self._release_sem_dec_counter_on_complete()
            raise

    async def _cancel_aborted_jobs(self) -> None:
        """Cancel running jobs that `Job.abort` names. Requests for waiting jobs stay, others are deleted."""
        requested = [job_id.decode(errors="replace") for job_id in await self.pool.zrange(abort_jobs_ss, 0, -1)]
        running = [job_id for job_id in requested if job_id in self.job_tasks]
        self.aborting_tasks.update(running)
        for job_id in running:
            self.job_tasks[job_id].cancel()
        gone = [
            job_id
            for job_id in requested
            if job_id not in self.tasks and not await self.pool.exists(job_key_prefix + job_id)
        ]
        if running or gone:
            await self.pool.zrem(abort_jobs_ss, *running, *gone)

    async def finish_job(self, *arguments: Any) -> None:
        """Write the result of a job."""
        with self._ending():
            await super().finish_job(*arguments)

    async def finish_failed_job(self, job_id: str, result_data: bytes | None) -> None:
        """End a job that never began. A job that was sent as pickle is refused, in JSON like everything here."""
        with self._ending():
            raw = await self.pool.get(job_key_prefix + job_id)
            if raw is not None and raw.startswith(PICKLE_MARK):
                result_data = self._refusal(job_id)
            await super().finish_failed_job(job_id, result_data)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Let `leave` wait for this task, which arq shields from the end of the job's task."""
        task = asyncio.current_task()
        assert task is not None
        self._ends.add(task)
        try:
            yield
        finally:
            self._ends.discard(task)

    def _refusal(self, job_id: str) -> bytes | None:
        log.warning("queue %s: job %s was sent as pickle: %s", self.queue_name, job_id, PICKLE_REFUSED)
        fault = JobExecutionFailed(PICKLE_REFUSED)
        of_job = (job_id, self.queue_name, job_id)
        return serialize_result(
            "<unread>", (), {}, 1, 0, False, fault, 0, 0, *of_job, serializer=self.job_serializer
        )  # fmt: skip

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LOCK_SECONDS / 3)
            with contextlib.suppress(Exception):  # it is repeated soon
                async with asyncio.timeout(LOCK_SECONDS), self.pool.pipeline(transaction=False) as pipe:
                    for job_id in self.tasks:
                        pipe.pexpire(in_progress_key_prefix + job_id, round(LOCK_SECONDS * 1000))
                    await pipe.execute()


def by_clock(name: str, run: Any, when: Mapping[str, set[int]]) -> CronJob:
    """Make a cron job, which one of the queue's workers runs each time. `when`: month, day, weekday, hour, minute.

    The result of a run keeps the other workers from running it too, so it is kept for a while.
    """
    return cron(
        run, name=name, keep_result=CRON_RESULT_SECONDS, second=0, minute=when.get("minute"), hour=when.get("hour"),
        day=when.get("day"), month=when.get("month"), weekday=when.get("weekday"),
    )  # fmt: skip
