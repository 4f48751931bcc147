"""GenerationWorker: one engine and its leases, one incarnation after another, until the worker drains.

Crash-only: if the engine breaks or hangs, `run` raises, the process ends, and other workers continue its jobs.
"""

import asyncio
import logging
import time
from contextlib import suppress

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.broker.scripts import ScriptRefused
from ktqueue.core.config import Config
from ktqueue.core.errors import LeaseLost, Unavailable
from ktqueue.core.model_card import ModelCard
from ktqueue.engine.engine import Engine
from ktqueue.loading.tokenizer.tokenizer import Tokenizer
from ktqueue.profiling.writer import RecordWriter
from ktqueue.workers.generation.admission import TokeniserThreads
from ktqueue.workers.generation.engine_thread import EngineThread
from ktqueue.workers.generation.incarnation import NO_ROW_SECONDS, Incarnation
from ktqueue.workers.generation.request_encoder import RequestEncoder
from ktqueue.workers.startup.host_memory import available_memory

GRAMMAR_SHARE, LEAST_GRAMMAR_BYTES = 4, 1 << 30  # one part in so many of the memory that the cache may take
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.25, 8.0  # each failure in a row doubles the pause
STEADY_SECONDS = 30.0  # after which a failure is the first in a row

log = logging.getLogger(__name__)


class GenerationWorker:
    """Claims jobs for its engine's free rows, generates, and commits every step to the journals.

    One thread calls the engine. Nothing else may use the engine while `run` is active. `no_row_seconds` and `profile`:
    see `Incarnation`.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        broker: Broker,
        card: ModelCard,
        config: Config,
        *,
        no_row_seconds: float = NO_ROW_SECONDS,
        profile: RecordWriter | None = None,
    ) -> None:
        self._profile = profile
        self._engine = EngineThread(engine)
        grammar_bytes = int(available_memory() * config.engine.host_memory_utilization) // GRAMMAR_SHARE
        self._encoder = RequestEncoder(tokenizer, card.max_model_len, max(LEAST_GRAMMAR_BYTES, grammar_bytes))
        self._tokeniser = TokeniserThreads(self._encoder, self._encoder.has_room)
        self._broker = broker
        self._card = card
        self._config = config
        self._no_row_seconds = no_row_seconds
        self._draining = asyncio.Event()
        self.incarnations = 0
        self.lease_id: str | None = None  # of the current incarnation

    def drain(self) -> None:
        """Stop claiming. `run` returns when the running jobs are done, or are released after `worker.drain_seconds`."""
        self._draining.set()

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._draining.is_set()

    async def run(self) -> None:
        """Work until drained. Raises EngineStalled, or whatever broke the engine; the process must then end."""
        # Workers recover each other's jobs also without a gateway.
        reaper = asyncio.create_task(self._broker.reaper().run(), name="reaper")
        self._encoder.start()
        failures = 0
        try:
            while (lease := await self._register()) is not None:
                self.incarnations += 1
                self.lease_id = lease.id
                log.info("serving %s as %s", self._card.name, lease.id)
                incarnation = Incarnation(
                    lease,
                    self._engine,
                    self._tokeniser,
                    self._config,
                    self._card.max_num_seqs,
                    self._draining,
                    self._no_row_seconds,
                    self._profile,
                )
                began = time.monotonic()
                try:
                    await incarnation.run()
                except LeaseLost as error:
                    log.warning("%s: %s; registering again", lease.id, error)
                    await lease.close()
                    failures = 0 if time.monotonic() - began > STEADY_SECONDS else failures
                    await self._pause(failures)
                    failures += 1
        finally:
            reaper.cancel()
            await asyncio.gather(reaper, return_exceptions=True)
            self._tokeniser.close()
            self._encoder.close()
            self._engine.close()

    async def _register(self) -> Lease | None:
        """Return a new lease, however long Redis is away, or None once the worker drains."""
        refusals = 0
        while not self._draining.is_set():
            try:
                return await Lease.register(self._broker, self._card)
            except (Unavailable, ScriptRefused) as error:
                log.warning("cannot register, will try again: %s", error)
                refusals += isinstance(error, ScriptRefused)
                await self._pause(refusals)
        return None

    async def _pause(self, failures: int) -> None:
        """Wait before the next attempt, unless the worker drains. `failures`: in a row, which an outage is not."""
        seconds = min(LONGEST_RETRY_SECONDS, RETRY_SECONDS * 2 ** min(failures, 10))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._draining.wait(), seconds)
