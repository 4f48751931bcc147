"""Limits of a tenant: at any moment and per minute. The broker does the counting.

Rates follow the generic cell rate algorithm: after a pause a tenant may use `burst` at once, and then a steady number
per minute.
"""

from dataclasses import dataclass, fields

from ktqueue.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """None means no limit. By default a burst is what the rate allows in one minute.

    Live jobs wait or run; queued jobs wait. Queued bytes are the sizes of waiting requests. Stored bytes are all that
    Redis keeps for the tenant's jobs: requests, and the records and journals of ended jobs while they are kept.
    Tokens are those of prompts and answers together.

    Raises ConfigError naming the field.
    """

    max_live_jobs: int | None = None
    max_queued_jobs: int | None = None
    max_queued_bytes: int | None = None
    max_stored_bytes: int | None = None
    requests_per_minute: int | None = None
    requests_burst: int | None = None
    tokens_per_minute: int | None = None
    tokens_burst: int | None = None

    def __post_init__(self) -> None:
        for limit in fields(TenantLimits):
            value = getattr(self, limit.name)
            if value is not None and (type(value) is not int or not 1 <= value <= 10**12):
                raise ConfigError(
                    f"a tenant's {limit.name} must be a positive integer, got {value!r}",
                    param=f"gateway.tenants.{limit.name}",
                    limit=1,
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
