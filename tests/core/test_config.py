"""Settings come from a file, the environment and flags. Errors name wrong settings."""

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from ktqueue.core.config import BrokerConfig, Config, all_settings, config_environment, load_config
from ktqueue.core.errors import ConfigError

A, B = "a" * 64, "b" * 64


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ktqueue.toml"
    path.write_text(text)
    return path


def test_the_defaults_need_no_file() -> None:
    assert load_config() == Config()


def test_later_sources_win(tmp_path: Path) -> None:
    path = write(tmp_path, '[engine]\nmax_num_seqs = 4\nthreads = 1\nmodel = "file"\n[broker]\nlease_seconds = 3\n')
    config = load_config(
        path,
        {"KTQUEUE_ENGINE_THREADS": "2", "KTQUEUE_ENGINE_MODEL": "environment", "PATH": "/bin", "KTQUEUE_ISA": "scalar"},
        {"engine": {"model": "flag", "threads": None}},
    )
    assert config.engine.max_num_seqs == 4
    assert config.engine.threads == 2
    assert config.engine.model == "flag"
    assert config.broker.lease_seconds == 3.0
    assert isinstance(config.broker.lease_seconds, float)


def test_each_kind_of_value_is_read(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, f'[gateway]\napi_keys = ["{A}", "{B}"]\nmax_body_bytes = "2MiB"\n'),
        {"KTQUEUE_ENGINE_ENABLE_PREFIX_CACHING": "No", "KTQUEUE_ENGINE_KV_CACHE_BYTES": "1g"},
    )
    assert config.gateway.api_keys == (A, B)
    assert config.gateway.max_body_bytes == 2 << 20
    assert config.engine.enable_prefix_caching is False
    assert config.engine.kv_cache_bytes == 1_000_000_000
    numbered = write(tmp_path, "[engine]\nmax_num_seqs = 4\n")
    assert load_config(numbered, {"KTQUEUE_ENGINE_MAX_NUM_SEQS": "auto"}).engine.max_num_seqs is None
    assert load_config(numbered, {}, {"engine": {"max_num_seqs": "16"}}).engine.max_num_seqs == 16
    assert load_config(environment={"KTQUEUE_GATEWAY_API_KEYS": f"{A},{B}"}).gateway.api_keys == (A, B)


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("[engin]\n", {}, None),
        ("[engin]\nmodel = 1\n", {}, "unknown section 'engin' (did you mean 'engine'?)"),
        ('[engine]\nmodle = "x"\n', {}, "unknown key engine.modle (did you mean 'model'?)"),
        ("[engine]\nzzzz = 1\n", {}, "unknown key engine.zzzz"),
        ("engine = 1\n", {}, "engine must be a table, [engine], got 1"),
        ("model = 'demo'\n", {}, "model = 'demo' is in no section; model belongs below [engine]"),
        ("nosuch = 1\n", {}, "nosuch = 1 is in no section; every setting belongs below a section"),
        ("[engine\n", {}, "ktqueue.toml"),
        ("[engine]\nthreads = 'two'\n", {}, "engine.threads"),
        ("[engine]\nthreads = true\n", {}, "engine.threads"),
        ("[engine]\nthreads = 1.5\n", {}, "engine.threads"),
        ("[engine]\nmax_num_seqs = 'many'\n", {}, "engine.max_num_seqs must be a whole number, or auto, got 'many'"),
        ("[engine]\nenable_prefix_caching = 1\n", {}, "engine.enable_prefix_caching"),
        ("[gateway]\nallowed_hosts = ['llm.example:443']\n", {}, "gateway.allowed_hosts must be names without a port"),
        ("[broker]\nlease_seconds = true\n", {}, "broker.lease_seconds"),
        ("[broker]\nlease_seconds = 0\n", {}, "ktqueue.toml: broker.lease_seconds must be a number from 0.01 on"),
        ("[broker]\nlease_seconds = nan\n", {}, "broker.lease_seconds"),
        ("[broker]\nmax_attempts = 0\n", {}, "broker.max_attempts"),
        ("[broker]\nprefix = 'a}b'\n", {}, "ktqueue.toml: broker.prefix"),
        ("[broker]\nstate_dir = ''\n", {}, "ktqueue.toml: broker.state_dir must be a text that is not empty, got ''"),
        ("[broker]\ndurability = 1\n", {}, "broker.durability must be one of process, fsync, got 1"),
        ("[broker]\nmax_request_bytes = '4 chunks'\n", {}, "broker.max_request_bytes"),
        ("[broker]\nmax_request_bytes = 1.5\n", {}, "broker.max_request_bytes must be a size such as 256MiB, got 1.5"),
        ("[engine]\nserved_model_name = {a = 1}\n", {}, "served_model_name must be a list of texts, got {'a': 1}"),
        ("[engine]\nserved_model_name = [1]\n", {}, "served_model_name must be a list of texts, got [1]"),
        ("[bridge]\ntenant = 'a b'\n", {}, "ktqueue.toml: bridge.tenant must be 1 to 64 letters, digits or _ . -"),
        ("[control]\nwebhook_hosts = ['http://x']\n", {}, "control.webhook_hosts must be host or host:port"),
        ("[[gateway.tenants]]\nname = 'a'\n", {}, ".toml: [[gateway.tenants]] number 1 (a): a tenant has no keys"),
        ("", {"KTQUEUE_LOG_MAX_BYTES": "9" * 400}, "environment variable KTQUEUE_LOG_MAX_BYTES: log.max_bytes must be"),
        ("", {"KTQUEUE_GATEWAY_PORT": "65536"}, "environment variable KTQUEUE_GATEWAY_PORT: gateway.port must be"),
        ("", {"KTQUEUE_BROKER_LEASE_SECOND": "1"}, "KTQUEUE_BROKER_LEASE_SECOND"),
        ("", {"KTQUEUE_BROKER_LEASE_SECONDS": "soon"}, "KTQUEUE_BROKER_LEASE_SECONDS"),
        ("", {"KTQUEUE_BROKR_URL": "x"}, "did you mean 'broker'"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, environment: dict[str, str], message: str | None) -> None:
    path = write(tmp_path, text)
    if message is None:  # an empty section is harmless
        assert load_config(path, environment) == Config()
        return
    with pytest.raises(ConfigError) as caught:
        load_config(path, environment)
    assert message in caught.value.message


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, 1e300])
def test_every_number_has_limits(value: float) -> None:
    numbers = [described for described in all_settings() if described.type in (int, float)]
    assert len(numbers) > 60
    for described in numbers:
        number = 10**30 if described.type is int and value == 1e300 else value
        with pytest.raises(ConfigError, match=rf"{described.key} must be .*, got {re.escape(repr(number))}$") as caught:
            described.check(number)
        assert caught.value.param == described.key and caught.value.limit is not None
        with pytest.raises(ConfigError, match=described.key):
            load_config(overrides={described.section: {described.name: number}})


