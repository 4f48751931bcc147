"""ktqueue: the broker as a worker uses it, with an engine that does nothing: what the queue itself costs.

The worker registers a lease, beats, claims as many jobs as it has room for, ends each with one event, and commits while
it claims the next ones, by the worker's own outbox; like every worker it reaps. Both run under uvloop, as our gateway
and our workers do.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from benchmarks.queue.adapters.roles import Settings, Submit, main
from benchmarks.queue.adapters.starts import StartWriter
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.events import FinishReason, JobState, TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.workers.generation.heartbeat import BEATS_PER_LEASE
from ktqueue.workers.generation.incarnation import IDLE_SECONDS
from ktqueue.workers.generation.outbox import Outbox

MOST_QUEUED = 1_000_000
HOLD = "hold"
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


LAST = TokenEvent(
    seq=1,
    token_ids=(1,),
    text="x",
    finish_reason=FinishReason.LENGTH,
    state=JobState.DONE,
    usage=Usage(prompt_tokens=1, completion_tokens=1),
)


def model_card(slots: int, max_model_len: int = 512) -> ModelCard:
    """The card of a model that is not computed."""
    return ModelCard(
        name="none", created=1, max_model_len=max_model_len, vocab_size=256, architecture="none", quantization="none",
        max_num_seqs=slots,
    )  # fmt: skip


async def keep_lease(lease: Lease, config: BrokerConfig) -> None:
    """Renew a lease as often as a worker does, until cancelled."""
    while True:
        await lease.beat({})
        await asyncio.sleep(config.lease_seconds / BEATS_PER_LEASE)


def broker_config(settings: Settings) -> BrokerConfig:
    """Our defaults, except for the limit of queued jobs and the lease, if one is given."""
    config = BrokerConfig(url=settings.url, max_queued_interactive=MOST_QUEUED)
    return config if settings.lease is None else replace(config, lease_seconds=settings.lease)


@asynccontextmanager
async def open_client(settings: Settings) -> AsyncIterator[Submit]:
    """Submit as the gateway does."""
    async with await Broker.open(broker_config(settings)) as broker:
        await (await Lease.register(broker, model_card(settings.slots))).close()  # makes the model known

        async def submit(number: int, *, hold: bool) -> None:
            request = GenerationRequest(model="none", prompt=HOLD if hold else "go", sampling=GREEDY, user=str(number))
            await broker.jobs.submit(request)

        yield submit


async def work(settings: Settings, starts: StartWriter, ready: Callable[[], None]) -> None:
    """Run jobs until the process ends."""
    config = broker_config(settings)
    broker = await Broker.open(config)
    lease = await Lease.register(broker, model_card(settings.slots))
    outbox = Outbox(lease, lambda _: None, steps_ahead=1)
    async with asyncio.TaskGroup() as group:
        group.create_task(keep_lease(lease, config))
        group.create_task(broker.reaper().run())
        group.create_task(outbox.run())
        ready()
        while True:
            claims = await lease.claim(settings.slots, wait=True) or await lease.wait_for_work(IDLE_SECONDS)
            if not claims:
                continue
            for claim in claims:
                starts.record(int(claim.request.user or 0))
                if claim.request.prompt != HOLD:
                    outbox.put(claim.job_id, LAST)
            await outbox.has_room()
            outbox.seal()


if __name__ == "__main__":
    main(open_client, work)
