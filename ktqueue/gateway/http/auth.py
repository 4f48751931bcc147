"""API keys, sent as `Authorization: Bearer KEY` or `X-Api-Key: KEY`, and the tenants that they belong to.

The settings have only hashes of keys. Nothing here stores or logs a key.
"""

import hmac
from dataclasses import dataclass
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.requests import Request

from ktqueue.broker.job_record import JobRecord, job_not_found
from ktqueue.core.config import GatewayConfig
from ktqueue.core.errors import AuthenticationFailed
from ktqueue.core.tenants import DEFAULT_TENANT, TenantLimits
from ktqueue.gateway.http.connections import client_address

OPEN_PATHS = frozenset({"/healthz", "/health", "/ping", "/readyz"})  # probes send no keys
PAGE_PATHS = frozenset({"/", "/page.css", "/page.js"})  # a browser has no key before the page has asked for it


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends a request. `alone`: sees only its own jobs. This holds for everybody if there are API keys.

    `caller`: the client's address if there are no keys. Callers of a tenant take turns in the queue.

    `limits`: those of a tenant in the settings. None for the operator, and for everybody if there are no keys: their
    jobs are not counted.
    """

    name: str = DEFAULT_TENANT
    alone: bool = False
    limits: TenantLimits | None = None
    caller: str = ""

    def check_sees(self, record: JobRecord) -> JobRecord:
        """The record, if this tenant may see it. Else raises JobNotFound, with the same text as for an unknown job."""
        if self.alone and record.tenant != self.name:
            raise job_not_found(record.id)
        return record

    @property
    def view(self) -> str | None:
        """The tenant whose jobs are listed, or None for all jobs."""
        return self.name if self.alone else None


class ApiKeys:
    """The API keys that are accepted. If there are none, everybody is accepted."""

    def __init__(self, config: GatewayConfig) -> None:
        default = Tenant(alone=True)
        self._owners = [(bytes.fromhex(key_hash), default) for key_hash in config.api_keys]
        for settings in config.tenants:
            tenant = Tenant(settings.name, alone=True, limits=settings)
            self._owners += [(bytes.fromhex(key_hash), tenant) for key_hash in settings.keys]

    def tenant(self, path: str, headers: Headers, host: str) -> Tenant:
        """The tenant whose key is in the headers. `host`: the client's address.

        Raises AuthenticationFailed without a key, unless `path` is open.
        """
        if not self._owners or path in OPEN_PATHS | PAGE_PATHS:
            return Tenant(caller=client_address(host))
        key = _sent_key(headers)
        if key is None:
            raise AuthenticationFailed(
                "no API key: send Authorization: Bearer KEY, or X-Api-Key: KEY", param="Authorization"
            )
        owner = self._owner(key)
        if owner is None:
            raise AuthenticationFailed("this API key is not known", param="Authorization")
        return owner

    def accepts(self, headers: Headers) -> bool:
        """Whether the headers have a known key, or no key is needed."""
        key = _sent_key(headers)
        return not self._owners or (key is not None and self._owner(key) is not None)

    def _owner(self, key: str) -> Tenant | None:
        digest = sha256(key.encode()).digest()
        # Compares with every hash in constant time, so that the duration tells nothing about the keys.
        owners = [owner for key_hash, owner in self._owners if hmac.compare_digest(digest, key_hash)]
        return owners[0] if owners else None


def tenant_of(request: Request) -> Tenant:
    """The tenant of a request, as `Edge` stored it."""
    tenant = request.scope["tenant"]
    assert isinstance(tenant, Tenant)
    return tenant


def _sent_key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None
