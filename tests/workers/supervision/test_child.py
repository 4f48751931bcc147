"""A supervised process is restarted with pauses, is stopped, and dies with its parent."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import alive, until

from ktqueue.core.errors import ConfigError
from ktqueue.workers.supervision.child import MAX_QUICK_DEATHS, Child, ProcessFailed
from ktqueue.workers.supervision.process import Command

SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


ROOT = Path(__file__).resolve().parents[3]


def child_of(command: list[str], log_path: Path, final_codes: frozenset[int] = frozenset()) -> Child:
    return Child(
        "thing", Command(command, os.environ), log_path=log_path, final_codes=final_codes, longest_pause_seconds=0.01
    )


async def running_pid(child: Child, other_than: int | None = None) -> int:
    await until(lambda: child.pid not in (None, other_than))
    assert child.pid is not None
    return child.pid


async def test_a_dead_process_is_restarted_at_once_and_can_be_stopped(tmp_path: Path) -> None:
    child = child_of(SLEEPS, tmp_path / "log")
    watching = asyncio.create_task(child.run())
    first = await running_pid(child)
    began = time.monotonic()
    os.kill(first, signal.SIGKILL)
    second = await running_pid(child, other_than=first)
    assert time.monotonic() - began < 1.0
    assert child.deaths == 1
    child.stop()
    await child.ended(5.0)
    await watching
    assert not alive(second)
    assert child.pid is None


async def test_a_process_that_keeps_dying_is_given_up_with_its_log(tmp_path: Path) -> None:
    child = child_of([sys.executable, "-c", "import sys; sys.exit('no such model')"], tmp_path / "log")
    with pytest.raises(ProcessFailed, match=r"died 5 times.*code 1\n  no such model"):
        await child.run()
    assert child.deaths == 5


@pytest.mark.parametrize(("script", "code"), [("kill -9 $$", -signal.SIGKILL), ("exit 0", 0)])
async def test_a_killed_process_is_always_restarted(script: str, code: int, tmp_path: Path) -> None:
    deaths: list[tuple[int, int]] = []
    command = Command(["sh", "-c", script], os.environ)
    child = Child(
        "thing",
        command,
        log_path=tmp_path / "log",
        on_death=lambda pid, code: deaths.append((pid, code)),
        longest_pause_seconds=0.01,
    )
    watching = asyncio.create_task(child.run())
    await until(lambda: child.deaths > 2 * MAX_QUICK_DEATHS)
    assert len(set(deaths)) == len(deaths) >= 2 * MAX_QUICK_DEATHS
    assert {returned for _, returned in deaths} == {code}
    child.stop()
    await child.ended(5.0)
    await watching


async def test_a_process_with_a_final_exit_code_is_not_restarted(tmp_path: Path) -> None:
    child = child_of([sys.executable, "-c", "raise SystemExit(2)"], tmp_path / "log", final_codes=frozenset({2}))
    with pytest.raises(ConfigError, match="ended with code 2"):  # so that `ktqueue up` exits with 2 as well
        await child.run()
    assert child.deaths == 1


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = child_of([sys.executable, "-c", deaf], tmp_path / "log")
    watching = asyncio.create_task(child.run())
    pid = await running_pid(child)
    await until(lambda: "up" in (tmp_path / "log").read_text())
    child.stop()
    await child.ended(0.2)
    await watching
    assert not alive(pid)


async def test_a_process_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from ktqueue.workers.supervision.child import Child\n"
        "from ktqueue.workers.supervision.process import Command\n"
        f"child = Child('thing', Command({SLEEPS!r}, os.environ), log_path=Path({str(tmp_path / 'log')!r}))\n"
        "async def main():\n"
        "    task = asyncio.create_task(child.run())\n"
        "    while child.pid is None: await asyncio.sleep(0.01)\n"
        "    print(child.pid, flush=True)\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(pid))
