"""Settings: frozen, built once from a TOML file, the environment (KTQUEUE_SECTION_NAME) and flags.

Later sources win: defaults, file, environment, overrides. An unknown key is an error that suggests
the nearest known one.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ktqueue.core.errors import ConfigError
from ktqueue.core.setting_checks import at_least, between, networks, one_of, origins
from ktqueue.core.tenants import TenantConfig, check_hashes, check_tenants, read_tenants, write_tenants
from ktqueue.core.units import parse_bytes

ENVIRONMENT_PREFIX = "KTQUEUE_"
DURABILITIES = ("process", "fsync")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
STANDALONE = frozenset({"KTQUEUE_ISA"})  # read by the compiled kernels: caps the instruction set


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """Redis and the promises kept in it. Times in seconds, sizes in bytes."""

    url: str | None = None  # None: find or start a private server
    password_file: str | None = None  # holds the password of `url`, which then has none
    state_dir: str = ".ktqueue"  # the private server's data, pid file and password
    prefix: str = "ktq"
    durability: str = "process"  # process | fsync: what is acknowledged survives a crash of Redis | of its host
    lease_seconds: float = 2.0
    max_attempts: int = 3
    priority_seconds: float = 30.0  # what one step of a job's priority is worth in seconds of waiting
    batch_share: int = 8  # one free row in so many is for batch, however much interactive work waits
    max_queued_interactive: int = 2_000
    max_queued_batch: int = 100_000
    max_queued_bytes: int = 1 << 30  # of all requests that wait
    max_request_bytes: int = 4 << 20
    job_ttl: float = 3_600.0  # job records, counted from the job's end
    journal_ttl: float = 600.0  # journals, counted from the job's end
    failed_ttl: float = 86_400.0  # records of failed jobs with their requests, which `ktqueue jobs retry` sends again
    max_failed_bytes: int = 64 << 20  # of these requests; beyond it the oldest are dropped
    memory_share: float = 0.8  # the part of the server's maxmemory that clients may fill; the rest is for workers
    tenant_memory_share: float = 0.25  # the part of this that one tenant may, unless it has max_stored_bytes
    idempotency_ttl: float = 86_400.0
    model_ttl: float = 3_600.0  # a model stays known this long after its last worker left
    digest_wait: float = 600.0  # a job that none of its model's workers can go on with waits so long for one that can
    connect_timeout: float = 2.0
    operation_timeout: float = 10.0

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        for name in ("lease_seconds", "job_ttl", "journal_ttl", "failed_ttl", "idempotency_ttl", "model_ttl"):
            at_least(self, name, 0.01)
        at_least(self, "connect_timeout", 0.01)
        at_least(self, "operation_timeout", 0.01)
        for name in ("max_attempts", "batch_share", "max_queued_interactive", "max_queued_batch", "max_request_bytes"):
            at_least(self, name, 1)
        at_least(self, "priority_seconds", 0)
        at_least(self, "digest_wait", 0.01)
        at_least(self, "max_queued_bytes", self.max_request_bytes)
        at_least(self, "max_failed_bytes", 0)
        for name in ("memory_share", "tenant_memory_share"):
            between(self, name, 0.01, 1)
        one_of(self, "durability", DURABILITIES, "broker")
        if self.password_file is not None and self.url is None:
            raise ConfigError(
                "broker.password_file is the password for broker.url, which is not set", param="broker.password_file"
            )
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.prefix):
            raise ConfigError(
                f"broker.prefix must be 1 to 64 letters, digits or _ . -, got {self.prefix!r}",
                param="broker.prefix",
                value=self.prefix,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One worker's engine. None: chosen from the model and the machine."""

    model: str = "demo"  # "demo", a .gguf file, or a Hugging Face folder
    served_model_name: str | None = None
    rules: str | None = None  # name of a shipped rule file, or a path; None: default
    tokenizer: str | None = None  # HF folder; None: from the model
    device: str = "cpu"
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    threads: int | None = None
    pin_threads: str = "auto"  # auto | on | off
    batch_invariant: bool | None = None  # a token's result is the same in every batch; None: on a CPU yes, on a GPU no
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None  # of one step; None: 512 on a CPU, 8,192 on a GPU
    page_size: int = 16  # tokens
    kv_cache_bytes: int | None = None  # None: chosen from the memory that is there
    num_pages: int | None = None  # overrides kv_cache_bytes
    kv_cache_dtype: str = "auto"  # auto (as dtype) | fp8
    enable_prefix_caching: bool = True
    batch_share: int = 8  # one row in so many is not taken from a batch job that runs, however much else waits
    host_memory_utilization: float = 0.5  # the part of the host's free memory that the cache on a CPU may take
    gpu_memory_utilization: float = 0.9  # the part of a GPU's memory that this worker may fill
    gpu_expert_memory_bytes: int = 0  # GPU memory for experts
    attention_backend: str = "auto"  # auto | flashinfer | triton | torch: on a GPU
    cuda_graphs: bool = True
    handoff: str = "auto"  # auto | flags | host_functions | direct: routed tokens from the GPU to the CPU and back
    expert_streaming: str = "auto"  # auto | on | off: steps copy experts to the GPU
    expert_prefetch: bool = True  # decode on a GPU fetches into the CPU's caches what the next layer will probably use

    def batch_floor(self, rows: int) -> int:
        """How many of so many rows interactive work takes from no batch job."""
        return -(-rows // self.batch_share)

    @property
    def step_tokens(self) -> int:
        """Tokens of one step at most. A GPU streams experts once a step, however many tokens there are."""
        return self.max_num_batched_tokens or (512 if self.device == "cpu" else 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a worker process ends. Times in seconds."""

    drain_seconds: float = 10.0  # running jobs may finish this long after SIGTERM; the rest goes back to the queue
    stall_seconds: float = 60.0  # a single step that takes longer means that the device hangs: the worker exits


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The HTTP front. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # SHA-256 hashes; none here nor of tenants: no authentication
    tenants: tuple[TenantConfig, ...] = ()
    cors_origins: tuple[str, ...] = ()  # whose pages may call the API from a browser; "*": any
    max_body_bytes: int = 8 << 20
    max_bodies_bytes: int = 64 << 20  # of bodies that are being read, in all
    max_connections: int = 2_000  # requests that are answered at once
    max_sockets: int | None = None  # open TCP connections; None: twice max_connections, and 64
    max_sockets_per_address: int = 512  # 0: no limit
    trusted_addresses: tuple[str, ...] = ("127.0.0.1", "::1")  # addresses or networks without that limit
    probe_port: int | None = None  # a second listener, for probes and metrics alone; 0: any free port
    max_url_bytes: int = 8 << 10
    max_header_bytes: int = 16 << 10  # request line, headers and trailers together
    max_headers: int = 100
    header_timeout: float = 10.0  # from the connection, or a later request's first byte, to the end of the headers
    body_timeout: float = 60.0  # from the end of the headers to the end of the body
    min_body_rate: int = 1 << 10  # bytes per second that a body must come at, on average, after its first 5 s
    keep_alive_timeout: float = 15.0  # between two requests of a connection
    heartbeat_seconds: float = 15.0
    first_event_wait: float = 2.0  # an error within this time still gets its own HTTP status
    max_mailbox_bytes: int = 1 << 20  # a slower reader replays from the journal
    stall_seconds: float = 60.0  # a client that neither sends nor reads for so long is dropped
    drain_seconds: float = 10.0  # open streams may end by themselves before the gateway stops

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        check_hashes(self.api_keys, "gateway.api_keys", "gateway.api_keys")
        check_tenants(self.tenants, self.api_keys)
        for name in ("header_timeout", "body_timeout", "keep_alive_timeout", "stall_seconds"):
            at_least(self, name, 0.01, "gateway")
        for name in ("max_headers", "max_connections", "min_body_rate"):
            at_least(self, name, 1, "gateway")
        for name in ("max_header_bytes", "max_url_bytes"):
            at_least(self, name, 256, "gateway")
        at_least(self, "max_sockets_per_address", 0, "gateway")
        at_least(self, "max_bodies_bytes", self.max_body_bytes, "gateway")
        if self.max_sockets is not None:
            at_least(self, "max_sockets", 1, "gateway")
        networks(self.trusted_addresses, "gateway.trusted_addresses")
        origins(self.cors_origins, "gateway.cors_origins")

    @property
    def socket_limit(self) -> int:
        """How many TCP connections may be open at once."""
        return 2 * self.max_connections + 64 if self.max_sockets is None else self.max_sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig:
    """Jobs of arq's clients. Times in seconds."""

    enabled: bool = False  # `ktqueue up` runs one
    redis_url: str | None = None  # where arq's clients are; None: the broker's
    queue: str = "ktqueue:arq"  # not arq's default: whoever serves a queue fails jobs that it does not know
    max_jobs: int = 64  # that run at once; the rest waits in arq's queue
    poll_seconds: float = 0.05
    keep_result: float = 3_600.0  # arq blocks a job's id for so long, too
    tenant: str = "default"

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        at_least(self, "max_jobs", 1, "bridge")
        at_least(self, "poll_seconds", 0.001, "bridge")
        at_least(self, "keep_result", 0.01, "bridge")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """Housekeeping by arq: webhooks, batch files, retention. Times in seconds."""

    enabled: bool = False  # `ktqueue up` runs one
    redis_url: str | None = None  # of arq's queue; None: the broker's
    queue: str = "ktqueue:control"
    crontab: tuple[str, ...] = ("* * * * * batches", "17 3 * * * retention")  # when, in five fields, and what
    batch_dir: str | None = None  # its in/ is run, out/ gets answers, done/ and failed/ the inputs; None: no batches
    keep_files: float = 30 * 86_400.0  # in out/, done/ and failed/, from their last change
    webhook_secret: str | None = field(default=None, repr=False)  # None: no webhooks
    webhook_hosts: tuple[str, ...] = ()  # host or host:port that may be private, and without TLS
    webhook_ca_certs: str | None = None  # PEM file of authorities that are trusted beside the public ones
    webhook_attempts: int = 8
    webhook_pause: float = 2.0  # before the second attempt; doubles, to two minutes at most
    webhook_timeout: float = 10.0

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        at_least(self, "keep_files", 0, "control")
        at_least(self, "webhook_attempts", 1, "control")
        at_least(self, "webhook_pause", 0, "control")
        at_least(self, "webhook_timeout", 0.01, "control")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What processes log, and how much of it `ktqueue up` keeps. Sizes in bytes."""

    format: str = "text"  # text | json: an object a line
    level: str = "info"  # debug | info | warning | error
    max_bytes: int = 16 << 20  # of a log file under the state folder; one older file of that size is kept beside it

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        one_of(self, "format", LOG_FORMATS, "log")
        one_of(self, "level", LOG_LEVELS, "log")
        at_least(self, "max_bytes", 4096, "log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of one process."""

    broker: BrokerConfig = field(default_factory=BrokerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    log: LogConfig = field(default_factory=LogConfig)


_SECTIONS: dict[str, type] = {
    "broker": BrokerConfig,
    "engine": EngineConfig,
    "worker": WorkerConfig,
    "gateway": GatewayConfig,
    "bridge": BridgeConfig,
    "control": ControlConfig,
    "log": LogConfig,
}


def load_config(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Build the Config. `overrides` maps section to {key: value}; None values are left out.

    Raises ConfigError naming the source, the key and the value.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    if path is not None:
        _from_file(Path(path), values)
    for name, text in (environment or {}).items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in STANDALONE:
            section, _, key = name[len(ENVIRONMENT_PREFIX) :].lower().partition("_")
            _put(values, section, key, text, f"environment variable {name}")
    for section, settings in (overrides or {}).items():
        for key, value in settings.items():
            if value is not None:
                _put(values, section, key, value, "flag")
    return Config(**{name: kind(**values[name]) for name, kind in _SECTIONS.items()})


def config_environment(config: Config) -> dict[str, str]:
    """The variables from which `load_config` builds an equal Config: how settings reach a child process.

    Settings at their default are left out.
    """
    variables = {}
    for section, kind in _SECTIONS.items():
        settings, defaults = getattr(config, section), kind()
        for one in fields(kind):
            value = getattr(settings, one.name)
            if value != getattr(defaults, one.name):
                variables[f"{ENVIRONMENT_PREFIX}{section}_{one.name}".upper()] = _text(value)
    return variables


def _text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return write_tenants(value) if isinstance(value[0], TenantConfig) else ",".join(value)


def _from_file(path: Path, values: dict[str, dict[str, Any]]) -> None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for section, settings in document.items():
        if not isinstance(settings, dict):
            raise ConfigError(f"{path}: {section} must be a table such as [engine]", param=section)
        for key, value in settings.items():
            _put(values, section, key, value, str(path))


def _put(values: dict[str, dict[str, Any]], section: str, key: str, value: Any, source: str) -> None:
    if section not in _SECTIONS:
        raise ConfigError(f"{source}: unknown section {section!r}{_nearest(section, _SECTIONS)}", param=section)
    names = {f.name for f in fields(_SECTIONS[section])}
    if key not in names:
        raise ConfigError(f"{source}: unknown key {section}.{key}{_nearest(key, names)}", param=f"{section}.{key}")
    hint = get_type_hints(_SECTIONS[section])[key]
    byte_size = key.endswith("_bytes")
    try:
        values[section][key] = _convert(value, hint, byte_size=byte_size)
    except (TypeError, ValueError) as error:
        wanted = "a size such as 256MiB" if byte_size else f"of type {getattr(hint, '__name__', hint)}"
        raise ConfigError(
            f"{source}: {section}.{key} must be {wanted}, got {value!r}", param=f"{section}.{key}", value=str(value)
        ) from error


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _convert(value: Any, hint: Any, *, byte_size: bool) -> Any:
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    if hint == tuple[TenantConfig, ...]:
        return read_tenants(value)
    if hint == tuple[str, ...]:
        parts = [part for part in value.split(",") if part] if isinstance(value, str) else value
        return tuple(str(part) for part in parts)
    kind = kinds[0]
    if kind is bool:
        table = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        return table[value.lower()] if isinstance(value, str) and value.lower() in table else _exact(value, bool)
    if kind is int:
        if byte_size:
            return parse_bytes(value)
        return int(value) if isinstance(value, str) else _exact(value, int)
    if kind is float:
        return float(value) if isinstance(value, str | int) and not isinstance(value, bool) else _exact(value, float)
    return _exact(value, str)


def _exact(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}")
    return value