def test_a_wrong_value_of_a_flag_names_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--redis-url: broker\.url must be a text, got 1$"):
        load_config(overrides={"broker": {"url": 1}})
    with pytest.raises(ConfigError, match=r"^--port: gateway\.port must be a number from 0 to 65535, got 65536$"):
        load_config(overrides={"gateway": {"port": "65536"}})


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_config(tmp_path / "bad.toml")


def test_settings_reach_a_child_process() -> None:
    config = load_config(
        overrides={
            "broker": {"url": "redis://x", "lease_seconds": 0.5},
            "gateway": {"api_keys": [A, B], "port": 1},
            "engine": {"enable_prefix_caching": False, "num_pages": 7},
        }
    )
    assert load_config(environment=config_environment(config)) == config
    assert config_environment(Config()) == {}


def test_settings_are_frozen() -> None:
    section = "broker"
    with pytest.raises(AttributeError):
        setattr(Config(), section, BrokerConfig())
    assert all(field.kw_only for field in fields(BrokerConfig))


def test_removed_settings_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(None, {"KTQUEUE_ENGINE_DEFERRED_EXPERTS": "2", "KTQUEUE_ENGINE_TWO_BATCH_OVERLAP": "on"})
    assert config.engine == load_config().engine
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "engine.deferred_experts was removed and is ignored" in caplog.text
