"""A whole installation as real processes: Redis, gateway and workers under the supervisor, and an HTTP client."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ktqueue.core.config import (
    BridgeConfig,
    BrokerConfig,
    Config,
    ControlConfig,
    EngineConfig,
    GatewayConfig,
    WorkerConfig,
)
from ktqueue.workers.supervision.fork_client import COMMAND as FORK_SERVER_COMMAND
from ktqueue.workers.supervision.supervisor import Supervisor


@dataclass
class JobReader:
    """The events that one reader of a job saw, over any number of connections."""

    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def last_seq(self) -> int:
        return self.events[-1]["seq"] if self.events else 0

    @property
    def ended(self) -> bool:
        return bool(self.events) and "state" in self.events[-1]

    @property
    def state(self) -> str | None:
        return self.events[-1].get("state") if self.events else None

    @property
    def longest_gap(self) -> float:
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))

    def choices(self, n: int = 1) -> list[tuple[list[int], str]]:
        """Token ids and text of each choice. Fails if an event is missing or repeated."""
        assert [event["seq"] for event in self.events] == list(range(1, len(self.events) + 1))
        assert [i for i, event in enumerate(self.events) if "state" in event] in ([], [len(self.events) - 1])
        choices: list[tuple[list[int], str]] = [([], "") for _ in range(n)]
        for event in self.events:
            ids, text = choices[event["index"]]
            choices[event["index"]] = (ids + event.get("token_ids", []), text + event.get("text", ""))
        return choices


@dataclass
class Installation:
    """A running installation and an HTTP client of it."""

    up: Supervisor
    http: httpx.AsyncClient

    async def submit(self, **body: Any) -> str:
        """POST /v1/jobs, repeated while no worker is known or the queue is full."""
        async with asyncio.timeout(30):
            while True:
                answer = await self.http.post("/v1/jobs", json={"model": "demo", **body})
                if answer.status_code not in (429, 503):
                    break
                await asyncio.sleep(0.1)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    async def job(self, job_id: str) -> dict[str, Any]:
        answer = await self.http.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def until_ready(self) -> None:
        """Wait until GET /readyz returns 200."""
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await self.http.get("/readyz")).status_code == 200:
                        return
                await asyncio.sleep(0.05)

    async def read(
        self,
        job_id: str,
        stream: JobReader | None = None,
        *,
        leave_after: int | None = None,
        on_event: Callable[[int], None] | None = None,
    ) -> JobReader:
        """Read the job's events after those in `stream`, up to its end or `leave_after` further events."""
        stream = JobReader() if stream is None else stream
        headers = {"Last-Event-ID": str(stream.last_seq)} if stream.events else {}
        async with self.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
            assert answer.status_code == 200, answer.status_code
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                stream.events.append(json.loads(line.removeprefix("data: ")))
                stream.times.append(time.monotonic())
                if on_event is not None:
                    on_event(len(stream.events))
                if leave_after is not None:
                    leave_after -= 1
                    if leave_after <= 0:
                        break
        return stream


@pytest.fixture(autouse=True)
def _quick_starts(quick_starts: None) -> None:
    """Of gateways, fork servers and arq's workers."""


StartStack = Callable[..., AbstractAsyncContextManager[Installation]]


@pytest.fixture(scope="session")
def start_stack(tmp_path_factory: pytest.TempPathFactory) -> StartStack:
    """`async with start_stack(workers=2) as stack:`."""

    @contextlib.asynccontextmanager
    async def start(
        *,
        workers: int = 1,
        broker: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        bridge: BridgeConfig | None = None,
        control: ControlConfig | None = None,
        fork_server_command: Sequence[str] = FORK_SERVER_COMMAND,
        **worker: Any,
    ) -> AsyncIterator[Installation]:
        state_dir = tmp_path_factory.mktemp("state")
        config = Config(
            broker=BrokerConfig(**{"state_dir": str(state_dir), **(broker or {})}),
            engine=EngineConfig(**{"num_pages": 1024, "threads": 1, **(engine or {})}),
            worker=WorkerConfig(**worker),
            gateway=GatewayConfig(port=0, drain_seconds=2.0),
            bridge=bridge or BridgeConfig(),
            control=control or ControlConfig(enabled=False),
        )
        async with Supervisor(config, workers=workers, fork_server_command=fork_server_command) as up:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
            async with httpx.AsyncClient(base_url=up.url, timeout=60.0, limits=limits, trust_env=False) as http:
                yield Installation(up, http)

    return start


shared: list[Installation] = []


@pytest_asyncio.fixture(loop_scope="session")
async def stack(request: pytest.FixtureRequest, start_stack: StartStack) -> Installation:
    """One worker with eight rows: one installation for all tests of this folder that need no other."""
    if not shared:
        stops = contextlib.AsyncExitStack()
        shared.append(await stops.enter_async_context(start_stack(engine={"max_num_seqs": 8, "max_model_len": 2048})))
        loop = asyncio.get_running_loop()
        folder = request.node.getparent(pytest.Directory)
        folder.addfinalizer(lambda: loop.run_until_complete(stops.aclose()))
        folder.addfinalizer(shared.clear)
    await shared[0].until_ready()
    return shared[0]
