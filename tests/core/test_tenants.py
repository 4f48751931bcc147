"""Tenants in the settings: how they are read, and what is refused. No message repeats a key."""

import json
from pathlib import Path

import pytest

from ktqueue.core.config import GatewayConfig, config_environment, load_config
from ktqueue.core.errors import ConfigError
from ktqueue.core.tenants import TenantConfig, TenantLimits, batch_limits, hash_of

A, B, C = hash_of("a"), hash_of("b"), hash_of("c")


def tables(*tenants: tuple[object, object]) -> list[dict[str, object]]:
    return [{"name": name, "keys": keys} for name, keys in tenants]


def test_tenants_are_read_from_a_file_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "ktqueue.toml"
    first = f'[[gateway.tenants]]\nname = "acme"\nkeys = ["{A}", "{B}"]\n'
    path.write_text(f'{first}[[gateway.tenants]]\nname = "b.c"\nkeys = ["{C}"]\n')
    config = load_config(path)
    wanted = (TenantConfig(name="acme", keys=(A, B)), TenantConfig(name="b.c", keys=(C,)))
    assert config.gateway.tenants == wanted
    assert load_config(environment=config_environment(config)) == config
    environment = {"KTQUEUE_GATEWAY_TENANTS": json.dumps(tables(("acme", [A, B]), ("b.c", [C])))}
    assert load_config(environment=environment).gateway.tenants == wanted
    assert load_config(environment={"KTQUEUE_GATEWAY_TENANTS": ""}).gateway.tenants == ()


def test_limits_stand_beside_the_keys_of_a_tenant(tmp_path: Path) -> None:
    path = tmp_path / "ktqueue.toml"
    path.write_text(
        f'[[gateway.tenants]]\nname = "acme"\nkeys = ["{A}"]\nmax_live_jobs = 8\nmax_queued_bytes = "2MiB"\n'
        "requests_per_minute = 60\ntokens_per_minute = 9000\ntokens_burst = 1000\n"
    )
    config = load_config(path)
    (tenant,) = config.gateway.tenants
    assert (tenant.max_live_jobs, tenant.max_queued_jobs, tenant.max_queued_bytes) == (8, None, 2 << 20)
    assert (tenant.most_requests, tenant.most_tokens) == (60, 1000)
    assert load_config(environment=config_environment(config)) == config


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        (tables(("acme", ["secret"])), "number 1 is not the SHA-256 of a key"),
        (tables(("acme", [A, A.upper()])), "number 2 is not the SHA-256 of a key"),
        (tables(("acme", [])), "acme has no keys"),
        (tables(("acme", "secret")), "must be a list"),
        (tables(("a b", [A])), "a tenant's name must be"),
        (tables((5, [A])), "a tenant's name must be"),
        (tables(("default", [A])), "not 'default'"),
        (tables(("acme", [A]), ("acme", [B])), "two tenants are named acme"),
        (tables(("acme", [A]), ("other", [A])), "has another owner"),
        (tables(("acme", [C])), "has another owner"),
        ([{"name": "acme"}], "a tenant has no keys"),
        ([{"keys": [A]}], "a tenant has no name"),
        ([{"name": "acme", "keys": [A], "limit": 5}], "unknown key 'limit'"),
        ([{"name": "acme", "keys": [A], "max_live_jobs": 0}], "number 1 (acme): a tenant's max_live_jobs must be"),
        ([{"name": "acme", "keys": [A], "tokens_per_minute": "5"}], "tokens_per_minute must be an integer from 1 to"),
        ([{"name": "acme", "keys": [A], "weight": 0}], "weight must be an integer from 1 to 1000, got 0"),
        ([*tables(("acme", [A])), {"name": "b", "keys": [B], "weight": True}], "number 2 (b): a tenant's weight"),
        ([{"name": "acme", "keys": [A], "requests_burst": 5}], "requests_burst needs requests_per_minute"),
        ([{"name": "acme", "keys": [A], "max_queued_bytes": "much"}], "must be a size"),
        (["secret"], "must be tables"),
        ({"secret": 1}, "must be tables"),
        ("secret", "not JSON"),
    ],
)
def test_wrong_tenants_are_named(tenants: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={"gateway": {"tenants": tenants, "api_keys": [C]}})
    assert message in caught.value.message
    assert "secret" not in caught.value.message
    assert caught.value.param is not None
    assert caught.value.param.startswith("gateway.tenants")


def test_a_plain_key_is_refused_without_being_repeated() -> None:
    for make in (
        lambda: GatewayConfig(api_keys=("secret",)),
        lambda: load_config(environment={"KTQUEUE_GATEWAY_API_KEYS": f"{A},secret"}),
    ):
        with pytest.raises(ConfigError, match="ktqueue keys new") as caught:
            make()
        assert "secret" not in caught.value.message
        assert caught.value.value is None


def test_batches_leave_half_of_a_tenants_limits() -> None:
    limits = TenantLimits(max_live_jobs=1, max_queued_jobs=9, max_queued_bytes=50, requests_per_minute=60, weight=3)
    assert batch_limits(limits) == TenantLimits(
        max_live_jobs=1, max_queued_jobs=4, max_queued_bytes=50, requests_per_minute=60, requests_burst=30, weight=3
    )
    assert batch_limits(TenantLimits()) == TenantLimits()
