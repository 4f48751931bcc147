"""GenerationWorker: one process's engine at work: an incarnation after another, until it is told to drain.

Crash-only: when the engine breaks or hangs, `run` raises, the process ends, and its jobs go on elsewhere.
"""

import asyncio
import functools
import logging

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import Config
from ktqueue.core.errors import LeaseLost, Unavailable
from ktqueue.core.model_card import ModelCard
from ktqueue.engine.engine import Engine
from ktqueue.loading.tokenizer.template_process import TemplateProcesses
from ktqueue.loading.tokenizer.tokenizer import Tokenizer
from ktqueue.workers.generation.admission import Tokeniser
from ktqueue.workers.generation.engine_thread import EngineThread
from ktqueue.workers.generation.incarnation import Incarnation

RETRY_SECONDS = 0.25

log = logging.getLogger(__name__)


class GenerationWorker:
    """Claims jobs for its engine's free rows, generates, and commits every step to the journals.

    The engine is called by one thread of its own; the caller must not touch it while `run` is under way.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, broker: Broker, card: ModelCard, config: Config) -> None:
        self._engine = EngineThread(engine)
        self._templates = None if tokenizer.template is None else TemplateProcesses(tokenizer.template)
        render = None if self._templates is None else self._templates.render
        encode = functools.partial(tokenizer.encode_request, max_model_len=card.max_model_len, render=render)
        self._tokeniser = Tokeniser(encode)
        self._broker = broker
        self._card = card
        self._config = config
        self._draining = asyncio.Event()
        self.incarnations = 0
        self.lease_id: str | None = None  # of the incarnation at work

    def drain(self) -> None:
        """Stop claiming; `run` returns once the running jobs are done, or released after `drain_seconds`."""
        self._draining.set()

    @property
    def draining(self) -> bool:
        """`drain` was called."""
        return self._draining.is_set()

    async def run(self) -> None:
        """Work until drained. Raises EngineStalled or whatever broke the engine: the process must then end."""
        reaper = asyncio.create_task(self._reap(), name="reaper")
        if self._templates is not None:
            self._templates.start()
        try:
            while (lease := await self._register()) is not None:
                self.incarnations += 1
                self.lease_id = lease.id
                log.info("serving %s as %s", self._card.name, lease.id)
                incarnation = Incarnation(
                    lease, self._engine, self._tokeniser, self._config, self._card.max_num_seqs, self._draining
                )
                try:
                    await incarnation.run()
                except LeaseLost as error:
                    log.warning("%s: %s; starting anew", lease.id, error)
                    await lease.close()
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            reaper.cancel()
            await asyncio.gather(reaper, return_exceptions=True)
            self._tokeniser.close()
            if self._templates is not None:
                self._templates.close()
            self._engine.close()

    async def _reap(self) -> None:
        """Keep a reaper at work: where there is no gateway, the workers look after each other's jobs."""
        while True:
            try:
                await self._broker.reaper().run()
            except Exception:
                log.exception("the reaper broke; starting it again")
                await asyncio.sleep(RETRY_SECONDS)

    async def _register(self) -> Lease | None:
        """A new lease, however long Redis takes to come back; None when draining."""
        while not self._draining.is_set():
            try:
                return await Lease.register(self._broker, self._card)
            except Unavailable as error:
                log.warning("cannot register: %s; trying again", error)
                await asyncio.sleep(RETRY_SECONDS)
        return None
