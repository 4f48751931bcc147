"""The Gateway: what all requests of one process share. It knows no routes."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import JobRecord
from ktqueue.core.config import Config
from ktqueue.core.errors import (
    InvalidRequest,
    JournalRegressed,
    KtqueueError,
    QueueFull,
    RateLimitExceeded,
    TenantLimitReached,
    Unavailable,
)
from ktqueue.core.events import TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.prompt_size import check_text, check_token_ids, check_tokens
from ktqueue.core.request import GenerationRequest
from ktqueue.gateway.errors import ShuttingDown, UnknownEvent
from ktqueue.gateway.feed import Feed
from ktqueue.gateway.grammars import GrammarChecks
from ktqueue.gateway.http.auth import ApiKeys, Tenant
from ktqueue.gateway.http.body import BodyReader, JsonBody
from ktqueue.gateway.http.file_uploads import FileUploads
from ktqueue.gateway.http.sse import watch_disconnect
from ktqueue.gateway.metrics import Metrics
from ktqueue.openai.constraints import may_constrain
from ktqueue.profiling.writer import RecordWriter
from ktqueue.storage.opening import open_store

LARGE_PROMPT = 4_096  # characters or token ids; a smaller prompt costs a worker little
LATEST = ":latest"

logger = logging.getLogger(__name__)
Parsed = TypeVar("Parsed")


class Gateway:
    """Settings, broker, metrics, profile, API keys, bodies being read and open feeds of one process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()
        self.keys = ApiKeys(config.gateway)
        self.bodies = BodyReader(config.gateway)
        self.file_uploads = FileUploads(config.storage, config.gateway.stall_seconds)
        self.store = open_store(config.storage, config.broker.state_dir)
        self.grammars = GrammarChecks()
        self.profile = RecordWriter(config.profile, {"role": "gateway"}) if config.profile.folder else None
        self.draining = False
        self._broker: Broker | None = None
        self.feeds: set[Feed] = set()  # of all responses that are being made
        self._background: set[asyncio.Task[None]] = set()

    @property
    def broker(self) -> Broker:
        """The broker. Raises Unavailable before the start and after the stop."""
        if self._broker is None:
            raise Unavailable("the gateway has no broker yet")
        return self._broker

    async def open(self) -> None:
        """Open the broker. Raises Unavailable."""
        self._broker = await Broker.open(
            self.config.broker,
            max_mailbox_bytes=self.config.gateway.max_mailbox_bytes,
            patience=self.config.broker.connect_timeout,
        )

    async def read_body(self, request: Request, parse: Callable[[dict[str, Any], ModelCard | None], Parsed]) -> Parsed:
        """What `parse` makes of the request's JSON body and the card of its model, which is None if nobody serves it.

        A body without a model asks for the only one that is served. Raises what `BodyReader.read` and `parse` raise.
        """
        return await self.parse_body(await self.bodies.read(request), parse)

    async def parse_body(self, body: JsonBody, parse: Callable[[dict[str, Any], ModelCard | None], Parsed]) -> Parsed:
        """Do what `read_body` does, with a body that was read already."""
        if body.value.get("model") is None:
            body.value["model"] = await self.broker.models.only_name()
        model = body.value["model"]
        card = await self._card(model) if isinstance(model, str) else None
        if card is not None:
            body.value["model"] = card.name  # the client may have sent an alias
        if may_constrain(body.value):
            return await self.grammars.run(parse, body.value, card)
        return await self.bodies.run(body.size, parse, body.value, card)

    async def _card(self, name: str) -> ModelCard | None:
        """The card of a model. Ollama's clients may add `:latest` to its name."""
        card = await self.broker.models.card(name)
        if card is None and name.endswith(LATEST):
            card = await self.broker.models.card(name.removesuffix(LATEST))
        return card

    async def submit(
        self, tenant: Tenant, generation: GenerationRequest, *, idempotency_key: str | None, keep: float = 0.0
    ) -> JobRecord:
        """Submit a tenant's job within its limits. `keep` as in `Jobs.submit`.

        Raises what `Jobs.submit` raises, ContextLengthExceeded if the prompt cannot fit the model's context, and
        InvalidRequest for a token id that the model does not have or a grammar that takes too long to compile.
        """
        await self._check_prompt(generation)
        await self.grammars.check(generation.grammar, generation.grammar_field)
        try:
            with self._count_refusals(tenant):
                record = await self.broker.jobs.submit(
                    generation,
                    idempotency_key=idempotency_key,
                    tenant=tenant.name,
                    limits=tenant.limits,
                    keep=keep,
                    caller=tenant.caller,
                )
        except QueueFull:
            self.metrics.serves(generation.model)  # only a known model has a queue
            raise
        self.metrics.serves(generation.model)
        if record.tenant_usage is not None:
            self.metrics.tenant_jobs.labels(tenant.name).inc()
        return record

    async def _check_prompt(self, generation: GenerationRequest) -> None:
        """Refuse a large prompt here that a worker would refuse after much work, and wrong token ids.

        A worker checks them too, but then another prompt of the same call may have an answer that has begun.
        """
        text, ids = generation.prompt, generation.prompt_token_ids
        is_large = len(text or ids or ()) > LARGE_PROMPT and generation.truncate_prompt_tokens is None
        if not ids and not is_large:
            return
        card = await self.broker.models.card(generation.model)
        if card is None:
            return
        if text is not None:
            check_text(text, card.max_model_len, card.longest_token)
        if ids is not None:
            check_token_ids(ids, card.vocab_size)
            if generation.prompt_only and len(ids) > card.max_model_len:  # no completion needs room
                wanted = f"at most {card.max_model_len} token ids, the model's context"
                raise InvalidRequest.must_be("prompt_token_ids", wanted, len(ids), limit=card.max_model_len)
            if is_large and not generation.prompt_only:
                check_tokens(len(ids), card.max_model_len)

    async def retry(self, tenant: Tenant, job_id: str) -> JobRecord:
        """Send a tenant's failed job again, within its limits. Raises what `Jobs.retry` raises."""
        with self._count_refusals(tenant):
            record = await self.broker.jobs.retry(job_id, limits=tenant.limits, caller=tenant.caller)
        if record.tenant_usage is not None:
            self.metrics.tenant_jobs.labels(tenant.name).inc()
        return record

    @contextmanager
    def _count_refusals(self, tenant: Tenant) -> Iterator[None]:
        try:
            yield
        except (TenantLimitReached, RateLimitExceeded) as error:
            self.metrics.tenant_refusals.labels(tenant.name, error.code).inc()
            raise

    @contextmanager
    def follow(
        self, request: Request, job_ids: Sequence[str], *, after: int = 0, lenient: bool = False
    ) -> Iterator[Feed]:
        """The events of these jobs for one response, closed at the end of the block.

        The feed is interrupted when the client of `request` leaves or the gateway stops. The body of `request` must
        have been read before.
        """
        feed = Feed(self.broker.journal, job_ids, after=after, lenient=lenient)
        self.feeds.add(feed)
        watcher = asyncio.create_task(watch_disconnect(request.receive, feed.interrupt))
        try:
            yield feed
        finally:
            watcher.cancel()
            self.feeds.discard(feed)
            self._run_in_background(feed.close())

    async def events_after(self, job_id: str, after: int) -> list[TokenEvent]:
        """The events that a reader has missed if its last one was `after`. Raises JobNotFound, UnknownEvent."""
        try:
            return await self.broker.journal.replay(job_id, after, lenient=True)
        except JournalRegressed as error:
            raise UnknownEvent(
                f"Last-Event-ID must be at most {error.limit}, the last event of this job so far, got {after}; "
                "if Redis lost events, read the job again from its beginning",
                param="Last-Event-ID",
                limit=error.limit,
                value=after,
            ) from error

    def abandon(self, job_ids: Iterable[str]) -> None:
        """Cancel these jobs soon, because nobody waits for them."""
        for job_id in job_ids:
            self._run_in_background(self._cancel(job_id))

    def interrupt(self) -> None:
        """End all open streams with an error, after the time they had to end by themselves."""
        for feed in list(self.feeds):
            feed.interrupt(ShuttingDown("the gateway is shutting down; try again"))

    async def finish_background(self) -> None:
        """Wait until abandoned jobs are cancelled and feeds are closed."""
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    async def _cancel(self, job_id: str) -> None:
        try:
            await self.broker.jobs.cancel(job_id)
        except KtqueueError as error:
            # The job then runs to its end or its deadline.
            logger.warning("cannot cancel job %s, whose client left: %s", job_id, error.message)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
