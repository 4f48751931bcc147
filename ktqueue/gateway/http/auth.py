"""Who calls: an API key as `Authorization: Bearer KEY` or `X-Api-Key: KEY`, and the tenant that it belongs to.

Keys are known by their hashes alone, and nothing here keeps or logs one.
"""

import hmac
from dataclasses import dataclass
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.requests import Request

from ktqueue.broker.jobs import JobRecord, not_found
from ktqueue.core.config import GatewayConfig
from ktqueue.core.errors import AuthenticationFailed
from ktqueue.core.limits import TenantLimits
from ktqueue.core.tenants import DEFAULT_TENANT

OPEN_PATHS = frozenset({"/healthz", "/health", "/ping", "/readyz"})  # probes carry no keys


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who makes a request. `alone`: sees no other tenant's jobs; so is everybody once there are keys.

    `limits`, of a tenant of the settings, may be without a limit; the operator and, without keys, everybody have none,
    and their jobs are not counted.
    """

    name: str = DEFAULT_TENANT
    alone: bool = False
    limits: TenantLimits | None = None

    def check_sees(self, record: JobRecord) -> JobRecord:
        """The record, if it is this tenant's to see. Raises JobNotFound, in the words of a job that is not there."""
        if self.alone and record.tenant != self.name:
            raise not_found(record.id)
        return record

    @property
    def view(self) -> str | None:
        """The tenant whose jobs are listed; None: all jobs."""
        return self.name if self.alone else None


class ApiKeys:
    """The API keys that are let in; none given: everybody is."""

    def __init__(self, config: GatewayConfig) -> None:
        default = Tenant(alone=True)
        self._owners = [(bytes.fromhex(one), default) for one in config.api_keys]
        for settings in config.tenants:
            tenant = Tenant(settings.name, alone=True, limits=settings)
            self._owners += [(bytes.fromhex(one), tenant) for one in settings.keys]

    def tenant(self, path: str, headers: Headers) -> Tenant:
        """Whose key a header carries. Raises AuthenticationFailed without one, unless `path` is open to all."""
        if not self._owners or path in OPEN_PATHS:
            return Tenant()
        key = _given(headers)
        if key is None:
            raise AuthenticationFailed(
                "no API key: give it as Authorization: Bearer KEY, or as X-Api-Key: KEY", param="Authorization"
            )
        owner = self._owner(key)
        if owner is None:
            raise AuthenticationFailed("this API key is not known", param="Authorization")
        return owner

    def known(self, headers: Headers) -> bool:
        """Whether a header carries a known key, or none is asked for."""
        key = _given(headers)
        return not self._owners or (key is not None and self._owner(key) is not None)

    def _owner(self, key: str) -> Tenant | None:
        digest = sha256(key.encode()).digest()
        # Every hash is compared, in constant time: how long it takes does not tell which one was near.
        owners = [owner for known, owner in self._owners if hmac.compare_digest(digest, known)]
        return owners[0] if owners else None


def tenant_of(request: Request) -> Tenant:
    """The tenant that the edge found for a request."""
    tenant = request.scope["tenant"]
    assert isinstance(tenant, Tenant)
    return tenant


def _given(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None
