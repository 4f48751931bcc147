"""What tests of processes need: free ports, waiting for what has no event, and whether a process runs."""

import asyncio
import inspect
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens."""
    with ExitStack() as sockets:
        listeners = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


async def until(holds: Callable[[], Any], within: float = 30.0) -> None:
    """Ask until the answer, which may be awaitable, is true. Fails after so many seconds."""
    async with asyncio.timeout(within):
        while True:
            found = holds()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
