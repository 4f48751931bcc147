"""Fixtures of the workers' tests: the built-in model in a real engine, a real Redis, and a worker between them."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import redis
import torch

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig, Config, EngineConfig, WorkerConfig
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest
from ktqueue.engine.engine import Engine
from ktqueue.loading.load import LoadedModel, load_model
from ktqueue.loading.tokenizer.encoded_prompt import EncodedPrompt
from ktqueue.loading.tokenizer.tokenizer import Tokenizer, load_tokenizer
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.workers.generation.generation_worker import GenerationWorker
from ktqueue.workers.generation.incarnation import NO_ROW_SECONDS
from ktqueue.workers.generation.request_encoder import RequestEncoder

ENGINE = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, num_pages=256, max_model_len=512, threads=1)
LEASE_SECONDS = 1.0


@dataclass(frozen=True)
class Model:
    """The built-in model and its tokenizer, loaded once for all tests."""

    loaded: LoadedModel
    tokenizer: Tokenizer
    _undisturbed: dict[str, list[tuple[list[int], str]]] = field(default_factory=dict)

    def engine(
        self,
        config: EngineConfig = ENGINE,
        module: Callable[..., Any] | None = None,
        planner: AttentionPlanner | None = None,
        kind: type[Engine] = Engine,
    ) -> Engine:
        """An engine of class `kind`. With a planner it has the parts for a device, which is the CPU here."""
        assert config.num_pages is not None
        assert config.max_model_len is not None
        layout = self.loaded.kv_layout(config.page_size)
        model = module or self.loaded.module
        pages, length = config.num_pages, config.max_model_len
        return kind(model, self.tokenizer, layout, config, pages, length, planner=planner)

    def encode(self, request: GenerationRequest) -> EncodedPrompt:
        """What a worker makes of a request."""
        encoder = RequestEncoder(self.tokenizer, ENGINE.max_model_len or 0)
        try:
            return encoder(request)
        finally:
            encoder.close()

    def card(self, config: EngineConfig = ENGINE) -> ModelCard:
        return ModelCard(
            name="demo",
            created=1,
            max_model_len=config.max_model_len or 0,
            vocab_size=self.tokenizer.size,
            architecture="qwen3moe",
            quantization="q4_0",
            max_num_seqs=config.rows,
        )

    def undisturbed(self, request: GenerationRequest) -> list[tuple[list[int], str]]:
        """Token ids and text of each choice, from an engine without other requests; computed once for all tests."""
        if repr(request) not in self._undisturbed:
            self._undisturbed[repr(request)] = self._compute(request)
        return deepcopy(self._undisturbed[repr(request)])

    def _compute(self, request: GenerationRequest) -> list[tuple[list[int], str]]:
        engine = self.engine()
        encoded = self.encode(request)
        engine.add("one", encoded.token_ids, request.sampling, matcher=encoded.matcher)
        choices: list[tuple[list[int], str]] = [([], "") for _ in range(request.sampling.n)]
        while engine.has_work:
            for output in engine.step():
                ids, text = choices[output.index]
                choices[output.index] = (ids + list(output.token_ids), text + output.text)
        return choices


@pytest.fixture(scope="session")
def model() -> Model:
    torch.set_num_threads(1)
    return Model(
        load_model("demo", rules=None, device="cpu", dtype=torch.float32, progress=None), load_tokenizer("demo")
    )


@pytest.fixture
def hang() -> Iterator[Callable[..., Any]]:
    """A model whose call returns only when the test is over."""
    over = threading.Event()

    def forward(*args: Any, **kwargs: Any) -> Any:
        over.wait()
        raise RuntimeError("the test is over")

    yield forward
    over.set()


@pytest.fixture
async def broker(redis_url: str, model: Model) -> AsyncIterator[Broker]:
    """A broker that knows the model, so that jobs can be submitted before a worker runs."""
    async with await Broker.open(BrokerConfig(url=redis_url, lease_seconds=LEASE_SECONDS)) as opened:
        await (await Lease.register(opened, model.card())).close()
        yield opened


@pytest.fixture
def lose_lease(broker: Broker) -> Callable[[str], None]:
    """Expire a worker's lease now, as if it had not renewed it."""

    def lose(lease_id: str) -> None:
        with redis.Redis.from_url(broker.config.url or "") as client:
            assert client.zadd(f"{broker.keys.tag}:leases", {lease_id: 1}, xx=True, ch=True) == 1

    return lose


@dataclass
class Running:
    """A running worker, its engine, and the task that runs it."""

    worker: GenerationWorker
    engine: Engine
    task: asyncio.Task[None]

    async def drained(self) -> None:
        self.worker.drain()
        await self.task

    async def killed(self) -> None:
        """End it without a drain, as after kill -9: its lease expires."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


StartWorker = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def start_worker(model: Model, broker: Broker) -> StartWorker:
    """`async with start_worker() as running:` runs a worker. At the end it drains, unless it has ended."""

    @contextlib.asynccontextmanager
    async def start(
        engine: Engine | None = None,
        engine_config: EngineConfig = ENGINE,
        *,
        tokenizer: Any = None,
        no_row_seconds: float = NO_ROW_SECONDS,
        **worker_settings: float,
    ) -> AsyncIterator[Running]:
        engine = engine or model.engine(engine_config)
        config = Config(
            broker=broker.config,
            engine=engine_config,
            worker=replace(WorkerConfig(drain_seconds=0.0, stall_seconds=30.0), **worker_settings),
        )
        worker = GenerationWorker(
            engine,
            tokenizer or model.tokenizer,
            broker,
            model.card(engine_config),
            config,
            no_row_seconds=no_row_seconds,
        )
        running = Running(worker, engine, asyncio.create_task(worker.run()))
        try:
            async with asyncio.timeout(10.0):
                while not running.task.done():
                    if await broker.models.workers():
                        break
                    await asyncio.sleep(0.01)
            yield running
        finally:
            if not running.task.done():
                await running.drained()

    return start


@dataclass(frozen=True)
class Observed:
    """A finished job: its events in order, and each choice's ids and text."""

    events: list[TokenEvent]
    choices: list[tuple[list[int], str]]

    @property
    def last(self) -> TokenEvent:
        return self.events[-1]

    @property
    def state(self) -> JobState | None:
        return self.last.state


def observe(events: list[TokenEvent], n: int) -> Observed:
    """Check what holds for every finished journal, and add up its choices."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.state is not None for event in events] == [False] * (len(events) - 1) + [True]
    choices: list[tuple[list[int], str]] = [([], "") for _ in range(n)]
    for event in events:
        ids, text = choices[event.index]
        choices[event.index] = (ids + list(event.token_ids), text + event.text)
    return Observed(events, choices)


@pytest.fixture
def finished(broker: Broker) -> Callable[..., Any]:
    """`await finished(job_id, n=1)` follows the job to its end."""

    async def wait(job_id: str, n: int = 1, within: float = 20.0) -> Observed:
        async with asyncio.timeout(within):
            live = [event async for event in broker.journal.follow(job_id)]
        assert live == await broker.journal.replay(job_id)
        record = await broker.jobs.get(job_id)
        assert record.state == live[-1].state
        assert record.worker_id is None or record.state.terminal
        return observe(live, n)

    return wait
