"""Processes of a fork server: they run, their ends are reported, and none survives the server."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from processes import alive, until

from ktqueue.workers.supervision.child import Child
from ktqueue.workers.supervision.fork_client import ForkClient

ROOT = Path(__file__).resolve().parents[3]
SERVER = """
import os, signal, socket, sys, time
from pathlib import Path
from ktqueue.workers.supervision.fork_server import ForkServer

server = os.getpid()

def work():
    print("forked by", server, os.getppid(), os.getsid(0) == os.getpid(), flush=True)
    print(sys.stdin.read() == "", signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, flush=True)
    code = Path("code")
    if code.exists():
        os._exit(int(code.read_text()))
    time.sleep(60)

if Path("slow").exists():
    time.sleep(60)
ForkServer(socket.socket(fileno=0), work).run()
"""

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Installation:
    """A fork server and a process that it forked, both supervised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = ForkClient(
            {**os.environ, "PYTHONPATH": str(ROOT)}, ["env", "-C", str(folder), sys.executable, "-c", SERVER]
        )
        self.server = Child("server", self.client.launch, log_path=folder / "server.log")
        self.child = Child("child", self.client.fork, log_path=folder / "child.log", quick_death_seconds=0.0)
        self.tasks = [asyncio.create_task(child.run()) for child in (self.server, self.child)]

    async def pid(self, other_than: int | None = None) -> int:
        await until(lambda: self.child.pid not in (None, other_than), 60)  # torch is imported
        assert self.child.pid is not None
        return self.child.pid

    async def close(self) -> None:
        for child in (self.child, self.server):
            child.stop()
            await child.ended(5.0)
        await self.client.closed()
        await asyncio.gather(*self.tasks)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def installation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Installation]:
    installation = Installation(tmp_path_factory.mktemp("fork-server"))
    yield installation
    await installation.close()


async def test_a_worker_is_forked_again_however_it_died(installation: Installation) -> None:
    first = await installation.pid()
    server = installation.server.pid
    log = installation.folder / "child.log"
    await until(lambda: log.exists() and log.read_text().count("\n") == 2, 60)
    assert log.read_text() == f"forked by {server} {server} True\nTrue True\n"
    os.kill(first, signal.SIGKILL)
    second = await installation.pid(other_than=first)
    (installation.folder / "code").write_text("3")
    deaths = installation.child.deaths
    os.kill(second, signal.SIGTERM)  # the signal kills it; the next ones exit with code 3
    await until(lambda: installation.child.deaths > deaths + 2, 60)
    (installation.folder / "code").unlink()
    await installation.pid(other_than=second)
    assert installation.server.deaths == 0
    assert installation.server.pid == server


async def test_when_the_server_dies_its_workers_die_and_both_are_restarted(installation: Installation) -> None:
    first, server = await installation.pid(), installation.server.pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    second = await installation.pid(other_than=first)
    assert not alive(first)
    assert installation.server.pid != server
    assert alive(second)


async def test_a_stop_does_not_wait_for_a_server_that_is_loading(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    installation = Installation(tmp_path)
    await until(lambda: installation.server.pid is not None, 60)
    async with asyncio.timeout(30):
        await installation.close()
    assert installation.child.pid is None
