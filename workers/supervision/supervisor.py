"""Supervisor: the processes of `ktqueue up`: a private Redis, the gateway, the workers, arq's helpers.

They start in order, are restarted when they die, stop in order, and never outlive this process. A library: it
installs no signal handlers unless `run_until_signal` is called. Knows the processes only by their commands.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from ktqueue.broker.broker import Broker
from ktqueue.broker.process_name import process_name
from ktqueue.broker.redis.state_folder import PRIVATE_UMASK, StateFolder
from ktqueue.core.config import ENVIRONMENT_PREFIX, STANDALONE, Config, config_environment
from ktqueue.core.errors import ConfigError
from ktqueue.workers.exit_codes import UNUSABLE
from ktqueue.workers.supervision.child import Child, ProcessFailed
from ktqueue.workers.supervision.forks import Forks
from ktqueue.workers.supervision.lease_release import bury
from ktqueue.workers.supervision.log_files import CHECK_SECONDS, begin_log, rotate_all
from ktqueue.workers.supervision.private_redis import PrivateRedis
from ktqueue.workers.supervision.process import Command, Launch

GATEWAY_START_SECONDS = 30.0
WORKER_START_SECONDS = 1_800.0  # a large model takes its time to load
STOP_MARGIN = 7.0  # seconds that a process has beyond its drain_seconds before it is killed
POLL_SECONDS = 0.05
# Of a forked worker, in seconds: it serves after a tenth of one. Whoever waits for its rows waits for its pauses too.
QUICK_FORK_DEATH, LONGEST_FORK_PAUSE = 2.0, 0.5

WORKER_COMMAND = [sys.executable, "-P", "-m", "ktqueue.workers.generation.worker_process"]
GATEWAY_COMMAND = [sys.executable, "-P", "-m", "ktqueue.gateway"]
BRIDGE_COMMAND = [sys.executable, "-P", "-m", "ktqueue.workers.arq.bridge"]
CONTROL_COMMAND = [sys.executable, "-P", "-m", "ktqueue.workers.arq.control"]

log = logging.getLogger(__name__)


class Supervisor:
    """`async with Supervisor(config, workers=2) as up:` runs everything; inside, `up.url` answers HTTP.

    `report` gets one line for each thing that is waited for. Logs go to `state_dir/NAME.log`, `log.max_bytes` at most;
    what is older, or of the run before, is kept as `NAME.log.1`. Entering raises ProcessFailed, ConfigError or
    Unavailable.
    """

    def __init__(self, config: Config, *, workers: int = 1, report: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.gateway: Child
        self.workers: list[Child] = []
        self.fork_server: Child | None = None  # of workers on the CPU
        self.helpers: list[Child] = []  # arq's workers, where the configuration wants them
        self._count = workers
        self._report = report or log.info
        self._folder: StateFolder | None = None
        self._redis: PrivateRedis | None = None
        self._forks: Forks | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._burials: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where the gateway answers."""
        return gateway_url(self.config)

    @property
    def broker_url(self) -> str:
        """The Redis that is in use, password and all: not for logs."""
        assert self.config.broker.url is not None
        return self.config.broker.url

    @property
    def redis_pid(self) -> int | None:
        """Of the private Redis, while it runs."""
        return self._redis.pid if self._redis is not None else None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def wait(self) -> None:
        """Watch until a process cannot be kept running. Raises ProcessFailed."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def run_until_signal(self) -> None:
        """Watch until SIGINT, SIGTERM or SIGHUP. A second one, while things stop, kills the children.

        Raises ProcessFailed.
        """
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()

        def stop() -> None:
            if stopped.is_set():
                for child in [self.gateway, *self.helpers, *self.workers]:
                    child.signal(signal.SIGKILL)
            stopped.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop)
        tasks = [asyncio.ensure_future(one) for one in (self.wait(), stopped.wait())]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in done:
            task.result()

    async def stop(self) -> None:
        """The gateway stops accepting, the workers drain, Redis goes last. Does nothing the second time."""
        children = [*([self.gateway] if hasattr(self, "gateway") else []), *self.helpers, *self.workers]
        for child in children:
            child.stop()
        drain = self.config.worker.drain_seconds + STOP_MARGIN
        await asyncio.gather(*(child.ended(drain) for child in [*self.helpers, *self.workers]))
        if self.fork_server is not None and self._forks is not None:
            self.fork_server.stop()
            await self.fork_server.ended(STOP_MARGIN)
            await self._forks.closed()
        if hasattr(self, "gateway"):
            await self.gateway.ended(self.config.gateway.drain_seconds + STOP_MARGIN)
        for task in (*self._tasks, *self._burials):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._burials, return_exceptions=True)
        self._tasks = []
        if self._redis is not None:
            await self._redis.stop()
            self._redis = None
        if self._folder is not None:
            self._folder.release()

    def bury(self, pid: int, code: int) -> None:
        """A worker's process has ended: let its jobs go on before its lease lapses."""
        task = asyncio.create_task(bury(self.config.broker, pid, code), name=f"burial of {pid}")
        self._burials.add(task)
        task.add_done_callback(self._burials.discard)

    # Start

    async def _start(self) -> None:
        self._folder = StateFolder.open(self.config.broker.state_dir)
        self._folder.hold()
        state = self._folder.path
        self._tasks.append(asyncio.create_task(self._keep_logs_short(state), name="log rotation"))
        await self._find_redis(state)
        port = _claim_port(self.config.gateway.host, self.config.gateway.port)
        self.config = replace(self.config, gateway=replace(self.config.gateway, port=port))
        if self.config.engine.threads is None and self._count > 1:  # the workers share the machine
            threads = max(1, _physical_cores() // self._count)
            self.config = replace(self.config, engine=replace(self.config.engine, threads=threads))
        share = self.config.engine.host_memory_utilization / self._count
        self.config = replace(self.config, engine=replace(self.config.engine, host_memory_utilization=share))
        self.gateway = self._child("gateway", GATEWAY_COMMAND, state)
        launch, pauses = self._worker_launch(state)
        self.workers = [
            self._supervised(f"worker-{i + 1}", launch, state, on_death=self.bury, **pauses) for i in range(self._count)
        ]
        if self.config.bridge.enabled:
            self.helpers.append(self._child("bridge", BRIDGE_COMMAND, state))
        if self.config.control.enabled:
            self.helpers.append(self._child("control", CONTROL_COMMAND, state, umask=-1))  # batches are the user's
        loading = [] if self.fork_server is None else [self.fork_server]
        children = [self.gateway, *loading, *self.workers, *self.helpers]
        self._tasks += [asyncio.create_task(child.run(), name=child.name) for child in children]
        await self._until("the gateway", self.gateway, self._gateway_answers, GATEWAY_START_SECONDS)
        broker = await Broker.open(self.config.broker)
        try:
            for worker in self.workers:

                async def serves(worker: Child = worker) -> bool:
                    pid = worker.pid
                    return pid is not None and process_name(pid) in {
                        one.process for one in await broker.models.workers()
                    }

                what = f"{worker.name} to load {self.config.engine.model}"
                await self._until(what, worker, serves, WORKER_START_SECONDS)
        finally:
            await broker.close()

    async def _find_redis(self, state: Path) -> None:
        if self.config.broker.url is None:
            self._report("starting a private Redis")
            self._redis = PrivateRedis(state, self.config.broker.durability)
            url = await self._redis.start()
            self.config = replace(self.config, broker=replace(self.config.broker, url=url))
            self._tasks.append(asyncio.create_task(self._redis.run(), name="redis"))

    def _worker_launch(self, state: Path) -> tuple[Launch, dict[str, float]]:
        """How a worker comes to be, and when it does so again, as Child takes that."""
        if self.config.engine.on_gpu:  # what a device holds cannot be forked
            return Command(WORKER_COMMAND, self._environment()), {}
        self._forks = Forks(self._environment())
        self.fork_server = self._supervised("fork-server", self._forks.launch, state)
        return self._forks.fork, {"quick_death": QUICK_FORK_DEATH, "longest_pause": LONGEST_FORK_PAUSE}

    async def _keep_logs_short(self, state: Path) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await asyncio.to_thread(rotate_all, state, self.config.log.max_bytes)

    def _child(self, name: str, command: list[str], state: Path, umask: int = PRIVATE_UMASK) -> Child:
        return self._supervised(name, Command(command, self._environment(), umask=umask), state)

    def _supervised(
        self,
        name: str,
        launch: Launch,
        state: Path,
        on_death: Callable[[int, int], None] | None = None,
        **pauses: float,
    ) -> Child:
        log_path = state / f"{name}.log"
        begin_log(log_path)
        return Child(
            name,
            launch,
            log_path=log_path,
            final_codes=frozenset({UNUSABLE}),
            on_death=on_death,
            **pauses,
        )

    def _environment(self) -> dict[str, str]:
        return child_environment(self.config)

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


def child_environment(config: Config) -> dict[str, str]:
    """The environment of a process that is to have these settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX) or k in STANDALONE}
    return {**kept, **config_environment(config)}


async def served_models(config: Config) -> list[str]:
    """The names of the models that workers serve."""
    async with await Broker.open(config.broker) as broker:
        return sorted(card.name for card in await broker.models.cards())


def gateway_url(config: Config) -> str:
    """Where a gateway with these settings answers, for clients on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.gateway.host, config.gateway.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.gateway.port}"


def _physical_cores() -> int:
    """Cores that this process may use; two CPUs of one core count once."""
    cpus = os.sched_getaffinity(0)
    try:
        return len(
            {Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in cpus}
        )
    except OSError:
        return len(cpus)


def _claim_port(host: str, port: int) -> int:
    """The port if it can be had (0: any that can). Raises ConfigError."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            return int(one.getsockname()[1])
    except OSError as error:
        raise ConfigError(
            f"gateway.host {host} with gateway.port {port} cannot be listened on: {error.strerror}",
            param="gateway.port",
            value=port,
        ) from error
