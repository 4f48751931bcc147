"""Processes from a fork server: they work, their ends are told, and nobody is left when it dies."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from ktqueue.workers.supervision import child as child_module
from ktqueue.workers.supervision.child import Child
from ktqueue.workers.supervision.forks import Forks

ROOT = Path(child_module.__file__).parents[2]
SERVER = """
import os, signal, socket, sys, time
from pathlib import Path
from ktqueue.workers.supervision.fork_server import ForkServer

made = os.getpid()

def work():
    print("forked of", made, os.getppid(), os.getsid(0) == os.getpid(), flush=True)
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


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):  # torch is imported
        while True:
            if holds():
                return
            await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Farm:
    """A fork server and a child of it, both supervised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.forks = Forks(
            {**os.environ, "PYTHONPATH": str(ROOT)}, ["env", "-C", str(folder), sys.executable, "-c", SERVER]
        )
        self.server = Child("server", self.forks.launch, log_path=folder / "server.log")
        self.child = Child("child", self.forks.fork, log_path=folder / "child.log", quick_death=0.0)
        self.tasks = [asyncio.create_task(one.run()) for one in (self.server, self.child)]

    async def pid(self, other_than: int | None = None) -> int:
        await until(lambda: self.child.pid not in (None, other_than))
        assert self.child.pid is not None
        return self.child.pid

    async def close(self) -> None:
        for one in (self.child, self.server):
            one.stop()
            await one.ended(5.0)
        await self.forks.closed()
        await asyncio.gather(*self.tasks)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def farm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Farm]:
    one = Farm(tmp_path_factory.mktemp("farm"))
    yield one
    await one.close()


async def test_a_worker_is_forked_again_when_it_dies_of_anything(farm: Farm) -> None:
    first = await farm.pid()
    server = farm.server.pid
    log = farm.folder / "child.log"
    await until(lambda: log.exists() and log.read_text().count("\n") == 2)
    assert log.read_text() == f"forked of {server} {server} True\nTrue True\n"
    os.kill(first, signal.SIGKILL)
    second = await farm.pid(other_than=first)
    (farm.folder / "code").write_text("3")
    deaths = farm.child.deaths
    os.kill(second, signal.SIGTERM)  # dies of it; the next ones end by themselves
    await until(lambda: farm.child.deaths > deaths + 2)
    (farm.folder / "code").unlink()
    await farm.pid(other_than=second)
    assert farm.server.deaths == 0
    assert farm.server.pid == server


async def test_when_the_server_dies_its_workers_die_and_both_come_back(farm: Farm) -> None:
    first, server = await farm.pid(), farm.server.pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    second = await farm.pid(other_than=first)
    assert not alive(first)
    assert farm.server.pid != server
    assert alive(second)


async def test_a_stop_does_not_wait_for_a_server_that_still_loads(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    farm = Farm(tmp_path)
    await until(lambda: farm.server.pid is not None)
    async with asyncio.timeout(30):
        await farm.close()
    assert farm.child.pid is None
