"""The bridge with arq's own client and `Job.result()`, a real engine and a real Redis."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import arq
import pytest
import redis
from arq.connections import ArqRedis, RedisSettings
from arq.jobs import DeserializationError, Job, JobStatus, SerializationError
from processes import until

from ktqueue.arq_json import dumps, loads
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.core.config import BridgeConfig, Config, config_environment
from ktqueue.core.errors import Cancelled, ConfigError, InvalidRequest, KtqueueError, ModelNotFound
from ktqueue.core.events import JobState
from ktqueue.workers.arq.bridge import Bridge
from ktqueue.workers.arq.worker import HEALTH_SUFFIX

ROOT = Path(__file__).resolve().parents[3]
QUEUE = BridgeConfig().queue
GREEDY = {"temperature": 0.0, "max_tokens": 12}
BODY: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "sampling": GREEDY}
ENDLESS: dict[str, Any] = {"model": "demo", "prompt": "Once", "sampling": {"max_tokens": 400, "ignore_eos": True}}


def settings(url: str) -> RedisSettings:
    found = RedisSettings.from_dsn(url)
    if url.startswith("unix:"):  # from_dsn ignores the password
        found.password = url.rpartition("password=")[2]
    return found


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Callable[..., Any]]:
    """`await client(**options)` makes one of arq's pools. It uses JSON unless the options say otherwise."""
    pools: list[ArqRedis] = []

    async def connect(**options: Any) -> ArqRedis:
        options = options or {"job_serializer": dumps, "job_deserializer": loads}
        pools.append(await arq.create_pool(settings(redis_url), default_queue_name=QUEUE, **options))
        return pools[-1]

    yield connect
    for pool in pools:
        await pool.aclose()


@pytest.fixture
def config(broker: Broker) -> Config:
    return Config(broker=broker.config, bridge=BridgeConfig(max_jobs=4, tenant="arq"))


@pytest.fixture
async def bridge(broker: Broker, config: Config) -> AsyncIterator[Bridge]:
    """A bridge in this process."""
    async with running(broker, config) as opened:
        yield opened


@contextlib.asynccontextmanager
async def running(broker: Broker, config: Config) -> AsyncIterator[Bridge]:
    worker = Bridge(broker, config, broker.config.url or "")
    task = asyncio.create_task(worker.async_run())
    yield worker
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await worker.leave()


async def result(job: Job | None, within: float = 20.0) -> Any:
    assert job is not None
    return await job.result(timeout=within, poll_delay=0.02)


async def state_of(broker: Broker, job_id: str) -> JobState:
    return (await broker.jobs.get(job_id)).state


async def test_an_arq_client_gets_the_same_result_as_over_http(
    client: Any, bridge: Bridge, start_worker: Any, broker: Broker, model: Any
) -> None:
    pool = await client()
    async with start_worker():
        job = await pool.enqueue_job(
            "generate", {**BODY, "sampling": {**GREEDY, "n": 2, "logprobs": 1}}, _job_id="tale-1"
        )
        answer = await result(job)
        chat = await result(
            await pool.enqueue_job(
                "generate", model="demo", messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=5
            )
        )
    record = await broker.jobs.get("tale-1")
    assert record.request is not None
    undisturbed = model.undisturbed(replace(record.request, prompt=BODY["prompt"]))
    assert [(choice["token_ids"], choice["text"]) for choice in answer["choices"]] == undisturbed
    assert (answer["job_id"], answer["text"]) == ("tale-1", undisturbed[0][1])
    assert answer["usage"]["completion_tokens"] == sum(len(ids) for ids, _ in undisturbed)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert [logprob["token_id"] for logprob in answer["choices"][1]["logprobs"]] == answer["choices"][1]["token_ids"]
    assert len(chat["token_ids"]) == 5
    assert record.tenant == "arq"


