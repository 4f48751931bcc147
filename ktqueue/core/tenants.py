"""Tenants in the settings: their names, the hashes of their API keys, and their limits.

The settings never contain a key, only its SHA-256 in hexadecimal. Error messages do not repeat a wrong hash, since it
may be a key. The broker counts what the limits limit. Rates follow the generic cell rate algorithm: after a pause a
tenant may use `burst` at once, and then a steady number per minute.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any, Self

from ktqueue.core.errors import ConfigError
from ktqueue.core.units import parse_bytes

MAX_WEIGHT = 1_000
MAX_LIMIT = 10**12
DEFAULT_TENANT = "default"  # for jobs without a tenant, and for the keys in gateway.api_keys

_HASH = re.compile(r"[0-9a-f]{64}")
TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Owner:
    """Who takes turns: a tenant with its weight, and one of its callers, such as a client address."""

    tenant: str = ""
    caller: str = ""
    weight: float = 1


NOBODY = Owner()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """None means no limit. By default a burst is what the rate allows in one minute.

    Live jobs wait or run; queued jobs wait. Queued bytes are the sizes of waiting requests. Stored bytes are all that
    Redis keeps for the tenant's jobs: requests, and the records and journals of ended jobs while they are kept.
    Files are uploaded files and those that batches write; without a limit here, those of `storage` hold.
    Tokens are those of prompts and answers together. `weight`: the tenant's part of the turns, beside the other
    tenants of a class, in tokens.

    Raises ConfigError naming the field.
    """

    max_live_jobs: int | None = None
    max_queued_jobs: int | None = None
    max_queued_bytes: int | None = None
    max_stored_bytes: int | None = None
    max_files: int | None = None
    max_files_bytes: int | None = None
    requests_per_minute: int | None = None
    requests_burst: int | None = None
    tokens_per_minute: int | None = None
    tokens_burst: int | None = None
    weight: int = 1

    def __post_init__(self) -> None:
        for limit in fields(TenantLimits):
            value = getattr(self, limit.name)
            is_weight = limit.name == "weight"
            most = MAX_WEIGHT if is_weight else MAX_LIMIT
            if (value is not None or is_weight) and (type(value) is not int or not 1 <= value <= most):
                raise ConfigError(
                    f"a tenant's {limit.name} must be an integer from 1 to {most}, got {value!r}",
                    param=f"gateway.tenants.{limit.name}",
                    limit=f"1 to {most}",
                    value=str(value),
                )
        for what in ("requests", "tokens"):
            if getattr(self, f"{what}_per_minute") is None and getattr(self, f"{what}_burst") is not None:
                raise ConfigError(
                    f"a tenant's {what}_burst needs {what}_per_minute", param=f"gateway.tenants.{what}_burst"
                )

    @property
    def most_requests(self) -> int | None:
        """Most requests at once, after a pause."""
        return self.requests_burst or self.requests_per_minute

    @property
    def most_tokens(self) -> int | None:
        """Most tokens at once, after a pause."""
        return self.tokens_burst or self.tokens_per_minute


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig(TenantLimits):
    """One `[[gateway.tenants]]` table. `keys` has at least one SHA-256 hash of an API key.

    Raises ConfigError naming the tenant and the field.
    """

    name: str
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        TenantLimits.__post_init__(self)  # super() without arguments fails in a dataclass with slots
        if not isinstance(self.name, str) or not TENANT_NAME.fullmatch(self.name) or self.name == DEFAULT_TENANT:
            raise ConfigError(
                f"a tenant's name must be 1 to 64 letters, digits or _ . - and not {DEFAULT_TENANT!r}, "
                f"got {self.name!r}",
                param="gateway.tenants.name",
                value=str(self.name),
            )
        if not self.keys:  # if no tenant had a key, the gateway would accept every request
            raise ConfigError(f"the tenant {self.name} has no keys", param="gateway.tenants.keys")
        check_hashes(self.keys, f"keys of the tenant {self.name}", "gateway.tenants.keys")

    @classmethod
    def of(cls, table: Any) -> Self:
        """Read a tenant from a table of the settings. Raises ConfigError."""
        if not isinstance(table, Mapping):
            raise ConfigError("gateway.tenants must be tables: [[gateway.tenants]]", param="gateway.tenants")
        known = {field.name for field in fields(cls)}
        for key in table:
            if key not in known:
                raise ConfigError(
                    f"unknown key {key!r} of a tenant; known: {', '.join(sorted(known))}", param="gateway.tenants"
                )
        for key in ("name", "keys"):
            if key not in table:
                raise ConfigError(f"a tenant has no {key}", param=f"gateway.tenants.{key}")
        if not isinstance(table["keys"], list | tuple):
            raise ConfigError("a tenant's keys must be a list", param="gateway.tenants.keys")
        settings = {**table, "keys": tuple(table["keys"])}
        for key in ("max_queued_bytes", "max_stored_bytes", "max_files_bytes"):
            if settings.get(key) is not None:
                try:
                    settings[key] = parse_bytes(settings[key])
                except ValueError as error:
                    raise ConfigError(
                        f"a tenant's {key} must be a size such as 64MiB: {error}", param=f"gateway.tenants.{key}"
                    ) from error
        return cls(**settings)


def batch_limits(limits: TenantLimits) -> TenantLimits:
    """The limits of a tenant for the lines of its batches, which leave half of its jobs and its burst for others.

    Lines wait for these limits. A limit that refuses a large request for good stays as it is.
    """
    values = {limit.name: getattr(limits, limit.name) for limit in fields(TenantLimits)}
    values["requests_burst"] = limits.most_requests
    for name in ("max_live_jobs", "max_queued_jobs", "requests_burst"):
        if values[name] is not None:
            values[name] = max(1, values[name] // 2)
    return TenantLimits(**values)


def hash_of(key: str) -> str:
    """Return the hash that the settings contain instead of a key."""
    return sha256(key.encode()).hexdigest()


def check_hashes(hashes: Iterable[Any], what: str, param: str) -> None:
    """Raises ConfigError unless all are SHA-256 hashes in lower-case hexadecimal."""
    for position, digest in enumerate(hashes, 1):
        if not isinstance(digest, str) or not _HASH.fullmatch(digest):
            raise ConfigError(
                f"{what}: number {position} is not the SHA-256 of a key, 64 digits of 0-9a-f; "
                "`ktqueue keys new` makes a key and its hash",
                param=param,
            )


def check_tenants(tenants: Iterable[TenantConfig], api_keys: Iterable[str]) -> None:
    """Raises ConfigError if two tenants share a name, or if a key has two owners."""
    names: set[str] = set()
    hashes = set(api_keys)
    for tenant in tenants:
        if tenant.name in names:
            raise ConfigError(f"two tenants are named {tenant.name}", param="gateway.tenants.name", value=tenant.name)
        if hashes & set(tenant.keys):
            raise ConfigError(f"a key of the tenant {tenant.name} has another owner", param="gateway.tenants.keys")
        names.add(tenant.name)
        hashes |= set(tenant.keys)


def read_tenants(value: Any) -> tuple[TenantConfig, ...]:
    """Read tenants from a list of tables, or from its JSON, as the environment has it. Raises ConfigError."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "[]")
        except json.JSONDecodeError as error:
            raise ConfigError("gateway.tenants is not JSON", param="gateway.tenants") from error
    if not isinstance(value, list | tuple):
        raise ConfigError("gateway.tenants must be tables: [[gateway.tenants]]", param="gateway.tenants")
    return tuple(_read_tenant(number, table) for number, table in enumerate(value, 1))


def _read_tenant(number: int, table: Any) -> TenantConfig:
    try:
        return table if isinstance(table, TenantConfig) else TenantConfig.of(table)
    except ConfigError as error:
        name = f" ({table['name']})" if isinstance(table, Mapping) and isinstance(table.get("name"), str) else ""
        message = f"[[gateway.tenants]] number {number}{name}: {error.message}"
        raise ConfigError(message, param=error.param, limit=error.limit, value=error.value) from None


def write_tenants(tenants: Iterable[TenantConfig]) -> str:
    """Write tenants as JSON, the inverse of `read_tenants`. Settings that are None are left out."""
    tables = [{key: value for key, value in asdict(tenant).items() if value is not None} for tenant in tenants]
    return json.dumps(tables, separators=(",", ":"))
