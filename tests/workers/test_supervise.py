"""A start that cannot succeed says why, and leaves nothing running."""

import socket
from pathlib import Path

import pytest

from ktqueue.core.config import BrokerConfig, Config, EngineConfig, GatewayConfig
from ktqueue.core.errors import ConfigError
from workers.child import ProcessFailed
from workers.supervise import Supervisor


async def test_a_model_that_cannot_be_loaded_is_told_at_once(redis_url: str, tmp_path: Path) -> None:
    config = Config(
        broker=BrokerConfig(url=redis_url, state_dir=str(tmp_path)),
        engine=EngineConfig(model=str(tmp_path / "nowhere.gguf")),
        gateway=GatewayConfig(port=0),
    )
    told: list[str] = []
    up = Supervisor(config, report=told.append)
    with pytest.raises(ProcessFailed, match=r"(?s)worker-1 ended with code 2.*nowhere.gguf"):
        await up.__aenter__()
    assert told[0] == "waiting for the gateway"
    assert up.gateway.pid is None
    assert up.workers[0].pid is None
    assert up.workers[0].deaths == 1


async def test_a_port_that_is_taken_is_named(redis_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config(broker=BrokerConfig(url=redis_url, state_dir=str(tmp_path)), gateway=GatewayConfig(port=port))
        with pytest.raises(ConfigError, match=f"gateway.port {port}.*in use"):
            await Supervisor(config).__aenter__()
