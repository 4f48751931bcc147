"""The supervised private Redis is restarted whatever kills it, and given up if it cannot start."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.workers.supervision.child import MAX_QUICK_DEATHS, ProcessFailed
from ktqueue.workers.supervision.private_redis import PrivateRedis


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


async def test_it_is_restarted_however_often_it_is_killed_also_during_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    wait_until_ready = PrivateServer._wait_until_ready

    def die_at_first(self: PrivateServer, *given: Any) -> None:
        if len(killed) == 1:
            assert self.pid is not None
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        wait_until_ready(self, *given)

    monkeypatch.setattr(PrivateServer, "_wait_until_ready", die_at_first)
    redis = PrivateRedis(tmp_path, "process")
    await redis.start()
    watching = asyncio.create_task(redis.run())
    while len(killed) <= 2 * MAX_QUICK_DEATHS:
        await until(lambda: redis.pid is not None and redis.pid not in killed)
        assert redis.pid is not None
        killed.append(redis.pid)
        os.kill(redis.pid, signal.SIGKILL)
    await until(lambda: redis.pid is not None and redis.pid not in killed)
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await redis.stop()


async def test_it_is_given_up_if_it_cannot_start(tmp_path: Path) -> None:
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
