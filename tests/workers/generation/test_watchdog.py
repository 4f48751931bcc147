"""The watchdog ends a process if all of it hangs, but not a process that works."""

import asyncio
import sys
from pathlib import Path

import pytest

from ktqueue.workers.exit_codes import BROKEN
from ktqueue.workers.generation import heartbeat

ROOT = Path(heartbeat.__file__).parents[3]
PROCESS = """
import asyncio, ctypes
from ktqueue.workers.generation.heartbeat import watch_event_loop

async def main():
    watchdog = asyncio.create_task(watch_event_loop({seconds}))
    await asyncio.sleep(0.5)
    if {hangs}:
        ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock
    watchdog.cancel()
    await asyncio.wait([watchdog])
    await asyncio.sleep(0.5)

asyncio.run(main())
"""


@pytest.mark.parametrize(("hangs", "seconds", "code"), [(True, 1.0, BROKEN), (False, 30.0, 0)])
async def test_a_process_that_hangs_is_ended(hangs: bool, seconds: float, code: int) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS.format(hangs=hangs, seconds=seconds), cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(40):
        _, stacks = await process.communicate()
    assert process.returncode == code
    assert (b"in main" in stacks) == hangs
