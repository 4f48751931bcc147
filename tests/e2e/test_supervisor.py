"""A start that cannot succeed says why and leaves no process behind."""

import socket
from pathlib import Path

import pytest

from ktqueue.core.config import (
    BrokerConfig,
    Config,
    EngineConfig,
    GatewayConfig,
    ProfileConfig,
    WorkerConfig,
    config_environment,
    load_config,
)
from ktqueue.core.errors import ConfigError
from ktqueue.core.tenants import TenantConfig
from ktqueue.workers.supervision.child import ProcessFailed
from ktqueue.workers.supervision.supervisor import Supervisor


def test_settings_reach_a_child_through_its_environment() -> None:
    config = Config(
        broker=BrokerConfig(url="redis://:secret@127.0.0.1:7/0", lease_seconds=3.5),
        engine=EngineConfig(threads=3, enable_prefix_caching=False, kv_cache_bytes=12_345, dtype="float32"),
        worker=WorkerConfig(drain_seconds=0.0),
        gateway=GatewayConfig(
            api_keys=("1" * 64, "2" * 64), tenants=(TenantConfig(name="acme", keys=("3" * 64,)),), host="::1"
        ),
    )
    assert load_config(environment=config_environment(config)) == config
    assert config_environment(Config()) == {}


async def test_a_model_that_cannot_be_loaded_is_reported_at_once(redis_url: str, tmp_path: Path) -> None:
    config = Config(
        broker=BrokerConfig(url=redis_url, state_dir=str(tmp_path)),
        engine=EngineConfig(model=str(tmp_path / "nowhere.gguf"), host_memory_utilization=0.6),
        gateway=GatewayConfig(port=0),
    )
    reports: list[str] = []
    up = Supervisor(config, workers=3, report=reports.append)
    with pytest.raises(ProcessFailed, match=r"(?s)fork-server ended with code 2.*nowhere.gguf"):
        await up.__aenter__()
    assert reports[0] == "waiting for the gateway"
    assert up.gateway.pid is None
    assert up.workers[0].pid is None
    assert up.fork_server is not None
    assert up.fork_server.pid is None
    assert up.fork_server.deaths == 1
    assert up.config.engine.host_memory_utilization == pytest.approx(0.6 / 3)  # the workers share the memory


async def test_a_profile_that_cannot_be_written_is_reported_at_once(redis_url: str, tmp_path: Path) -> None:
    config = Config(
        broker=BrokerConfig(url=redis_url, state_dir=str(tmp_path)),
        gateway=GatewayConfig(port=0),
        profile=ProfileConfig(folder="/dev/null/profile"),
    )
    with pytest.raises(ConfigError, match=r"(?s)gateway ended with code 2.*profile.folder .* cannot"):
        await Supervisor(config).__aenter__()


async def test_an_error_names_a_port_that_is_in_use(redis_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config(broker=BrokerConfig(url=redis_url, state_dir=str(tmp_path)), gateway=GatewayConfig(port=port))
        with pytest.raises(ConfigError, match=f"gateway.port {port}.*in use"):
            await Supervisor(config).__aenter__()
