"""Settings of the other processes: workers, the bridge, the control worker, and what all of them log."""

import re
from dataclasses import dataclass
from typing import Literal

from ktqueue.core.errors import ConfigError
from ktqueue.core.settings.setting import check_settings, setting
from ktqueue.core.tenants import TENANT_NAME

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
_HOST = re.compile(r"[^\s/@?#A-Z]+")  # no URL: a webhook's host is compared with it


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a worker process ends. Times in seconds."""

    drain_seconds: float = setting(
        10.0,
        "Running jobs may finish within this time after SIGTERM. The rest go back to the queue.",
        details="That costs them no attempt.",
    )
    stall_seconds: float = setting(
        60.0, "A step that takes longer means that the device hangs, so the worker exits.", at_least=0.01
    )

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        check_settings("worker", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig:
    """The bridge for arq clients. Times in seconds."""

    enabled: bool = setting(False, "`ktqueue up` runs a bridge (`--bridge`).")
    redis_url: str | None = setting(None, "The Redis of the arq clients.", shown="the broker's")
    queue: str = setting(
        "ktqueue:arq",
        "The arq queue that is served.",
        details="It is not arq's default `arq:queue`, because workers of other programs there would fail our jobs.",
    )
    max_jobs: int = setting(64, "Jobs that a bridge runs at once. More wait in arq's queue.", at_least=1)
    poll_seconds: float = setting(0.05, "How often arq's queue is polled.", at_least=0.001)
    keep_result: float = setting(
        3_600.0,
        "How long results are kept.",
        details="For that time arq accepts no other job with the same id.",
        at_least=0.01,
    )
    tenant: str = setting("default", "The tenant that its jobs belong to.")

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        check_settings("bridge", self)
        if TENANT_NAME.fullmatch(self.tenant) is None:
            raise ConfigError.must_be("bridge.tenant", "1 to 64 letters, digits or _ . -", self.tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """The control worker: batches, webhooks, batch files, retention. Times in seconds."""

    enabled: bool = setting(
        True, "`ktqueue up` runs a control worker (`--no-control`: none, so that batches wait for another)."
    )
    redis_url: str | None = setting(
        None, "The Redis of its queue; with a cluster, a single server.", shown="the broker's"
    )
    queue: str = setting("ktqueue:control", "Its arq queue.")
    crontab: tuple[str, ...] = setting(
        ("* * * * * batches", "17 * * * * retention"),
        "When to run its chores: minute, hour, day, month, weekday as in a crontab, then the chore.",
        details="A field may be `*`, `*/5`, `3` or `1-5`.",
    )
    batch_dir: str | None = setting(
        None,
        "Folder whose `in/*.jsonl` are run as batches; the same folder for all control workers.",
        details="`out/` gets the answers, `done/` and `failed/` the inputs.",
    )
    keep_files: float = setting(
        30 * 86_400.0,
        "How long files in its `out`, `done` and `failed` are kept after their last change.",
        at_least=0,
    )
    webhook_secret: str | None = setting(
        None,
        "Signs webhooks: `whsec_` and base64, or any text. Without it, requests with a webhook are refused.",
        secret=True,
    )
    webhook_hosts: tuple[str, ...] = setting(
        (), "`host` or `host:port` that webhooks may call on a private network and without TLS."
    )
    webhook_ca_certs: str | None = setting(None, "PEM file of authorities that webhooks trust besides the public ones.")
    webhook_attempts: int = setting(8, "Most calls for one webhook.", at_least=1)
    webhook_pause: float = setting(
        2.0, "Pause before the second call; it doubles each time, to two minutes at most.", at_least=0
    )
    webhook_timeout: float = setting(10.0, "For one call.", at_least=0.01)

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        check_settings("control", self)
        for host in self.webhook_hosts:
            if _HOST.fullmatch(host) is None:
                raise ConfigError.must_be("control.webhook_hosts", "host or host:port, in lower case", host)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What processes log, and how much of it `ktqueue up` keeps. Sizes in bytes."""

    format: LogFormat = setting("text", "`text`, or `json`: one object a line.")
    level: LogLevel = setting("info", "`debug`, `info`, `warning` or `error`; the access log has the level `info`.")
    max_bytes: int = setting(
        16 << 20,
        "Size of a log file in the state folder.",
        details="One older file of up to twice that size is kept beside it.",
        at_least=4096,
    )

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        check_settings("log", self)