async def test_by_default_the_bridge_does_not_touch_jobs_of_other_programs(client: Any, bridge: Bridge) -> None:
    pool = await client()
    await pool.enqueue_job("send_mail", _job_id="mail", _queue_name="arq:queue")
    with pytest.raises(ModelNotFound):
        await result(await pool.enqueue_job("generate", {**BODY, "model": "gpt-9"}))
    assert await Job("mail", pool, _queue_name="arq:queue").status() is JobStatus.queued


async def test_a_queue_that_another_arq_worker_serves_is_refused(client: Any, broker: Broker, config: Config) -> None:
    async def send_mail(ctx: dict[Any, Any], *arguments: Any, **fields: Any) -> str:
        return "sent"

    pool = await client()
    theirs = arq.Worker(
        [arq.worker.func(send_mail, name="send_mail")],
        redis_pool=pool,
        queue_name=QUEUE,
        handle_signals=False,
        poll_delay=0.02,
        job_serializer=dumps,
        job_deserializer=loads,
    )
    serving = asyncio.create_task(theirs.async_run())
    try:
        await until(lambda: pool.exists(f"{QUEUE}:health-check"))
        ours = Bridge(broker, config, broker.config.url or "")
        with pytest.raises(ConfigError, match=f"queue '{QUEUE}' is served by another program's arq worker"):
            await asyncio.wait_for(ours.async_run(), 20)
        await ours.leave()
        assert await result(await pool.enqueue_job("send_mail")) == "sent"
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def test_two_bridges_share_a_queue(client: Any, bridge: Bridge, broker: Broker, config: Config) -> None:
    pool = await client()
    await until(lambda: pool.exists(f"{QUEUE}{HEALTH_SUFFIX}"))
    async with running(broker, config) as second:
        await until(lambda: second.connected)
        with pytest.raises(ModelNotFound):
            await result(await pool.enqueue_job("generate", {**BODY, "model": "gpt-9"}))
        assert not second.main_task.done()  # type: ignore[union-attr]


async def test_result_raises_errors_with_their_codes(client: Any, bridge: Bridge, redis_url: str) -> None:
    pool = await client()
    with pytest.raises(ModelNotFound) as unknown:
        await result(await pool.enqueue_job("generate", {**BODY, "model": "gpt-9"}))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(InvalidRequest, match="temperature") as wrong:
        await result(await pool.enqueue_job("generate", {**BODY, "sampling": {"temperature": 900}}))
    assert wrong.value.param == "sampling.temperature"
    with pytest.raises(InvalidRequest, match="one object"):
        await result(await pool.enqueue_job("generate", "Once"))
    plain = await client(job_serializer=lambda job: json.dumps(job).encode(), job_deserializer=json.loads)
    with pytest.raises(SerializationError, match="model_not_found"):
        await result(await plain.enqueue_job("generate", {**BODY, "model": "gpt-9"}))


