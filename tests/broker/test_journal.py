"""Readers see each event once and in order, despite lost messages, lost connections and slow consumers."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from processes import until

from ktqueue.broker.broker import Broker
from ktqueue.broker.journal import Journal
from ktqueue.broker.lease import Lease
from ktqueue.broker.scripts import Scripts
from ktqueue.core.codec import encode_event
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import InvalidRequest, JobNotFound, JournalRegressed, LeaseLost
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest


@pytest.fixture
async def job(broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]) -> Any:
    """A running job, and a function that commits its next events."""

    class Running:
        def __init__(self, lease: Any, job_id: Any) -> None:
            self.lease, self.id, self.seq = lease, job_id, 0

        async def write(self, count: Any = 1, *, size: Any = 1, end: Any = False) -> None:
            for k in range(count):
                self.seq += 1
                state = JobState.DONE if end and k == count - 1 else None
                await self.lease.commit([(self.id, TokenEvent(seq=self.seq, text="x" * size, state=state))])

    lease = await Lease.register(broker, card)
    record = await broker.jobs.submit(make_request())
    await lease.claim(1)
    yield Running(lease, record.id)
    await lease.close()


async def seqs(broker: Any, job_id: Any, after: Any = 0) -> Any:
    return [event.seq async for event in broker.journal.follow(job_id, after)]


async def test_follow_replays_the_journal_and_then_yields_new_events(broker: Broker, job: Any) -> None:
    await job.write(5)
    early, late = asyncio.create_task(seqs(broker, job.id)), asyncio.create_task(seqs(broker, job.id, 3))
    await asyncio.sleep(0.05)
    await job.write(20, end=True)
    async with asyncio.timeout(5):
        assert await early == list(range(1, 26))
        assert await late == list(range(4, 26))
    assert await seqs(broker, job.id, 24) == [25]


async def test_the_whole_journal_is_read_once_its_job_has_ended(
    broker: Broker, job: Any, raw: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    """The end is announced, happened before, came from an older version that announces none, or never will."""

    async def nobody_waits() -> bool:
        return broker.keys.ends_channel not in broker.hub.channels

    silent = await broker.jobs.submit(make_request())
    early, late = (
        asyncio.create_task(broker.journal.whole(job.id)),
        asyncio.create_task(broker.journal.whole(silent.id)),
    )
    await job.write(3)
    await asyncio.sleep(0.3)
    assert not early.done()
    await job.write(end=True)
    async with asyncio.timeout(0.2):  # an unannounced end is found after half a second
        assert [event.seq for event in await early] == [1, 2, 3, 4]
    async with asyncio.timeout(0.2):
        assert await broker.journal.whole(job.id) == await broker.journal.replay(job.id)
    raw.xadd(broker.keys.journal_channel(silent.id), {"e": encode_event(TokenEvent(seq=1, state=JobState.DONE))}, "1-0")
    raw.hset(f"{broker.keys.tag}:job:{silent.id}", "state", "done")
    async with asyncio.timeout(6):
        assert [event.state for event in await late] == [JobState.DONE]
        with pytest.raises(JobNotFound):
            await broker.journal.whole("job-unknown")
    await until(nobody_waits)


async def test_new_events_arrive_without_delay(broker: Broker, job: Any) -> None:
    loop = asyncio.get_running_loop()
    events = broker.journal.follow(job.id)
    first = asyncio.create_task(anext(events))
    await asyncio.sleep(0.1)
    began = loop.time()
    await job.write()
    await first
    assert loop.time() - began < 0.3
    await events.aclose()


async def test_a_long_journal_is_replayed_in_pages(broker: Broker, job: Any) -> None:
    await job.lease.commit([(job.id, TokenEvent(seq=seq)) for seq in range(1, 2_345)])
    job.seq = 2_344
    await job.write(end=True)
    assert await seqs(broker, job.id) == list(range(1, 2_346))
    assert [event.seq for event in await broker.journal.replay(job.id, 1_000)] == list(range(1_001, 2_346))


class MeasuredScripts(Scripts):
    """Calls the scripts of a broker, and notes how many bytes of events each page of a journal had."""

    def __init__(self, scripts: Scripts) -> None:
        self._called = scripts
        self.page_bytes: list[int] = []

    async def call(self, name: str, *arguments: bytes | str | int, patience: float | None = None) -> Any:
        reply = await self._called.call(name, *arguments, patience=patience)
        entries = reply[2]
        self.page_bytes.append(sum(len(fields[1]) for _, fields in entries) if len(entries) > 2 else 0)
        return reply


async def test_a_page_has_no_more_bytes_than_a_mailbox(config: BrokerConfig, job: Any) -> None:
    await job.write(120, size=500)
    await job.write(3, size=9_000)
    await job.write(5, end=True)
    async with await Broker.open(config, max_mailbox_bytes=4_000) as narrow:
        measured = MeasuredScripts(narrow.scripts)
        journal = Journal(measured, narrow.hub, narrow.keys, config, max_mailbox_bytes=4_000)
        assert [event.seq async for event in journal.follow(job.id)] == list(range(1, 129))
        assert [event.seq for event in await journal.replay(job.id, 7)] == list(range(8, 129))
    assert 3_000 < max(measured.page_bytes) <= 4_000


async def test_unknown_jobs_and_positions_beyond_the_journal_are_refused(broker: Broker, job: Any, raw: Any) -> None:
    with pytest.raises(JobNotFound):
        await seqs(broker, "none")
    with pytest.raises(JobNotFound):
        await broker.journal.replay("none")
    await job.write(3)
    for after in (4, 1_000):
        with pytest.raises(JournalRegressed) as caught:
            await seqs(broker, job.id, after)
        assert caught.value.limit == 3
        with pytest.raises(JournalRegressed):
            await broker.journal.replay(job.id, after)
    with pytest.raises(InvalidRequest, match="after must be 0 or the number of an event, got -1"):
        await seqs(broker, job.id, -1)
    assert await broker.journal.replay(job.id, 3) == []
    await job.write(1, end=True)
    assert await seqs(broker, job.id, 4) == []
    with pytest.raises(JournalRegressed):
        await seqs(broker, job.id, 5)
    raw.delete(broker.keys.journal_channel(job.id))
    with pytest.raises(JobNotFound, match="expired"):
        await seqs(broker, job.id)


async def test_a_reader_sees_that_the_journal_got_shorter(broker: Broker, job: Any, raw: Any) -> None:
    await job.write(5)
    events = broker.journal.follow(job.id)
    for _ in range(5):
        await anext(events)
    raw.xtrim(broker.keys.journal_channel(job.id), maxlen=0)
    raw.delete(broker.keys.journal_channel(job.id))
    raw.xadd(broker.keys.journal_channel(job.id), {"e": encode_event(TokenEvent(seq=1))}, id="1-0")
    with pytest.raises(JournalRegressed):
        async with asyncio.timeout(5):
            await anext(events)


async def test_a_reader_sees_that_the_journal_has_other_events_now(broker: Broker, job: Any, raw: Any) -> None:
    await job.write(5)
    events = broker.journal.follow(job.id)
    for _ in range(5):
        await anext(events)
    key = broker.keys.journal_channel(job.id)
    raw.delete(key)
    for seq in range(1, 8):  # after a failover that lost them, they are generated again, and more
        raw.xadd(key, {"e": encode_event(TokenEvent(seq=seq, text="another"))}, id=f"{seq}-0")
    with pytest.raises(JournalRegressed, match="no longer has the event"):
        async with asyncio.timeout(5):
            await anext(events)


async def test_a_lost_message_is_repaired_from_the_journal(broker: Broker, job: Any, raw: Any) -> None:
    key = broker.keys.journal_channel(job.id)
    reader = asyncio.create_task(seqs(broker, job.id))
    await asyncio.sleep(0.05)
    await job.write(2)
    raw.xadd(key, {"e": encode_event(TokenEvent(seq=3))}, id="3-0")  # in the journal, but never published
    raw.hset(f"{broker.keys.tag}:running:{job.lease.id}", job.id, 3)
    job.seq = 3
    await job.write(2, end=True)
    async with asyncio.timeout(5):
        assert await reader == [1, 2, 3, 4, 5]


async def test_a_lost_last_message_is_found_after_a_second_of_quiet(broker: Broker, job: Any, raw: Any) -> None:
    key = broker.keys.journal_channel(job.id)
    reader = asyncio.create_task(seqs(broker, job.id))
    await asyncio.sleep(0.05)
    await job.write(1)
    raw.xadd(key, {"e": encode_event(TokenEvent(seq=2, state=JobState.DONE))}, id="2-0")
    async with asyncio.timeout(3):
        assert await reader == [1, 2]


async def test_an_event_that_the_journal_refuses_is_not_published(broker: Broker, job: Any, raw: Any) -> None:
    key = broker.keys.journal_channel(job.id)
    await job.write(2)
    raw.xadd(key, {"e": encode_event(TokenEvent(seq=9))}, id="9-0")  # written by an unknown process
    with raw.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(key)
        assert channel.get_message(timeout=5) is None  # subscribed
        with pytest.raises(LeaseLost):
            await job.write()
        raw.publish(key, "over")
        told: list[Any] = []
        while not told or told[-1] != b"over":
            message = channel.get_message(timeout=5)
            told += [message["data"]] if message else []
        assert told == [b"over"]


async def test_a_message_that_arrives_twice_is_yielded_once(broker: Broker, job: Any, raw: Any) -> None:
    key = broker.keys.journal_channel(job.id)
    reader = asyncio.create_task(seqs(broker, job.id))
    await asyncio.sleep(0.05)
    await job.write(3)
    for seq in (1, 3, 2):
        raw.publish(key, f"{seq}:".encode() + encode_event(TokenEvent(seq=seq)))
    await job.write(1, end=True)
    async with asyncio.timeout(5):
        assert await reader == [1, 2, 3, 4]


async def test_readers_survive_cut_connections(broker: Broker, job: Any, raw: Any) -> None:
    readers = [asyncio.create_task(seqs(broker, job.id)) for _ in range(5)]
    await asyncio.sleep(0.05)
    for _ in range(8):
        await job.write(3)
        raw.client_kill_filter(_type="pubsub")
        await job.write(3)
        await asyncio.sleep(0.02)
    await job.write(1, end=True)
    async with asyncio.timeout(10):
        for reader in readers:
            assert await reader == list(range(1, 50))


async def test_a_slow_reader_costs_a_bounded_mailbox_and_misses_nothing(config: BrokerConfig, job: Any) -> None:
    async with await Broker.open(config, max_mailbox_bytes=4_000) as narrow:
        events = narrow.journal.follow(job.id)
        await job.write(1)
        got = [await anext(events)]
        for _ in range(5):
            await job.write(20, size=500)
            assert narrow.hub.waiting_bytes <= 4_000
            got.append(await anext(events))
        await job.write(1, end=True)
        async with asyncio.timeout(5):
            got += [event async for event in events]
    assert [event.seq for event in got] == list(range(1, 103))
    assert all(len(event.text) in (1, 500) for event in got)


async def test_closing_a_reader_unsubscribes(broker: Broker, job: Any, raw: Any) -> None:
    key = broker.keys.journal_channel(job.id)
    await job.write(1)
    readers = [broker.journal.follow(job.id) for _ in range(3)]
    for reader in readers:
        await anext(reader)
    assert raw.pubsub_numsub(key) == [(key.encode(), 1)]  # one subscription for all readers of a process
    for reader in readers[:2]:
        await reader.aclose()
    assert raw.pubsub_numsub(key) == [(key.encode(), 1)]
    await readers[2].aclose()

    await until(lambda: raw.pubsub_numsub(key) == [(key.encode(), 0)] and key not in broker.hub.channels)


async def test_readers_come_and_go_quickly(broker: Broker, job: Any, raw: Any) -> None:
    await job.write(1)
    for _ in range(30):
        reader = broker.journal.follow(job.id)
        await anext(reader)
        await reader.aclose()
    reader = broker.journal.follow(job.id)
    await anext(reader)
    waiting = asyncio.create_task(anext(reader))
    await asyncio.sleep(0.05)
    await job.write(1)
    async with asyncio.timeout(0.8):  # from the message, not from the check after a second
        assert (await waiting).seq == 2
    await reader.aclose()

    await until(lambda: not any(":journal:" in channel for channel in broker.hub.channels))


async def test_a_cancelled_reader_leaves_nothing(broker: Broker, job: Any) -> None:
    reader = asyncio.create_task(seqs(broker, job.id))
    await asyncio.sleep(0.05)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)

    await until(lambda: broker.keys.journal_channel(job.id) not in broker.hub.channels)


async def test_two_hundred_readers_share_one_subscription(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    lease = await Lease.register(broker, card)
    ids = [(await broker.jobs.submit(make_request())).id for _ in range(200)]
    await lease.claim(200)
    readers = [asyncio.create_task(seqs(broker, job_id)) for job_id in ids]
    await asyncio.sleep(0.2)
    assert len(raw.client_list(_type="pubsub")) == 1  # shared by all readers of a process and its worker
    assert len(raw.client_list()) < 25  # the subscription, 16 of the pool, and those of the fixtures
    for seq in range(1, 6):
        state = JobState.DONE if seq == 5 else None
        await lease.commit([(job_id, TokenEvent(seq=seq, state=state)) for job_id in ids])
        if seq == 2:
            raw.client_kill_filter(_type="pubsub")
    async with asyncio.timeout(10):
        assert await asyncio.gather(*readers) == [[1, 2, 3, 4, 5]] * 200
    await lease.close()


async def test_events_of_a_lost_connection_are_read_at_once(broker: Broker, job: Any, raw: Any) -> None:
    events = broker.journal.follow(job.id)
    first = asyncio.create_task(anext(events))
    await asyncio.sleep(0.05)
    await job.write(1)
    await first
    second = asyncio.create_task(anext(events))
    await asyncio.sleep(0.05)
    raw.client_kill_filter(_type="pubsub")
    await job.write(1)
    async with asyncio.timeout(0.7):  # before the check after a quiet second
        assert (await second).seq == 2
    await events.aclose()
