"""The bridge and the control worker as `ktqueue up` runs them: an arq client, a webhook, and kill -9."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import arq
import httpx
import pytest
from arq.connections import RedisSettings
from processes import until

from ktqueue.arq_json import dumps, loads
from ktqueue.core.config import (
    BridgeConfig,
    BrokerConfig,
    Config,
    ControlConfig,
    EngineConfig,
    GatewayConfig,
    WorkerConfig,
)
from ktqueue.workers.supervision.supervisor import Supervisor


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[Any]]]:
    """Receives webhooks and records them."""
    got: list[Any] = []

    class WebhookHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), WebhookHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://localhost:{server.server_port}/", got
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.long
async def test_an_arq_job_with_a_webhook_survives_kills_of_the_helpers(
    tmp_path: Path, receiver: tuple[str, list[Any]]
) -> None:
    url, got = receiver
    config = Config(
        broker=BrokerConfig(state_dir=str(tmp_path / "state")),
        engine=EngineConfig(num_pages=1024, threads=1),
        worker=WorkerConfig(drain_seconds=1.0),
        gateway=GatewayConfig(port=0, drain_seconds=1.0),
        bridge=BridgeConfig(enabled=True),
        control=ControlConfig(enabled=True, webhook_secret="secret", webhook_hosts=("localhost",)),
    )
    body = {
        "model": "demo",
        "prompt": "Once upon a time",
        "sampling": {"max_tokens": 200, "ignore_eos": True},
        "webhook": {"url": url, "events": ["completed"]},
    }
    async with Supervisor(config) as up, httpx.AsyncClient(base_url=up.url, trust_env=False) as http:
        settings = RedisSettings.from_dsn(up.broker_url)
        settings.password = up.broker_url.rpartition("password=")[2]
        pool = await arq.create_pool(
            settings, default_queue_name=config.bridge.queue, job_serializer=dumps, job_deserializer=loads
        )
        try:
            job = await pool.enqueue_job("generate", body, _job_id="whole")
            assert job is not None
            seen = []
            async with asyncio.timeout(40):
                while (await http.get("/v1/jobs/whole")).status_code != 200:  # noqa: ASYNC110 # it has no event
                    await asyncio.sleep(0.02)
            for helper in up.helpers:
                seen.append(helper.pid)
                helper.signal(signal.SIGKILL)
            answer = await job.result(timeout=60, poll_delay=0.05)
            await until(lambda: got, 40)
        finally:
            await pool.aclose()
        assert [helper.name for helper in up.helpers] == ["bridge", "control"]
        assert [helper.deaths for helper in up.helpers] == [1, 1]
        pids = [helper.pid for helper in up.helpers]
        assert not set(pids) & {None, *seen}
    assert answer["usage"]["completion_tokens"] == 200
    assert (got[0]["type"], got[0]["data"]["id"]) == ("job.completed", "whole")
    assert got[0]["data"]["result"][0]["text"] == answer["text"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)
