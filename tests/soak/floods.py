"""A stranger's chat while thousands of hostile sockets are open: `python -m tests.soak.floods --sockets 5000`.

Redis, gateway and worker run as under `ktqueue up`, with default settings. For each kind of hostile socket (see
`tests.soak.flood_clients`) that many are opened, from one address and from several. A socket that the gateway
closes is opened again, at a limited rate. Meanwhile a client at another address sends one chat after another, each over
a new connection. The time to its first token is measured from before the connection, and also before each flood, when
nobody else is connected. Memory is what the gateway's process has resident.
"""

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import httpx

from benchmarks import machine
from benchmarks.command import command_line
from benchmarks.queue.servers import whole_system
from benchmarks.queue.system import stream
from benchmarks.results import write
from ktqueue.core.config import EngineConfig
from ktqueue.workers.supervision.supervisor import Supervisor
from tests.soak.flood_clients import KINDS

ADDRESSES = (1, 50)
STRANGER = "127.0.0.77"
TIMEOUT = 30.0  # seconds: a chat that takes longer failed
SETTLE = 8.0  # seconds from when all sockets have been opened to the first chat
PAUSE = 0.1  # seconds between two chats


async def chat(url: str, turn: int) -> float | None:
    """Return the seconds to the first text of a short answer; None if it was refused or too late."""
    body = {"model": "demo", "max_tokens": 4, "ignore_eos": True,
            "messages": [{"role": "user", "content": f"Tell me tale number {turn}."}]}  # fmt: skip
    transport = httpx.AsyncHTTPTransport(local_address=STRANGER)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, transport=transport) as http:
            moments = await stream(http, "/v1/chat/completions", body)
    except httpx.HTTPError:
        return None
    return moments[1] - moments[0] if len(moments) > 1 else None


async def chats(url: str, count: int) -> list[float | None]:
    """Send the stranger's chats, one after another."""
    taken = []
    for turn in range(count):
        taken.append(await chat(url, turn))
        await asyncio.sleep(PAUSE)
    return taken


async def probes(url: str, until: asyncio.Event) -> list[float | None]:
    """Measure how long /healthz takes, again and again, each time over a new connection."""
    taken: list[float | None] = []
    while not until.is_set():
        began = time.monotonic()
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as http:
                ok = (await http.get(f"{url}/healthz")).is_success
        except httpx.TransportError:
            ok = False
        taken.append(time.monotonic() - began if ok else None)
        await asyncio.sleep(0.5)
    return taken


def _be_nice() -> None:
    """Give this process low priority: real hostile clients would run on other machines."""
    os.nice(19)


@asynccontextmanager
async def flood(kind: str, port: int, sockets: int, addresses: int, rate: float) -> AsyncIterator[dict[str, Any]]:
    """Run the hostile process. Yields a report once all sockets are open; at the end it gets the process's counts."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.soak.flood_clients", "--kinds", kind, "--port", str(port),
        "--sockets", str(sockets), "--addresses", str(addresses), "--reopen-per-second", str(rate),
        cwd=machine.ROOT, preexec_fn=_be_nice, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    report: dict[str, Any] = {}
    try:
        async with asyncio.timeout(120):
            json.loads(await process.stdout.readline())
        yield report
        process.stdin.close()
        async with asyncio.timeout(30):
            report.update(json.loads(await process.stdout.readline()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def highest_memory(process: int, until: asyncio.Event) -> int:
    """Measure resident memory ten times a second. Returns the largest value in bytes."""
    highest = 0
    while not until.is_set():
        highest = max(highest, machine.resident_bytes(process))
        await asyncio.sleep(0.1)
    return highest


async def measure(
    up: Supervisor, kind: str, *, sockets: int, addresses: int, count: int, rate: float
) -> dict[str, Any]:
    """Measure one kind of hostile socket, opened from `addresses` addresses."""
    process = up.gateway.pid
    assert process is not None
    idle = await chats(up.url, count)
    before = machine.resident_bytes(process)
    over = asyncio.Event()
    watch = asyncio.create_task(highest_memory(process, over))
    async with flood(kind, up.config.gateway.port, sockets, addresses, rate) as report:
        await asyncio.sleep(SETTLE)
        probing = asyncio.create_task(probes(up.url, over))
        during = await chats(up.url, count)
        over.set()
        probed = await probing
    highest = await watch
    await asyncio.sleep(2)
    assert up.gateway.pid == process, "the gateway died"
    return {
        "kind": kind,
        "addresses": addresses,
        "sockets": sockets,
        "idle_ms": _middle(idle),
        "flooded_ms": _middle(during),
        "flooded_longest_ms": _longest(during),
        "failed_chats": during.count(None),
        "probe_longest_ms": _longest(probed),
        "failed_probes": probed.count(None),
        "memory_before_mb": before / 1e6,
        "memory_highest_mb": highest / 1e6,
        **report,
    }


def _middle(seconds: list[float | None]) -> float | None:
    """Return the median of the chats that succeeded, in milliseconds."""
    times = [value for value in seconds if value is not None]
    return 1e3 * median(times) if times else None


def _longest(seconds: list[float | None]) -> float | None:
    """Return the longest of the chats that succeeded, in milliseconds."""
    return max((1e3 * value for value in seconds if value is not None), default=None)


async def _run(kinds: list[str], sockets: int, count: int, rate: float) -> list[dict[str, Any]]:
    figures = []
    async with whole_system(EngineConfig(threads=1)) as up:
        await chats(up.url, count)
        for kind in kinds:
            for addresses in ADDRESSES:
                figure = await measure(up, kind, sockets=sockets, addresses=addresses, count=count, rate=rate)
                sys.stderr.write(json.dumps(figure) + "\n")
                figures.append({**figure, "load_average": machine.load_average()})
    return figures


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sockets", type=int, default=5_000, help="of each kind")
    parser.add_argument("--chats", type=int, default=20, help="before and during each flood")
    parser.add_argument("--reopen-per-second", type=float, default=200.0, help="of sockets that the gateway closed")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which, with commas")
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < arguments.sockets + 512:
        resource.setrlimit(resource.RLIMIT_NOFILE, (arguments.sockets + 512, hard))
    kinds = arguments.kinds.split(",")
    figures = asyncio.run(_run(kinds, arguments.sockets, arguments.chats, arguments.reopen_per_second))
    loads = sorted(figure["load_average"] for figure in figures)
    result = {
        "what": "chats of a stranger while hostile sockets are open",
        "chats": arguments.chats,
        "conditions": f"load average {loads[0]:g} to {loads[-1]:g}",
        "reopen_per_second": arguments.reopen_per_second,
        "figures": figures,
    }
    write(arguments.results / "floods.json", result)


if __name__ == "__main__":
    main()
