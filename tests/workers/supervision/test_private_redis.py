"""A private Redis that dies is restarted. If it cannot start, the supervisor gives up."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from processes import until

from ktqueue.broker.redis.node import probe
from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.workers.supervision.child import MAX_QUICK_DEATHS, ProcessFailed
from ktqueue.workers.supervision.private_redis import PrivateRedis


async def test_redis_is_restarted_however_often_it_is_killed_even_during_a_start(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_during_the_first_restart(url: str) -> bool:
        if len(killed) == 1:
            assert server.pid is not None
            killed.append(server.pid)
            os.kill(server.pid, signal.SIGKILL)
        return probe(url)

    server = PrivateServer(kill_during_the_first_restart)
    redis = PrivateRedis(tmp_path, "process", server)
    await redis.start()
    watching = asyncio.create_task(redis.run())
    while len(killed) <= 2 * MAX_QUICK_DEATHS:
        await until(lambda: redis.pid not in (None, *killed))  # asked once: it may die meanwhile
        assert redis.pid is not None
        killed.append(redis.pid)
        os.kill(redis.pid, signal.SIGKILL)
    await until(lambda: redis.pid not in (None, *killed))
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await redis.stop()


async def test_a_death_is_noticed_where_the_kernel_does_not_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError("no such system call")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    redis = PrivateRedis(tmp_path, "process")
    await redis.start()
    watching = asyncio.create_task(redis.run())
    first = redis.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: redis.pid not in (None, first))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await redis.stop()


async def test_a_redis_that_cannot_start_is_given_up(tmp_path: Path) -> None:
    redis = PrivateRedis(tmp_path, "process")
    await redis.start()
    pid = redis.pid
    assert pid is not None
    (tmp_path / "appendonlydir").rename(tmp_path / "away")
    (tmp_path / "appendonlydir").touch()  # not a folder
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessFailed, match=r"redis\.log"):
        async with asyncio.timeout(60):
            await redis.run()
    await redis.stop()