class Trap:
    """Pickles to a call of `mkdir`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


async def test_a_pickled_job_is_refused_in_json_and_never_loaded(
    client: Any, bridge: Bridge, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await client(job_serializer=None)  # arq's default
    trap = tmp_path / "sprung"
    words = r"not pickle.*job_serializer=ktqueue\.arq_json\.dumps"
    with pytest.raises(DeserializationError):  # its client cannot read our JSON and raises an error
        await result(await pool.enqueue_job("generate", Trap(str(trap)), _job_id="pickled"))
    assert not trap.exists()
    assert re.search(words, caplog.text)
    json_reader = await client()
    with pytest.raises(KtqueueError, match=words):
        await result(Job("pickled", json_reader, _queue_name=QUEUE, _deserializer=loads))


async def test_an_abort_cancels_our_job(client: Any, bridge: Bridge, start_worker: Any, broker: Broker) -> None:
    pool = await client()
    async with start_worker():
        job = await pool.enqueue_job("generate", ENDLESS, _job_id="endless")
        await until(lambda: jobs_of(broker))
        await until(lambda: broker.journal.replay("endless"))
        assert await job.abort(timeout=10, poll_delay=0.02)
        await until(lambda: is_ended(broker, "endless"))
    assert await state_of(broker, "endless") is JobState.CANCELLED


async def is_ended(broker: Broker, job_id: str) -> bool:
    return (await state_of(broker, job_id)).terminal


async def test_an_abort_while_no_bridge_runs_cancels_our_job(client: Any, broker: Broker, config: Config) -> None:
    pool = await client()
    async with running(broker, config) as stopped_bridge:
        job = await pool.enqueue_job("generate", ENDLESS, _job_id="left/alone")  # an id that our jobs may not have
        await until(lambda: stopped_bridge.job_tasks)
        await until(lambda: jobs_of(broker))
    (job_id,) = [record.id for record in await broker.jobs.list()]
    assert job_id.startswith("arq-")
    assert await state_of(broker, job_id) is JobState.QUEUED  # the end of the bridge cancelled nothing
    waiting = asyncio.create_task(job.abort(timeout=10, poll_delay=0.02))
    await until(lambda: pool.zcard("arq:abort"))
    async with running(broker, config):
        assert await waiting
    assert await state_of(broker, job_id) is JobState.CANCELLED


async def jobs_of(broker: Broker) -> list[Any]:
    return await broker.jobs.list()


async def test_aborts_of_unknown_jobs_are_forgotten(client: Any, bridge: Bridge) -> None:
    pool = await client()
    await pool.zadd("arq:abort", {"never-was": 1})
    await until(lambda: is_empty(pool, "arq:abort"))


async def is_empty(pool: ArqRedis, key: str) -> bool:
    return not await pool.exists(key)


async def test_the_lock_of_a_running_job_is_short_and_renewed(client: Any, bridge: Bridge) -> None:
    pool = await client()
    await pool.enqueue_job("generate", BODY, _job_id="held")
    await until(lambda: bridge.job_tasks)
    left = [await pool.pttl("arq:in-progress:held")]
    while left[-1] <= min(left):  # it decreases until the lock is renewed
        assert 0 < left[-1] <= 3_000
        await asyncio.sleep(0.02)
        left.append(await pool.pttl("arq:in-progress:held"))
    assert left[-1] <= 3_000


async def test_no_slot_is_lost_when_jobs_cannot_be_started(client: Any, bridge: Bridge, redis_url: str) -> None:
    bridge.outage_pause_s = 0.01
    pool = await client()
    with redis.Redis.from_url(redis_url) as admin:
        admin.config_resetstat()
        admin.execute_command("ACL", "SETUSER", "default", "-watch")
        try:
            await pool.zadd(QUEUE, {"stuck": 1})
            slots = bridge.max_jobs
            await until(
                lambda: admin.info("commandstats").get("cmdstat_watch", {}).get("rejected_calls", 0) > 2 * slots
            )
        finally:
            admin.execute_command("ACL", "SETUSER", "default", "+watch")
    with pytest.raises(ModelNotFound):
        await result(await pool.enqueue_job("generate", {**BODY, "model": "gpt-9"}))


async def test_the_bridge_runs_at_most_max_jobs_and_loses_no_slot(client: Any, bridge: Bridge, broker: Broker) -> None:
    pool = await client()
    jobs = [await pool.enqueue_job("generate", BODY, _job_id=f"one-{number}") for number in range(7)]
    await until(lambda: bridge.job_counter == 4)
    await asyncio.sleep(3 * bridge.poll_delay_s)
    assert len(await broker.jobs.list()) == 4
    cancelled = asyncio.create_task(cancel_all(broker, 7))
    for job in jobs:
        with pytest.raises(Cancelled):
            await result(job)
    await cancelled
    await until(lambda: bridge.job_counter == 0)


async def cancel_all(broker: Broker, count: int) -> None:
    """Cancel queued jobs until `count` jobs are cancelled."""
    while count:
        for record in await broker.jobs.list(state=JobState.QUEUED):
            await broker.jobs.cancel(record.id)
            count -= 1
        await asyncio.sleep(0.02)


async def test_the_bridge_survives_a_restart_of_redis(model: Any, config: Config, tmp_path: Path) -> None:
    server = PrivateServer()
    url = await asyncio.to_thread(server.start, tmp_path)
    config = replace(config, broker=replace(config.broker, url=url))
    pools = []
    try:
        async with await Broker.open(config.broker) as broker:
            await (await Lease.register(broker, model.card())).close()
            async with running(broker, config) as restarted:
                pools.append(
                    await arq.create_pool(
                        settings(url), default_queue_name=QUEUE, job_serializer=dumps, job_deserializer=loads
                    )
                )
                await pools[-1].enqueue_job("generate", BODY, _job_id="patient")
                await until(lambda: jobs_of(broker))
                for kind in ("normal", "pubsub"):
                    with redis.Redis.from_url(url) as admin:
                        admin.client_kill_filter(_type=kind, skipme=True)
                assert server.pid is not None
                os.kill(server.pid, signal.SIGKILL)
                await until(lambda: server.pid is None)
                await asyncio.sleep(0.5)
                assert await asyncio.to_thread(server.start, tmp_path) == url
                pools.append(
                    await arq.create_pool(
                        settings(url), default_queue_name=QUEUE, job_serializer=dumps, job_deserializer=loads
                    )
                )
                with pytest.raises(ModelNotFound):
                    await result(await pools[-1].enqueue_job("generate", {**BODY, "model": "gpt-9"}))
                await broker.jobs.cancel("patient")
                with pytest.raises(Cancelled):
                    await result(Job("patient", pools[-1], _queue_name=QUEUE, _deserializer=loads))
                await until(lambda: restarted.job_counter == 0)
    finally:
        for pool in pools:
            await pool.aclose()
        await asyncio.to_thread(server.stop)


async def test_the_bridge_waits_for_the_redis_of_the_workers_if_that_is_another_one(
    model: Any, client: Any, config: Config, redis_url: str, tmp_path: Path
) -> None:
    pool, server = await client(), PrivateServer()
    url = await asyncio.to_thread(server.start, tmp_path)
    bridged = replace(config.bridge, redis_url=redis_url)
    config = replace(config, broker=replace(config.broker, url=url, connect_timeout=0.2), bridge=bridged)
    try:
        async with await Broker.open(config.broker) as broker:
            await (await Lease.register(broker, model.card())).close()
            async with running(broker, config):
                await asyncio.to_thread(server.stop)
                job = await pool.enqueue_job("generate", {**BODY, "model": "gpt-9"})
                await asyncio.sleep(1)
                assert await asyncio.to_thread(server.start, tmp_path) == url
                with pytest.raises(ModelNotFound):
                    await result(job)
    finally:
        await asyncio.to_thread(server.stop)


async def test_killing_the_bridge_during_a_job_loses_nothing(
    client: Any, config: Config, start_worker: Any, broker: Broker, model: Any, tmp_path: Path
) -> None:
    environment = {**os.environ, **config_environment(replace(config, bridge=BridgeConfig(enabled=True)))}

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-m", "ktqueue.workers.arq.bridge"], cwd=ROOT, env=environment)

    pool = await client()
    body = {**ENDLESS, "sampling": {"max_tokens": 200, "ignore_eos": True, "temperature": 0.0}}
    bridge = start()
    try:
        async with start_worker():
            job = await pool.enqueue_job("generate", body, _job_id="survivor")
            await until(lambda: jobs_of(broker))
            bridge.send_signal(signal.SIGKILL)
            bridge.wait()
            bridge = start()
            answer = await result(job, within=40)
        assert [record.id for record in await broker.jobs.list()] == ["survivor"]
        record = await broker.jobs.get("survivor")
        assert record.request is not None
        undisturbed = model.undisturbed(replace(record.request, prompt=ENDLESS["prompt"]))
        assert (answer["token_ids"], answer["text"]) == undisturbed[0]
        job_info = await job.result_info()
        assert job_info.job_try == 2
        bridge.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(bridge.wait, 20) == 0
    finally:
        bridge.kill()
        bridge.wait()
