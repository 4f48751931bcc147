"""A real master, replica and three sentinels. The master dies, hangs, or loses acknowledged steps."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis_fleet import SentinelFleet, until
from required import required
from teller import Teller, read

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, JobNotFound, JournalRegressed, LeaseLost, Unavailable
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest

LENGTH = 60


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[SentinelFleet]:
    fleet = SentinelFleet(tmp_path)
    yield fleet
    fleet.stop()


@pytest.fixture
def config(fleet: SentinelFleet) -> BrokerConfig:
    """Settings whose calls may take longer than a test, so a server that hangs must be noticed in another way."""
    return BrokerConfig(url=fleet.url, lease_seconds=0.5, operation_timeout=100.0)


@pytest.fixture
async def broker(config: BrokerConfig) -> AsyncIterator[Broker]:
    async with await Broker.open(config) as opened:
        reaper = asyncio.create_task(opened.reaper().run())
        yield opened
        reaper.cancel()


def synchronised(fleet: SentinelFleet) -> bool:
    """Return whether the replica has all data of the master."""
    offsets = {one("INFO", "replication")["master_repl_offset"] for one in fleet.servers}
    return len(offsets) == 1


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.fleet), signal.SIGSTOP])
async def test_workers_and_readers_continue_with_the_new_master(
    fleet: Any, broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], number: Any
) -> None:
    teller = Teller(broker, card, length=LENGTH)
    await (await Lease.register(broker, card)).close()  # the model is known from here on
    jobs = [(await broker.jobs.submit(make_request())).id for _ in range(5)]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        seen: list[list[int]] = [[] for _ in jobs]
        readers = [group.create_task(read(broker, job, view)) for job, view in zip(jobs, seen, strict=True)]
        work = group.create_task(teller.run())
        await asyncio.to_thread(until, lambda: min(map(len, seen)) >= LENGTH // 3)
        await teller.halt()
        old = fleet.master
        await asyncio.to_thread(until, lambda: synchronised(fleet))
        old.signal(number)
        teller.going.set()
        views = [await one for one in readers]
        assert views == [list(range(1, LENGTH + 1))] * len(jobs)
        assert fleet.master is not old
        # The subscription has moved too, before its own timeout.
        await asyncio.to_thread(until, lambda: fleet.master("PUBSUB", "CHANNELS", f"{broker.keys.tag}:*"), 3.0)
        late = await broker.jobs.submit(make_request())
        assert await read(broker, late.id) == list(range(1, LENGTH + 1))
        work.cancel()
    for job in jobs:
        assert (await broker.jobs.get(job)).state is JobState.DONE
        assert [event.seq for event in await broker.journal.replay(job)] == list(range(1, LENGTH + 1))
    assert len(teller.made) == len(set(teller.made))
    assert (await broker.jobs.depth())[0].running == 0


async def beat(lease: Lease) -> None:
    """Renew the lease until cancelled, or until it is lost."""
    with suppress(LeaseLost):
        while True:
            await lease.beat({})
            await asyncio.sleep(0.1)


async def test_events_that_a_failover_has_lost_are_reported_to_worker_and_reader(
    fleet: Any, broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    beating = asyncio.create_task(beat(lease))
    kept = await broker.jobs.submit(make_request())
    await lease.claim(1)
    await lease.commit([(kept.id, TokenEvent(seq=seq, text="kept")) for seq in (1, 2, 3)])
    await asyncio.to_thread(until, lambda: synchronised(fleet))

    fleet.cut_off_replica()
    await lease.commit([(kept.id, TokenEvent(seq=seq, text="lost")) for seq in (4, 5)])
    gone = await broker.jobs.submit(make_request())
    async with aclosing(broker.journal.follow(kept.id)) as events, aclosing(broker.journal.follow(gone.id)) as none:
        assert [(await anext(events)).text for _ in range(5)] == ["kept"] * 3 + ["lost"] * 2
        waiting = [asyncio.create_task(anext(one)) for one in (events, none)]
        await asyncio.sleep(0.1)
        replica = fleet.replica
        beating.cancel()
        fleet.master.signal(signal.SIGKILL)
        replica.signal(signal.SIGCONT)
        async with asyncio.timeout(60):
            with pytest.raises(LeaseLost):
                await lease.commit([(kept.id, TokenEvent(seq=6, text="more"))])
            with pytest.raises(JournalRegressed):
                await waiting[0]
            with pytest.raises(JobNotFound):
                await waiting[1]
    with pytest.raises(JobNotFound):
        await broker.jobs.get(gone.id)
    with pytest.raises(JournalRegressed):
        await broker.journal.replay(kept.id, 5)

    teller = Teller(broker, card, length=LENGTH)
    work = asyncio.create_task(teller.run())
    async with asyncio.timeout(30):
        assert await read(broker, kept.id) == list(range(1, LENGTH + 1))
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work
    journal = await broker.journal.replay(kept.id)
    assert [event.text for event in journal[:3]] == ["kept"] * 3
    assert [event.state for event in journal if event.state] == [JobState.DONE]
    assert (await broker.jobs.get(kept.id)).attempts == 2


@pytest.mark.fleet
async def test_the_sentinels_are_asked_all_at_once(
    fleet: Any, config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    fleet.sentinels[0].signal(signal.SIGSTOP)
    fleet.sentinels[1].kill()
    async with asyncio.timeout(8), await Broker.open(config) as broker:
        lease = await Lease.register(broker, card)
        await broker.jobs.submit(make_request())
        assert len(await lease.claim(1)) == 1
        await lease.close()


async def test_what_is_wrong_is_said(fleet: Any, config: BrokerConfig) -> None:
    with pytest.raises(ConfigError, match="'fables'"):
        await Broker.open(replace(config, url=required(config.url, "the URL").replace("/tales", "/fables")))
    replica = f"127.0.0.1:{fleet.replica.port}"
    with pytest.raises(Unavailable, match=rf"{replica} is a read-only replica of 127.0.0.1:{fleet.master.port}"):
        await Broker.open(replace(config, url=f"redis://{replica}"))
    for one in fleet.sentinels:
        one.kill()
    with pytest.raises(Unavailable, match="no sentinel answers"):
        await Broker.open(config)
