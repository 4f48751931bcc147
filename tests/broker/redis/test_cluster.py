"""A cluster of three real masters. The owner of the slot dies, or the slot moves to another node."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import free_ports
from redis_fleet import ClusterFleet, Server, until
from teller import Teller, read

from ktqueue.broker.broker import Broker
from ktqueue.broker.keys import Keys
from ktqueue.broker.lease import Lease
from ktqueue.broker.redis.topology import key_slot
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError
from ktqueue.core.events import JobState
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest

LENGTH = 60
TAG = Keys("ktq").tag


@pytest.fixture
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ClusterFleet]:
    fleet = ClusterFleet(tmp_path, TAG, replicas=getattr(request, "param", 0))
    yield fleet
    fleet.stop()


@pytest.fixture
def config(fleet: ClusterFleet) -> BrokerConfig:
    """Settings whose calls may take longer than a test, so a server that hangs must be noticed in another way."""
    return BrokerConfig(url=fleet.url, lease_seconds=0.5, operation_timeout=100.0)


def test_slots_of_keys_are_those_of_redis() -> None:
    # The first is the check value of CRC-16/XMODEM, 0x31C3.
    assert key_slot("123456789") == 0x31C3
    assert key_slot("{user1000}.following") == key_slot("user1000")
    assert key_slot("foo{}{bar}") != key_slot("bar")
    assert key_slot("foo{{bar}}zap") == key_slot("{bar")


async def submit_some(broker: Any, card: Any, make_request: Any) -> Any:
    await (await Lease.register(broker, card)).close()  # the model is known from here on
    return [(await broker.jobs.submit(make_request())).id for _ in range(5)]


async def all_end(broker: Any, jobs: Any) -> None:
    for job in jobs:
        assert (await broker.jobs.get(job)).state is JobState.DONE
        assert [event.seq for event in await broker.journal.replay(job)] == list(range(1, LENGTH + 1))


@pytest.mark.parametrize("fleet", [1], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.fleet)])
async def test_workers_and_readers_continue_with_the_new_owner_of_the_slot(
    fleet: Any, config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest], number: Any
) -> None:
    async with await Broker.open(config) as broker:
        teller = Teller(broker, card, length=LENGTH)
        jobs = await submit_some(broker, card, make_request)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            seen: list[list[int]] = [[] for _ in jobs]
            readers = [group.create_task(read(broker, job, view)) for job, view in zip(jobs, seen, strict=True)]
            work = group.create_task(teller.run())
            await asyncio.to_thread(until, lambda: min(map(len, seen)) >= LENGTH // 3)
            await teller.halt()
            old = fleet.owner
            replica = fleet.servers[-1]
            await asyncio.to_thread(until, lambda: _offset(old) == _offset(replica))
            old.signal(number)
            teller.going.set()
            assert [await one for one in readers] == [list(range(1, LENGTH + 1))] * len(jobs)
            work.cancel()
        await all_end(broker, jobs)
        assert fleet.owner_as_seen_by(replica) is replica
        assert len(teller.made) == len(set(teller.made))


def _offset(server: Server) -> int:
    return int(server("INFO", "replication")["master_repl_offset"])


async def test_a_moving_slot_is_awaited_and_then_followed(
    fleet: Any, config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    one_node = next(one for one in fleet.servers if one is not fleet.owner)
    config = replace(config, url=f"redis+cluster://127.0.0.1:{one_node.port}")
    async with await Broker.open(config) as broker:
        teller = Teller(broker, card, length=LENGTH)
        jobs = await submit_some(broker, card, make_request)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            seen: list[list[int]] = [[] for _ in jobs]
            readers = [group.create_task(read(broker, job, view)) for job, view in zip(jobs, seen, strict=True)]
            work = group.create_task(teller.run())
            await asyncio.to_thread(until, lambda: min(map(len, seen)) >= LENGTH // 3)
            half = []

            def between() -> None:
                half.append(len(teller.made))
                time.sleep(0.3)
                half.append(len(teller.made))

            old = fleet.owner
            target = next(one for one in fleet.servers if one not in (old, one_node))
            await asyncio.to_thread(fleet.move_slot, target, between=between)
            assert half[1] - half[0] <= len(jobs), "steps were made while the data was in two places"
            assert [await one for one in readers] == [list(range(1, LENGTH + 1))] * len(jobs)
            work.cancel()
        await all_end(broker, jobs)
        assert old("DBSIZE") == 0
        assert target("DBSIZE") > 0
        assert teller.incarnations == 1


@pytest.mark.fleet
async def test_what_is_wrong_is_said(fleet: Any, config: BrokerConfig) -> None:
    with pytest.raises(ConfigError, match=r"redis\+cluster://"):
        async with await Broker.open(replace(config, url=f"redis://127.0.0.1:{_stranger(fleet).port}")) as broker:
            await broker.jobs.depth()
    with pytest.raises(ConfigError, match="cluster support disabled"):
        await Broker.open(replace(config, url=f"redis+cluster://127.0.0.1:{_plain(fleet).port}"))


def _stranger(fleet: ClusterFleet) -> Server:
    return next(one for one in fleet.servers if one is not fleet.owner)


def _plain(fleet: ClusterFleet) -> Server:
    server = Server(fleet.servers[0].folder.parent / "plain", free_ports(1)[0])
    fleet.servers.append(server)  # stopped with the others
    return server
