"""Fixtures of all tests: a private Redis for the session, an empty one for each test, the shared test data."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from ktqueue.broker.server import PrivateServer
from ktqueue.core.config import BrokerConfig


def pytest_configure() -> None:
    """Let Ctrl-C reach the processes under test, also where the tests run in a background that ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of one real server for the session."""
    server = PrivateServer()
    yield server.start(tmp_path_factory.mktemp("redis"))
    server.stop()


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """URL of a real server with an empty keyspace."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server


@pytest.fixture
def broker_config(redis_url: str) -> BrokerConfig:
    """Settings for an empty server."""
    return BrokerConfig(url=redis_url)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of big test inputs beside the checkout; skips where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("shared/data is absent")
    return folder
