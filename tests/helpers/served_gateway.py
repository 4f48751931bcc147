"""A gateway that serves HTTP on the test's event loop, and what its clients read."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from ktqueue.core.config import Config
from ktqueue.gateway.serve import GatewayServer, build_server

ServeWith = Callable[..., AbstractAsyncContextManager[tuple[GatewayServer, str]]]  # settings -> server and URL
Conforms = Callable[[Any, str], None]  # value, name of OpenAI's type


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[tuple[GatewayServer, str]]:
    """A gateway under uvicorn on this loop, and its URL."""
    server = build_server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@dataclass
class EventFrames:
    """The frames of an SSE response: JSON data and ids in order, number of comments, and whether [DONE] was last."""

    data: list[Any] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    pings: int = 0
    done: bool = False


async def read_frames(response: httpx.Response, until: Callable[[EventFrames], bool] = lambda _: False) -> EventFrames:
    """Read an SSE response to its end, or until `until` says so."""
    frames = EventFrames()
    async for line in response.aiter_lines():
        if line.startswith(":"):
            frames.pings += 1
        elif line.startswith("id: "):
            frames.ids.append(int(line[4:]))
        elif line == "data: [DONE]":
            frames.done = True
        elif line.startswith("data: "):
            assert not frames.done
            frames.data.append(json.loads(line[6:]))
        if until(frames):
            break
    return frames


PostStream = Callable[..., Awaitable[EventFrames]]  # path, body, headers -> all frames
