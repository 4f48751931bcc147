"""Hundreds of hostile sockets at one gateway: its memory stays small, another client is served, and they are closed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import free_ports
from scripted_worker import ScriptedWorker

from benchmarks.machine import resident_bytes
from ktqueue.broker.broker import Broker
from ktqueue.core.config import BrokerConfig
from tests.soak.flood_clients import KINDS

ROOT = Path(__file__).resolve().parents[2]
SOCKETS = 150  # of each kind
PREFIX = "floods"
GROWTH_BYTES = 48 << 20  # much more than these sockets need, and much less than one of them could fill
HELD = ["silent", "idle", "slow headers", "slow body", "answers that nobody reads"]  # open until their timeout
ENDLESS = [kind for kind in KINDS if kind not in HELD]
CHAT: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def gateway(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """URL and process id of a gateway with short timeouts."""
    [port] = free_ports(1)
    settings = {
        "BROKER_URL": redis_server, "BROKER_PREFIX": PREFIX, "GATEWAY_PORT": port, "GATEWAY_HEADER_TIMEOUT": 1,
        "GATEWAY_KEEP_ALIVE_TIMEOUT": 1, "GATEWAY_STALL_SECONDS": 1, "GATEWAY_BODY_TIMEOUT": 1,
        "GATEWAY_MAX_SOCKETS": 500, "GATEWAY_MAX_SOCKETS_PER_ADDRESS": 200, "GATEWAY_MAX_BODIES_BYTES": "8MiB",
    }  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {f"KTQUEUE_{name}": str(value) for name, value in settings.items()}
    with (tmp_path_factory.mktemp("logs") / "gateway.log").open("wb") as log:
        command = [sys.executable, "-m", "ktqueue.gateway"]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            httpx.get(f"{url}/healthz")
            break
        except httpx.TransportError:
            assert process.poll() is None
    yield url, process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


@pytest.fixture
async def stranger(gateway: tuple[str, int], redis_server: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway. A worker is running."""
    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.77")
    async with (
        await Broker.open(BrokerConfig(url=redis_server, prefix=PREFIX)) as broker,
        ScriptedWorker(broker),
        httpx.AsyncClient(base_url=gateway[0], transport=transport, timeout=60) as http,
    ):
        yield http


@asynccontextmanager
async def flood(kinds: list[str], port: int, addresses: int) -> AsyncIterator[dict[str, int]]:
    """Opens hostile sockets once. Afterwards the report has the number of open ones."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.soak.flood_clients", "--kinds", ",".join(kinds), "--port", str(port),
        "--sockets", str(SOCKETS * len(kinds)), "--addresses", str(addresses), "--reopen-per-second", "0.001",
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    report: dict[str, int] = {}
    try:
        await process.stdout.readline()
        yield report
        process.stdin.close()
        report.update(json.loads(await process.stdout.readline()))
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(("kinds", "addresses"), [(HELD, 1), (HELD + ENDLESS, 50)])
async def test_a_flood_does_not_harm_other_clients(gateway: Any, stranger: Any, kinds: Any, addresses: int) -> None:
    url, process = gateway
    before = resident_bytes(process)
    async with flood(kinds, int(url.rpartition(":")[2]), addresses) as report:
        for _ in range(3):
            assert (await stranger.post("/v1/chat/completions", json=CHAT)).status_code == 200
            assert (await stranger.get("/healthz")).status_code == 200
        async with asyncio.timeout(60):
            while "ktqueue:open_connections 1.0" not in (await stranger.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert resident_bytes(process) - before < GROWTH_BYTES
    unread = SOCKETS if "answers that nobody reads" in kinds else 0  # they do not check whether they were closed
    assert report["open"] <= unread
