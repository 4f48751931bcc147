"""Supervisor: the processes of `ktqueue up`: a private Redis, the gateway, the workers, and arq's two workers.

They start in order, are restarted when they die, stop in order, and never outlive this process. It is a library: only
`run_until_signal` installs signal handlers. Knows the processes only by their commands.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Self

import httpx

from ktqueue.broker.broker import Broker
from ktqueue.broker.models import process_name
from ktqueue.broker.redis.state_folder import PRIVATE_UMASK, StateFolder
from ktqueue.core.config import ENVIRONMENT_PREFIX, STANDALONE, Config, config_environment
from ktqueue.core.listeners import listen
from ktqueue.workers.exit_codes import UNUSABLE
from ktqueue.workers.supervision.child import LONGEST_PAUSE_SECONDS, QUICK_DEATH_SECONDS, Child, ProcessFailed
from ktqueue.workers.supervision.fork_client import COMMAND as FORK_SERVER_COMMAND
from ktqueue.workers.supervision.fork_client import ForkClient
from ktqueue.workers.supervision.lease_release import release_leases_of
from ktqueue.workers.supervision.log_files import CHECK_SECONDS, begin_log, rotate_all
from ktqueue.workers.supervision.private_redis import PrivateRedis
from ktqueue.workers.supervision.process import Command, Launch

GATEWAY_START_SECONDS = 30.0
WORKER_START_SECONDS = 1_800.0  # a large model takes long to load
STOP_MARGIN_SECONDS = 7.0  # a process is killed when it takes longer to stop than its drain_seconds and this
POLL_SECONDS = 0.05
# A forked worker serves after a tenth of a second, so a shorter life counts as quick, and pauses are shorter.
QUICK_FORK_DEATH_SECONDS, LONGEST_FORK_PAUSE_SECONDS = 2.0, 0.5

WORKER_COMMAND = [sys.executable, "-P", "-m", "ktqueue.workers.generation.worker_process"]
GATEWAY_COMMAND = [sys.executable, "-P", "-m", "ktqueue.gateway"]
BRIDGE_COMMAND = [sys.executable, "-P", "-m", "ktqueue.workers.arq.bridge"]
CONTROL_COMMAND = [sys.executable, "-P", "-m", "ktqueue.workers.arq.control"]

log = logging.getLogger(__name__)


class Supervisor:
    """`async with Supervisor(config, workers=2) as up:` runs everything; inside, `up.url` answers HTTP.

    `fork_server_command` starts the process that forks the workers. `report` receives a line for each wait. Each
    process logs to `state_dir/NAME.log`, limited to `log.max_bytes`. Older lines, or the log of the previous run, are
    in `NAME.log.1`. Entering raises ProcessFailed, ConfigError or Unavailable.
    """

    def __init__(
        self,
        config: Config,
        *,
        workers: int = 1,
        report: Callable[[str], None] | None = None,
        fork_server_command: Sequence[str] = FORK_SERVER_COMMAND,
    ) -> None:
        self.config = config
        self.workers: list[Child] = []
        self.fork_server: Child | None = None  # starts the workers, unless they use a GPU
        self.helpers: list[Child] = []  # arq's workers, if the configuration enables them
        self._gateway: Child | None = None
        self._count = workers
        self._fork_server_command = fork_server_command
        self._report = report or log.info
        self._folder: StateFolder | None = None
        self._redis: PrivateRedis | None = None
        self._fork_client: ForkClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lease_releases: set[asyncio.Task[None]] = set()

    @property
    def gateway(self) -> Child:
        """The gateway's process. It exists once the start has begun."""
        assert self._gateway is not None
        return self._gateway

    @property
    def url(self) -> str:
        """The gateway's URL."""
        return gateway_url(self.config)

    @property
    def broker_url(self) -> str:
        """The URL of the Redis in use. It may contain a password, so do not log it."""
        assert self.config.broker.url is not None
        return self.config.broker.url

    @property
    def redis_pid(self) -> int | None:
        """Process id of the private Redis, or None while it does not run."""
        return self._redis.pid if self._redis is not None else None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait(self) -> None:
        """Wait until a process cannot be kept running. Raises ProcessFailed."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def run_until_signal(self) -> None:
        """Wait for SIGINT, SIGTERM or SIGHUP. A second signal, during `stop`, kills the processes.

        Raises ProcessFailed.
        """
        loop = asyncio.get_running_loop()
        signalled = asyncio.Event()

        def handle() -> None:
            if signalled.is_set():
                for child in [self.gateway, *self.helpers, *self.workers]:
                    child.signal(signal.SIGKILL)
            signalled.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, handle)
        tasks = [asyncio.ensure_future(wait) for wait in (self.wait(), signalled.wait())]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in done:
            task.result()

    # Start

    async def _start(self) -> None:
        state = self._hold_state_folder()
        await self._find_redis(state)
        self._complete_config()
        children = self._make_children(state)
        self._tasks += [asyncio.create_task(child.run(), name=child.name) for child in children]
        await self._until("the gateway", self.gateway, self._gateway_answers, GATEWAY_START_SECONDS)
        await self._wait_for_workers()

    def _hold_state_folder(self) -> Path:
        self._folder = StateFolder.open(self.config.broker.state_dir)
        self._folder.hold()
        state = self._folder.path
        self._tasks.append(asyncio.create_task(self._rotate_logs(state), name="log rotation"))
        return state

    async def _find_redis(self, state: Path) -> None:
        """Start a private Redis if the configuration names none."""
        if self.config.broker.url is None:
            self._report("starting a private Redis")
            self._redis = PrivateRedis(state, self.config.broker.durability)
            url = await self._redis.start()
            self.config = replace(self.config, broker=replace(self.config.broker, url=url))
            self._tasks.append(asyncio.create_task(self._redis.run(), name="redis"))

    def _complete_config(self) -> None:
        """Choose the gateway's port and each worker's share of CPU threads and memory."""
        with closing(listen(self.config.gateway)) as listeners:
            port = listeners.port
        engine = self.config.engine
        if engine.threads is None and self._count > 1:
            engine = replace(engine, threads=max(1, _physical_cores() // self._count))
        engine = replace(engine, host_memory_utilization=engine.host_memory_utilization / self._count)
        self.config = replace(self.config, gateway=replace(self.config.gateway, port=port), engine=engine)

    def _make_children(self, state: Path) -> list[Child]:
        """The processes to run, in the order of their start."""
        self._gateway = self._child("gateway", self._command(GATEWAY_COMMAND), state)
        self._make_workers(state)
        if self.config.bridge.enabled:
            self.helpers.append(self._child("bridge", self._command(BRIDGE_COMMAND), state))
        if self.config.control.enabled:
            command = self._command(CONTROL_COMMAND, umask=-1)  # the files of batches are for the user
            self.helpers.append(self._child("control", command, state))
        fork_server = [] if self.fork_server is None else [self.fork_server]
        return [self.gateway, *fork_server, *self.workers, *self.helpers]

    def _make_workers(self, state: Path) -> None:
        """Workers on the CPU are forks of a fork server. A process that uses a GPU cannot be forked."""
        launch: Launch = self._command(WORKER_COMMAND)
        quick_death_seconds, longest_pause_seconds = QUICK_DEATH_SECONDS, LONGEST_PAUSE_SECONDS
        if not self.config.engine.on_gpu:
            self._fork_client = ForkClient(child_environment(self.config), self._fork_server_command)
            self.fork_server = self._child("fork-server", self._fork_client.launch, state)
            launch = self._fork_client.fork
            quick_death_seconds, longest_pause_seconds = QUICK_FORK_DEATH_SECONDS, LONGEST_FORK_PAUSE_SECONDS
        self.workers = [
            self._child(
                f"worker-{i + 1}",
                launch,
                state,
                on_death=self.release_leases_of,
                quick_death_seconds=quick_death_seconds,
                longest_pause_seconds=longest_pause_seconds,
            )
            for i in range(self._count)
        ]

    def _command(self, command: list[str], umask: int = PRIVATE_UMASK) -> Command:
        return Command(command, child_environment(self.config), umask=umask)

    def _child(
        self,
        name: str,
        launch: Launch,
        state: Path,
        *,
        on_death: Callable[[int, int], None] | None = None,
        quick_death_seconds: float = QUICK_DEATH_SECONDS,
        longest_pause_seconds: float = LONGEST_PAUSE_SECONDS,
    ) -> Child:
        log_path = state / f"{name}.log"
        begin_log(log_path)
        return Child(
            name,
            launch,
            log_path=log_path,
            final_codes=frozenset({UNUSABLE}),
            quick_death_seconds=quick_death_seconds,
            longest_pause_seconds=longest_pause_seconds,
            on_death=on_death,
        )

    async def _wait_for_workers(self) -> None:
        """Wait until each worker has registered."""
        async with await Broker.open(self.config.broker) as broker:
            for worker in self.workers:

                async def has_registered(worker: Child = worker) -> bool:
                    pid = worker.pid
                    registered = {info.process for info in await broker.models.workers()}
                    return pid is not None and process_name(pid) in registered

                what = f"{worker.name} to load {self.config.engine.model}"
                await self._until(what, worker, has_registered, WORKER_START_SECONDS)

    async def _until(self, what: str, child: Child, ready: Callable[[], Awaitable[bool]], within: float) -> None:
        self._report(f"waiting for {what}")
        deadline = time.monotonic() + within
        while not await ready():
            for task in self._tasks:
                if task.done():
                    task.result()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"waited {within:g} s for {what}; see {child.log_path}")
            await asyncio.sleep(POLL_SECONDS)

    async def _gateway_answers(self) -> bool:
        try:
            async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
                return (await client.get(f"{self.url}/healthz")).is_success
        except httpx.HTTPError:
            return False

    # While it runs

    def release_leases_of(self, pid: int, code: int) -> None:
        """Release the leases of a worker process that has exited, so that its jobs restart now."""
        release = release_leases_of(self.config.broker, pid, code)
        task = asyncio.create_task(release, name=f"lease release of {pid}")
        self._lease_releases.add(task)
        task.add_done_callback(self._lease_releases.discard)

    async def _rotate_logs(self, state: Path) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await asyncio.to_thread(rotate_all, state, self.config.log.max_bytes)

    # Stop

    async def stop(self) -> None:
        """Stop the processes: the gateway accepts no more requests, the workers drain, Redis stops last.

        A second call does nothing.
        """
        gateway = [] if self._gateway is None else [self._gateway]
        draining = [*self.helpers, *self.workers]
        for child in [*gateway, *draining]:
            child.stop()
        drain_seconds = self.config.worker.drain_seconds + STOP_MARGIN_SECONDS
        await asyncio.gather(*(child.ended(drain_seconds) for child in draining))
        if self.fork_server is not None and self._fork_client is not None:
            self.fork_server.stop()
            await self.fork_server.ended(STOP_MARGIN_SECONDS)
            await self._fork_client.closed()
        for child in gateway:
            await child.ended(self.config.gateway.drain_seconds + STOP_MARGIN_SECONDS)
        for task in (*self._tasks, *self._lease_releases):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._lease_releases, return_exceptions=True)
        self._tasks = []
        if self._redis is not None:
            await self._redis.stop()
            self._redis = None
        if self._folder is not None:
            self._folder.release()


def child_environment(config: Config) -> dict[str, str]:
    """The environment that gives a process these settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX) or k in STANDALONE}
    return {**kept, **config_environment(config)}


async def served_models(config: Config) -> list[str]:
    """The names of the models that workers serve now."""
    async with await Broker.open(config.broker) as broker:
        return sorted(card.name for card in await broker.models.cards())


def gateway_url(config: Config) -> str:
    """The URL of a gateway with these settings, for clients on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.gateway.host, config.gateway.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.gateway.port}"


def _physical_cores() -> int:
    """Number of cores that this process may use. The CPUs of one core count as one."""
    cpus = os.sched_getaffinity(0)
    try:
        return len(
            {Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in cpus}
        )
    except OSError:
        return len(cpus)
