"""Stored responses, and how long the job of a response can be read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.broker.responses import Responses, StoredResponse
from ktqueue.core.config import BrokerConfig
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest

SIZE = 2_000  # characters of each response's text


def response(text: str) -> StoredResponse:
    return StoredResponse([{"role": "user", "content": text.ljust(SIZE)}], {})


@pytest.fixture
def responses(broker: Broker, config: BrokerConfig) -> Responses:
    return Responses(broker.scripts, replace(config, max_response_bytes=10 * SIZE))


async def names(responses: Responses, count: int) -> list[int]:
    return [number for number in range(count) if await responses.find("a", str(number)) is not None]


async def test_the_oldest_responses_of_a_tenant_make_room(responses: Responses, broker: Broker, raw: Any) -> None:
    await responses.store("b", "0", response("of another tenant"))
    for number in range(30):
        await responses.store("a", str(number), response(str(number)))
        kept = await names(responses, number + 1)
        assert kept == list(range(kept[0], number + 1))
        assert sum(raw.strlen(key) for key in raw.scan_iter(f"{broker.keys.tag}:response:*")) <= 11 * SIZE
    assert 7 <= len(kept) <= 10
    await responses.store("a", "29", response("anew"))  # takes the place of the old one
    assert await names(responses, 30) == kept
    assert await responses.find("b", "0") == response("of another tenant")


async def test_what_was_deleted_or_has_expired_leaves_room(responses: Responses, broker: Broker, raw: Any) -> None:
    for number in range(8):
        await responses.store("a", str(number), response(str(number)))
    await responses.delete("a", "0")
    for key in list(raw.scan_iter(f"{broker.keys.tag}:response:*"))[:4]:
        raw.delete(key)  # as if it had expired
    left = await names(responses, 8)
    for number in range(8, 12):
        await responses.store("a", str(number), response(str(number)))
    assert await names(responses, 12) == [*left, 8, 9, 10, 11]
    raw.delete(f"{broker.keys.tag}:responses:bytes:a")  # older versions have no sum
    await responses.store("a", "12", response("12"))
    assert await names(responses, 13) == [*left, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("end", ["done", "cancelled"])
async def test_a_job_can_be_read_for_as_long_as_its_submitter_wants(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any, end: str
) -> None:
    lease = await Lease.register(broker, card)
    job, usual = [await broker.jobs.submit(make_request(), keep=keep) for keep in (100_000.0, 0.0)]
    await lease.claim(2)
    for record in (job, usual):
        if end == "cancelled":
            await broker.jobs.cancel(record.id)
        await lease.commit([(record.id, TokenEvent(seq=1, state=JobState(end)))])
    await lease.close()
    for kind in ("job", "journal"):
        times = [raw.pttl(f"{broker.keys.tag}:{kind}:{record.id}") for record in (job, usual)]
        assert times[0] > 99_000_000 > times[1] > 0
    assert (await broker.jobs.get(job.id)).state is JobState(end)


async def test_a_model_is_looked_up_once_for_many_requests(broker: Broker, card: ModelCard, raw: Any) -> None:
    lease = await Lease.register(broker, card)
    assert await broker.models.card(card.name) == card
    calls = raw.info("commandstats")["cmdstat_evalsha"]["calls"]
    for _ in range(20):
        assert await broker.models.card(card.name) == card
    assert raw.info("commandstats")["cmdstat_evalsha"]["calls"] - calls < 10  # heartbeats call too
    other = await Lease.register(broker, replace(card, name="other"))
    assert (await broker.models.card("other") or card).name == "other"  # a new model is seen at once
    assert await broker.models.card("unknown") is None
    await lease.close()
    await other.close()
