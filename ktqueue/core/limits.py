"""What a tenant may use at once and by the minute. Plain numbers; who counts is the broker.

A rate is kept by the generic cell rate algorithm: after a pause a tenant may use `burst` at once, and from then on so
many a minute, evenly.
"""

from dataclasses import dataclass, fields

from ktqueue.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """None: no limit. A burst that is not given is a whole minute's worth.

    Live jobs wait or run; queued ones wait. Queued bytes are those of requests that wait; stored bytes are those of
    all that Redis keeps of the tenant's jobs: requests, and records and journals of ended jobs for as long as they are
    kept. Tokens are those of prompts and answers together.

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
        for one in fields(TenantLimits):
            value = getattr(self, one.name)
            if value is not None and (type(value) is not int or not 1 <= value <= 10**12):
                raise ConfigError(
                    f"a tenant's {one.name} must be a positive integer, got {value!r}",
                    param=f"gateway.tenants.{one.name}",
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
        """Requests at once after a pause."""
        return self.requests_burst or self.requests_per_minute

    @property
    def most_tokens(self) -> int | None:
        """Tokens at once after a pause."""
        return self.tokens_burst or self.tokens_per_minute
