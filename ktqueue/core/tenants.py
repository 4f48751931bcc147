"""Tenants as the settings name them: who they are, by the hashes of their keys, and what they may use.

A key itself is never in the settings: only its SHA-256, in hexadecimal. No message of an error repeats what stands
where a hash should be, since it may be a key. Knows no HTTP and no Redis.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any, Self

from ktqueue.core.errors import ConfigError
from ktqueue.core.limits import TenantLimits
from ktqueue.core.units import parse_bytes

DEFAULT_TENANT = "default"  # that of jobs without a tenant, and of the keys in gateway.api_keys

_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig(TenantLimits):
    """One `[[gateway.tenants]]` table. `keys`: SHA-256 hashes of its API keys, at least one. Its limits beside them.

    Raises ConfigError naming the tenant and the field.
    """

    name: str
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        TenantLimits.__post_init__(self)  # super() does not see itself in a class with slots
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name == DEFAULT_TENANT:
            raise ConfigError(
                f"a tenant's name must be 1 to 64 letters, digits or _ . - and not {DEFAULT_TENANT!r}, "
                f"got {self.name!r}",
                param="gateway.tenants.name",
                value=str(self.name),
            )
        if not self.keys:  # a gateway whose tenants all had none would let everybody in
            raise ConfigError(f"the tenant {self.name} has no keys", param="gateway.tenants.keys")
        check_hashes(self.keys, f"keys of the tenant {self.name}", "gateway.tenants.keys")

    @classmethod
    def of(cls, table: Any) -> Self:
        """A tenant from a table of the settings. Raises ConfigError."""
        if not isinstance(table, Mapping):
            raise ConfigError("gateway.tenants must be tables: [[gateway.tenants]]", param="gateway.tenants")
        known = {one.name for one in fields(cls)}
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
        for key in ("max_queued_bytes", "max_stored_bytes"):
            if settings.get(key) is not None:
                try:
                    settings[key] = parse_bytes(settings[key])
                except ValueError as error:
                    raise ConfigError(
                        f"a tenant's {key} must be a size such as 64MiB: {error}", param=f"gateway.tenants.{key}"
                    ) from error
        return cls(**settings)


def hash_of(key: str) -> str:
    """What the settings hold in place of a key."""
    return sha256(key.encode()).hexdigest()


def check_hashes(hashes: Iterable[Any], what: str, param: str) -> None:
    """Raises ConfigError unless all are SHA-256 hashes in lower-case hexadecimal."""
    for place, one in enumerate(hashes, 1):
        if not isinstance(one, str) or not _HASH.fullmatch(one):
            raise ConfigError(
                f"{what}: number {place} is not the SHA-256 of a key, 64 hexadecimal digits; "
                "`ktqueue keys new` makes a key and its hash",
                param=param,
            )


def check_tenants(tenants: Iterable[TenantConfig], api_keys: Iterable[str]) -> None:
    """Raises ConfigError where two tenants have one name, or one key two owners."""
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
    """Tenants from a list of tables, or from JSON of one (how they come in the environment). Raises ConfigError."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "[]")
        except json.JSONDecodeError as error:
            raise ConfigError("gateway.tenants is not JSON", param="gateway.tenants") from error
    if not isinstance(value, list | tuple):
        raise ConfigError("gateway.tenants must be tables: [[gateway.tenants]]", param="gateway.tenants")
    return tuple(one if isinstance(one, TenantConfig) else TenantConfig.of(one) for one in value)


def write_tenants(tenants: Iterable[TenantConfig]) -> str:
    """Inverse of `read_tenants`, as JSON; settings at None are left out."""
    tables = [{key: value for key, value in asdict(tenant).items() if value is not None} for tenant in tenants]
    return json.dumps(tables, separators=(",", ":"))
