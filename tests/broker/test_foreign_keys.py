"""Keys of another type under our names, and values of another type in our records: no worker ends or spins."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.errors import JobNotFound, JournalRegressed, LeaseLost
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest

MakeRequest = Callable[..., GenerationRequest]


def spoil(broker: Broker, raw: Any, name: str) -> None:
    """Replace a key by a list."""
    raw.delete(f"{broker.keys.tag}:{name}")
    raw.rpush(f"{broker.keys.tag}:{name}", "foreign")


async def test_a_journal_of_another_type_is_lost_and_holds_up_no_other_job(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any
) -> None:
    lease = await Lease.register(broker, card)
    spoilt, good = [await broker.jobs.submit(make_request()) for _ in range(2)]
    await lease.claim(2)
    await lease.commit([(job.id, TokenEvent(seq=1, text="a")) for job in (spoilt, good)])
    spoil(broker, raw, f"journal:{spoilt.id}")
    await lease.release([spoilt.id])
    (again,) = await lease.claim(1)
    assert (again.job_id, again.events) == (spoilt.id, [])  # it begins anew
    assert await broker.journal.lengths([spoilt.id, good.id]) == [0, 1]
    await lease.commit([(spoilt.id, TokenEvent(seq=1, text="b")), (good.id, TokenEvent(seq=2, text="b"))])
    spoil(broker, raw, f"journal:{spoilt.id}")
    await lease.commit([(job.id, TokenEvent(seq=seq, state=JobState.DONE)) for job, seq in ((spoilt, 2), (good, 3))])
    assert [event.text for event in await broker.journal.replay(good.id)] == ["a", "b", ""]
    with pytest.raises(JournalRegressed, match="begins at 2: earlier events are lost"):
        await broker.journal.replay(spoilt.id)
    await lease.close()


async def test_a_record_of_another_type_is_removed(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any
) -> None:
    lease = await Lease.register(broker, card)
    spoilt, good = [await broker.jobs.submit(make_request()) for _ in range(2)]
    spoil(broker, raw, f"job:{spoilt.id}")
    with pytest.raises(LeaseLost, match="WRONGTYPE"):
        await lease.claim(2)
    async with asyncio.timeout(10):
        while not await broker.reaper().scrub(keys=1, pause=0.0):  # whichever key is looked at first
            pass
    with pytest.raises(JobNotFound):
        await broker.jobs.get(spoilt.id)
    assert [claim.job_id for claim in await lease.claim(2)] == [good.id]
    await lease.close()


async def test_the_reaper_goes_on_beside_a_damaged_list(
    broker: Broker, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(broker, raw, "deadlines")
    task = asyncio.create_task(broker.reaper().run())
    await asyncio.sleep(1.0)
    assert raw.exists(f"{broker.keys.tag}:scrub")  # the steps after the one that fails
    assert caplog.text.count("WRONGTYPE") == 1 and "Traceback" not in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("data", ['{"v":1,"t":["7"]}', '{"v":1,"i":"0"}', '{"v":1,"i":1}', '{"v":1,"i":-1}', "7", "x"])
async def test_a_job_with_a_damaged_event_fails_alone(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any, data: str
) -> None:
    card = replace(card, digest="d" * 32)
    lease = await Lease.register(broker, card)
    jobs = [await broker.jobs.submit(make_request()) for _ in range(2)]
    await lease.claim(2)
    raw.xadd(f"{broker.keys.tag}:journal:{jobs[0].id}", {"e": data}, id="1-0")
    await lease.release([job.id for job in jobs])
    assert [claim.job_id for claim in await lease.claim(2)] == [jobs[1].id]
    record = await broker.jobs.get(jobs[0].id)
    assert record.state is JobState.FAILED and record.error is not None and record.error.code == "codec_error"
    await lease.close()


async def test_messages_of_others_are_ignored(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any
) -> None:
    lease = await Lease.register(broker, card)
    assert await lease.claim(1, wait=True) == []
    for message in ("x\ny", "1\ny", "1 2 3\n", "\n"):
        raw.publish(broker.keys.worker_channel(lease.id), message)
    assert await lease.wait_for_work(0.2) == []
    job = await broker.jobs.submit(make_request())
    reader = broker.journal.follow(job.id)
    first = asyncio.ensure_future(anext(reader))
    assert [claim.job_id for claim in await lease.wait_for_work(1.0) or await lease.claim(1)] == [job.id]
    for message in ("x", "x:y", ":"):
        raw.publish(broker.keys.journal_channel(job.id), message)
    await lease.commit([(job.id, TokenEvent(seq=1, text="a"))])
    assert (await first).text == "a"
    await reader.aclose()
    await lease.close()
