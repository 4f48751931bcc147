"""A user of Redis with exactly the permissions that the guide lists for the control worker and the bridge."""

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import arq
from arq.connections import RedisSettings
from arq.jobs import Job, JobStatus
from processes import free_ports, until
from redis_fleet import Server

from ktqueue.arq_json import dumps, loads
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig, Config
from ktqueue.workers.arq.bridge import Bridge
from ktqueue.workers.arq.control import ControlWorker

ROOT = Path(__file__).parents[3]


def listed() -> tuple[list[str], list[str]]:
    """Return the permissions that the guide lists for every process, and those for the two workers of arq."""
    text = (ROOT / "docs" / "guides" / "redis.md").read_text()
    (user,) = re.findall(r"^user ktqueue .*\n(?:  .*\n)*", text, re.MULTILINE)
    (more,) = re.findall(r"^  ~ktqueue:control .*\n(?:  .*\n)*", text, re.MULTILINE)
    return user.replace("PASSWORD", "secret").split()[2:], more.split()


async def is_done(chore: Job) -> bool:
    return await chore.status() is JobStatus.not_found  # its result is not kept


async def test_the_guides_user_may_do_exactly_what_arq_needs(tmp_path: Path, model: Any) -> None:
    server = Server(tmp_path / "server", free_ports(1)[0])
    every, more = listed()
    server("ACL", "SETUSER", "ktqueue", *every, *more)
    url = f"redis://ktqueue:secret@127.0.0.1:{server.port}"
    config = Config(broker=BrokerConfig(url=url, state_dir=str(tmp_path)))
    async with await Broker.open(config.broker) as broker:
        await (await Lease.register(broker, model.card())).close()
        workers = [kind(broker, config, url) for kind in (Bridge, ControlWorker)]
        running = [asyncio.create_task(worker.async_run()) for worker in workers]
        coders: dict[str, Any] = {"job_serializer": dumps, "job_deserializer": loads}
        pool = await arq.create_pool(RedisSettings.from_dsn(url), default_queue_name="ktqueue:arq", **coders)
        job = await pool.enqueue_job("generate", {"model": "demo", "prompt": "Once"}, _job_id="tale")
        chore = await pool.enqueue_job("retention", _queue_name="ktqueue:control")
        assert job is not None and chore is not None
        await until(lambda: is_done(chore))
        assert await pool.enqueue_job("generate", {}, _job_id="tale") is None
        assert await job.abort(timeout=20, poll_delay=0.02)
        for task, worker in zip(running, workers, strict=True):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await worker.leave()
        await pool.aclose()
    refused, called = server("ACL", "LOG"), server("INFO", "commandstats")
    server.kill()
    entries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in refused]
    assert {entry[b"object"] for entry in entries} <= {b"client|setinfo"}  # redis-py of this test's pool goes without
    needed = {word[1:] for word in more if word.startswith("+")}
    assert needed <= {name.removeprefix("cmdstat_") for name in called}, "the guide allows what is not needed"
