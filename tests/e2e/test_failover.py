"""The whole of it on a fleet: the server with the data dies under a running gateway and its workers."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from redis_fleet import ClusterFleet, SentinelFleet, until

from ktqueue.broker.keys import Keys

TOKENS = 150


@pytest.mark.fleet
@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
async def test_streams_go_on_over_the_death_of_the_master(start_stack: Any, tmp_path: Path, kind: str) -> None:
    fleet: SentinelFleet | ClusterFleet = (
        SentinelFleet(tmp_path) if kind == "sentinel" else ClusterFleet(tmp_path, Keys("ktq").tag, replicas=1)
    )
    try:
        async with start_stack(workers=2, broker={"url": fleet.url}) as stack:
            await stack.until_ready()
            sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            body = {"prompt": "Once upon a time", "sampling": sampling}
            calm = await stack.read(await stack.submit(**body))
            assert calm.state == "done"
            jobs = [await stack.submit(**body) for _ in range(6)]
            begun: set[str] = set()
            readers = [asyncio.create_task(stack.read(job, on_event=lambda _, job=job: begun.add(job))) for job in jobs]
            async with asyncio.timeout(60):
                await asyncio.to_thread(until, lambda: len(begun) == len(jobs))
                old = fleet.master if isinstance(fleet, SentinelFleet) else fleet.owner
                old.kill() if isinstance(fleet, ClusterFleet) else old.signal(signal.SIGKILL)
                streams = await asyncio.gather(*readers)
                assert max(stream.longest_gap for stream in streams) > 1.0, "it died too late"
            assert [stream.state for stream in streams] == ["done"] * len(jobs)
            assert [stream.choices() for stream in streams] == [calm.choices()] * len(jobs)
            await asyncio.to_thread(
                until, lambda: (fleet.master if isinstance(fleet, SentinelFleet) else fleet.owner) is not old
            )
    finally:
        fleet.stop()
