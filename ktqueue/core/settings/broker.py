"""Settings of the broker: Redis, and the promises that are kept in it."""

import re
from dataclasses import dataclass
from typing import Literal

from ktqueue.core.errors import ConfigError
from ktqueue.core.settings.setting import check_order, check_settings, setting

Durability = Literal["process", "fsync"]
PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """Redis and the promises kept in it. Times in seconds, sizes in bytes."""

    url: str | None = setting(
        None,
        "Redis to use.",
        details="`redis://`, `rediss://`, `unix://`, `redis+sentinel://` or `redis+cluster://`: see "
        "[Redis](../guides/redis.md). Without it, the private server of the state folder is used.",
        shown="KTQUEUE_BROKER_URL, else that of `ktqueue up` in the state directory",
        flags=("--redis-url",),
        metavar="URL",
        panel="Settings",
    )
    password_file: str | None = setting(None, "A file with the password for `broker.url`, which then contains none.")
    state_dir: str = setting(
        ".ktqueue",
        "Folder of the private Redis.",
        details="It has the private server's data, password and socket, and the logs of `ktqueue up`: see "
        "[the state folder](../guides/operations.md#the-state-folder).",
        metavar="DIR",
        panel="Settings",
    )
    prefix: str = setting("ktq", "Beginning of every key. It separates installations that share a server.")
    durability: Durability = setting(
        "process", "What an acknowledged job survives: `process` a crash of Redis, `fsync` also a crash of its host."
    )
    lease_seconds: float = setting(
        2.0,
        "A worker without a heartbeat for so long is considered dead, and other workers continue its jobs.",
        details="If its process has ended, that is found after half of this time.",
        at_least=0.01,
    )
    max_attempts: int = setting(
        3,
        "A job fails after so many workers in a row died while running it, without a new token.",
        details="It also fails after ten times as many deaths in all. A batch fails after so many runs in a row that "
        "ended by an unexpected error or killed the control worker, without progress.",
        at_least=1,
    )
    priority_seconds: float = setting(
        30.0, "Seconds of waiting that one step of a job's `priority` is worth.", at_least=0
    )
    batch_share: int = setting(
        8, "One of so many free rows is given to batch jobs, however many interactive jobs wait.", at_least=1
    )
    max_queued_interactive: int = setting(
        2_000, "Interactive jobs of a model that may wait. More are refused with 429.", at_least=1
    )
    max_queued_batch: int = setting(100_000, "Batch jobs of a model that may wait.", at_least=1)
    max_queued_bytes: int = setting(1 << 30, "Bytes of all waiting requests. More are refused with 429.")
    max_request_bytes: int = setting(4 << 20, "Largest request that is stored.", at_least=1)
    job_ttl: float = setting(3_600.0, "How long a job's record is kept after its end.", at_least=0.01)
    journal_ttl: float = setting(600.0, "How long a job's tokens are kept after its end.", at_least=0.01)
    failed_ttl: float = setting(
        86_400.0,
        "How long a failed job's record and request are kept, for `ktqueue jobs retry`.",
        at_least=0.01,
    )
    max_failed_bytes: int = setting(
        64 << 20, "Bytes of the requests of failed jobs. Beyond it the oldest are deleted.", at_least=0
    )
    memory_share: float = setting(
        0.8,
        "Share of the server's `maxmemory` that clients may fill. Then new jobs are refused with 503.",
        details="The rest is reserved for workers.",
        at_least=0.01,
        at_most=1,
    )
    tenant_memory_share: float = setting(
        0.25,
        "Share of that memory for the jobs of one tenant without `max_stored_bytes`.",
        at_least=0.01,
        at_most=1,
    )
    idempotency_ttl: float = setting(86_400.0, "How long an idempotency key is remembered.", at_least=0.01)
    response_ttl: float = setting(86_400.0, "How long a stored response of /v1/responses is kept.", at_least=0.01)
    max_response_bytes: int = setting(
        32 << 20, "Stored responses of one tenant. Beyond it the oldest are deleted.", at_least=1
    )
    max_open_batches: int = setting(
        64,
        "Batches of a tenant that have not ended. More are refused with 429.",
        details="Without API keys, addresses have even shares: see [batches](../guides/batches.md#batches-over-http).",
        at_least=1,
    )
    batch_ttl: float = setting(30 * 86_400.0, "How long a batch's record is kept after its end.", at_least=0.01)
    model_ttl: float = setting(
        3_600.0,
        "How long a model is known, and its jobs are accepted, after its last worker left.",
        at_least=0.01,
    )
    digest_wait: float = setting(
        600.0,
        "How long a started job waits for a worker with its model's digest, while others serve the model.",
        details="Then it fails with `model_changed`: see [upgrades](../guides/upgrades.md).",
        at_least=0.01,
    )
    connect_timeout: float = setting(2.0, "For a new connection to Redis.", at_least=0.01)
    operation_timeout: float = setting(10.0, "For one call to Redis, retries included.", at_least=0.01)

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        check_settings("broker", self)
        check_order("broker", self, "max_request_bytes", "max_queued_bytes")
        if self.password_file is not None and self.url is None:
            raise ConfigError(
                "broker.password_file is the password for broker.url, which is not set", param="broker.password_file"
            )
        if not PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                f"broker.prefix must be 1 to 64 letters, digits or _ . -, got {self.prefix!r}",
                param="broker.prefix",
                value=self.prefix,
            )
