"""All settings of a process: built once from defaults, a TOML file, the environment (KTQUEUE_SECTION_NAME) and flags.

Later sources win. An unknown key is an error that suggests the nearest known one.
"""

import difflib
import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from ktqueue.core.errors import ConfigError
from ktqueue.core.settings.broker import BrokerConfig
from ktqueue.core.settings.engine import EngineConfig
from ktqueue.core.settings.gateway import GatewayConfig
from ktqueue.core.settings.processes import BridgeConfig, ControlConfig, LogConfig, WorkerConfig
from ktqueue.core.settings.profile import ProfileConfig
from ktqueue.core.settings.setting import Setting, settings_of
from ktqueue.core.settings.storage import StorageConfig
from ktqueue.core.tenants import TenantConfig, read_tenants, write_tenants
from ktqueue.core.units import parse_bytes

__all__ = [
    "BridgeConfig", "BrokerConfig", "Config", "ControlConfig", "EngineConfig", "GatewayConfig", "LogConfig",
    "ProfileConfig", "StorageConfig", "WorkerConfig", "all_settings", "config_environment", "config_sources",
    "load_config",
]  # fmt: skip

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "KTQUEUE_"
REMOVED = frozenset({"engine.deferred_experts", "engine.two_batch_overlap"})  # ignored with a warning for one release
STANDALONE = frozenset({"KTQUEUE_ISA"})  # read by the compiled kernels: limits the instruction set
_KINDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", tuple: "a list of texts"}
Values = dict[str, dict[str, tuple[Any, str]]]  # by section and key: the value, and where it is from


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of one process."""

    broker: BrokerConfig = field(default_factory=BrokerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


_SECTIONS: dict[str, type] = get_type_hints(Config)
_SETTINGS: dict[str, dict[str, Setting]] = {
    section: {described.name: described for described in settings_of(section, kind)}
    for section, kind in _SECTIONS.items()
}


def all_settings() -> list[Setting]:
    """The description of every setting, section by section."""
    return [described for section in _SETTINGS.values() for described in section.values()]


def load_config(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Build the Config. `overrides` maps section to {key: value}; None values are ignored.

    Raises ConfigError naming the source, the key and the value.
    """
    values = _collect(path, environment, overrides)
    return Config(**{section: _section(section, kind, values[section]) for section, kind in _SECTIONS.items()})


def config_sources(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, str]:
    """Where each setting that is not a default is from: key to flag, variable or file. Raises ConfigError."""
    values = _collect(path, environment, overrides)
    return {f"{section}.{key}": source for section, settings in values.items() for key, (_, source) in settings.items()}


def config_environment(config: Config) -> dict[str, str]:
    """The variables from which `load_config` builds an equal Config. Settings at their default are left out.

    This is how settings reach a child process.
    """
    variables = {}
    for described in all_settings():
        value = getattr(getattr(config, described.section), described.name)
        if value != described.default:
            variables[f"{ENVIRONMENT_PREFIX}{described.section}_{described.name}".upper()] = _text(value)
    return variables


def _section(section: str, kind: type, settings: dict[str, tuple[Any, str]]) -> Any:
    try:
        return kind(**{key: value for key, (value, _) in settings.items()})
    except ConfigError as error:
        key = (error.param or "").removeprefix(f"{section}.").partition(".")[0]
        raise _with_source(error, settings[key][1]) if key in settings else error from None


def _with_source(error: ConfigError, source: str) -> ConfigError:
    """The error with its source: a file, a variable or a flag."""
    return ConfigError(f"{source}: {error.message}", param=error.param, limit=error.limit, value=error.value)


def _text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return write_tenants(value) if isinstance(value[0], TenantConfig) else ",".join(value)


def _collect(
    path: str | Path | None, environment: Mapping[str, str] | None, overrides: Mapping[str, Mapping[str, Any]] | None
) -> Values:
    values: Values = {name: {} for name in _SECTIONS}
    if path is not None:
        _from_file(Path(path), values)
    for name, text in (environment or {}).items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in STANDALONE:
            section, _, key = name[len(ENVIRONMENT_PREFIX) :].lower().partition("_")
            _put(values, section, key, text, f"environment variable {name}")
    for section, settings in (overrides or {}).items():
        for key, value in settings.items():
            if value is not None:
                described = _SETTINGS.get(section, {}).get(key)
                flags = described.about.flags if described else ()
                _put(values, section, key, value, flags[0].partition("/")[0] if flags else "flag")
    return values


def _from_file(path: Path, values: Values) -> None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    for section, settings in document.items():
        if not isinstance(settings, dict):
            if section in _SECTIONS:
                raise ConfigError(f"{path}: {section} must be a table, [{section}], got {settings!r}", param=section)
            homes = " or ".join(f"[{home}]" for home, known in _SETTINGS.items() if section in known)
            wanted = f"{section} belongs below {homes}" if homes else "every setting belongs below a section: [engine]"
            raise ConfigError(f"{path}: {section} = {settings!r} is in no section; {wanted}", param=section)
        for key, value in settings.items():
            _put(values, section, key, value, str(path))


def _put(values: Values, section: str, key: str, value: Any, source: str) -> None:
    if section not in _SECTIONS:
        raise ConfigError(f"{source}: unknown section {section!r}{_nearest(section, _SECTIONS)}", param=section)
    if f"{section}.{key}" in REMOVED:
        logger.warning("%s: %s.%s was removed and is ignored", source, section, key)
        return
    described = _SETTINGS[section].get(key)
    if described is None:
        nearest = _nearest(key, _SETTINGS[section])
        raise ConfigError(f"{source}: unknown key {section}.{key}{nearest}", param=f"{section}.{key}")
    try:
        values[section][key] = _convert(value, described), source
    except ConfigError as error:  # of a tenant
        raise _with_source(error, source) from None
    except (TypeError, ValueError) as error:
        message = f"{source}: {described.key} must be {_wanted(described)}, got {value!r}"
        raise ConfigError(message, param=described.key, value=str(value)) from error


def _wanted(described: Setting) -> str:
    """What a setting must be, in words."""
    if described.is_size:
        wanted = "a size such as 256MiB"
    elif described.choices:
        wanted = f"one of {', '.join(described.choices)}"
    else:
        wanted = _KINDS[get_origin(described.type) or described.type]
    return wanted if described.about.none_word is None else f"{wanted}, or {described.about.none_word}"


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _convert(value: Any, described: Setting) -> Any:
    kind = described.type
    if value == described.about.none_word:
        return None
    if kind == tuple[TenantConfig, ...]:
        return read_tenants(value)
    if kind == tuple[str, ...]:
        parts = [part for part in value.split(",") if part] if isinstance(value, str) else value
        return tuple(_exact(part, str) for part in (parts if isinstance(parts, tuple) else _exact(parts, list)))
    if kind is bool:
        table = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        return table[value.lower()] if isinstance(value, str) and value.lower() in table else _exact(value, bool)
    if kind is int:
        if described.is_size:
            return parse_bytes(value)
        return int(value) if isinstance(value, str) else _exact(value, int)
    if kind is float:
        return float(value) if isinstance(value, str | int) and not isinstance(value, bool) else _exact(value, float)
    return _exact(value, str)


def _exact(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}")
    return value
