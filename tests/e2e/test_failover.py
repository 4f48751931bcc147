"""An installation on a Redis fleet: the master is killed while a gateway and workers are running."""

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import arq
import pytest
import redis
from arq.connections import ArqRedis, RedisSettings
from arq.jobs import Job
from redis_fleet import ClusterFleet, SentinelFleet, until

from ktqueue.arq_json import dumps, loads
from ktqueue.broker.keys import Keys
from ktqueue.core.config import BridgeConfig

TOKENS = 150


@pytest.mark.fleet
@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
async def test_streams_continue_when_redis_fails_over(start_stack: Any, tmp_path: Path, kind: str) -> None:
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


@pytest.mark.fleet
async def test_arq_jobs_continue_when_redis_fails_over(start_stack: Any, tmp_path: Path) -> None:
    fleet = SentinelFleet(tmp_path)
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"model": "demo", "prompt": "Once upon a time", "sampling": sampling}

    async def connect() -> ArqRedis:
        """Connect like arq's client, which leaves its connections to the sentinels open."""
        settings = RedisSettings(port=await asyncio.to_thread(lambda: fleet.master.port), conn_retries=0)
        return await arq.create_pool(settings, job_serializer=dumps, job_deserializer=loads)

    async def answer(job_id: str) -> Any:
        """The result for a client that reconnects if its connection breaks."""
        while True:
            with contextlib.suppress(redis.RedisError, OSError):
                pool: Any = await connect()
                try:
                    return await Job(job_id, pool, _deserializer=loads).result(timeout=60, poll_delay=0.05)
                finally:
                    await pool.aclose()
            await asyncio.sleep(0.2)

    try:
        async with start_stack(workers=2, broker={"url": fleet.url}, bridge=BridgeConfig(enabled=True)) as stack:
            await stack.until_ready()
            calm = (await stack.read(await stack.submit(**body))).choices()[0]
            pool: Any = await connect()
            jobs = [f"tale-{number}" for number in range(6)]
            for job in jobs:
                assert await pool.enqueue_job("generate", body, _job_id=job) is not None
            assert await pool.execute_command("WAIT", 1, 10_000) == 1  # a failover loses what the replica does not have
            await pool.aclose()
            async with asyncio.timeout(60):
                while (await stack.http.get(f"/v1/jobs/{jobs[0]}")).json().get("state") != "running":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                old = fleet.master
                old.signal(signal.SIGKILL)
                answers = await asyncio.gather(*(answer(job) for job in jobs))
            assert [(one["token_ids"], one["text"]) for one in answers] == [calm] * len(jobs)
            assert fleet.master is not old
            assert [helper.deaths for helper in stack.up.helpers] == [0]
    finally:
        fleet.stop()
